"""The kernels of sampling equal their references, which are `ops.sampling`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops import sampling
from headrace.ops.triton import draw, penalties, slot_tables
from headrace.ops.triton.argmax import best, blocks
from headrace.ops.triton.logprobs import reference as logprobs_reference
from headrace.ops.triton.logprobs import report_logprobs
from headrace.ops.triton.slot_tables import SlotTables, begin_slots, make_tables
from headrace.ops.wire import INIT_FLOATS, INIT_INTS

SLOTS = 5
few = settings(max_examples=6, deadline=None)
vocabs = st.sampled_from([7, 2048, 5003])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def begun(rng: np.random.Generator, vocab: int, by_reference: bool = False) -> SlotTables:
    """Three slots with requests, over what others left there."""
    tables = make_tables(SLOTS, vocab, torch.device("cpu"))
    for table in tables[2:]:
        table.fill_(3)
    ids: list[NDArray[np.integer]] = []
    biases: list[NDArray[np.floating]] = []
    starts, ints, floats = [], [], []
    for _ in range(3):
        lengths = rng.integers(0, 2 * vocab, 4)
        starts.append([sum(len(part) for part in ids), sum(len(part) for part in biases)])
        ids.append(rng.integers(0, vocab, int(lengths.sum())))
        biases.append(rng.normal(size=int(lengths[2])))
        settings_of_slot = [rng.choice([0, 1, 3, 50]), *rng.integers(-(2**31), 2**31, 2), rng.choice([0, 5]), 3]
        ints.append([*settings_of_slot, *lengths])
        chances = [rng.choice([0.0, 0.7, 1.5]), rng.choice([1.0, 0.9, 0.3]), rng.choice([0.0, 0.05])]
        floats.append([*chances, *rng.choice([[1.0, 0.0, 0.0], [1.3, 0.2, 0.1]])])
    assert len(ints[0]) == len(INIT_INTS) and len(floats[0]) == len(INIT_FLOATS)
    arguments = (
        int32(4, 0, 2),
        torch.tensor(np.array(ints), dtype=torch.int32),
        torch.tensor(np.array(floats), dtype=torch.float32),
        torch.tensor(np.concatenate(ids), dtype=torch.int32),
        torch.tensor(np.concatenate(biases), dtype=torch.float32),
    )
    if by_reference:
        slot_tables._begin_reference(tables, *arguments)
    else:
        begin_slots(tables, *arguments, torch.tensor(starts, dtype=torch.int32), max(len(part) for part in ids))
    return tables


@few
@given(vocabs, st.integers(0, 99))
def test_a_slot_begins_anew_and_leaves_the_others_alone(vocab: int, seed: int) -> None:
    kernel = begun(np.random.default_rng(seed), vocab)
    expected = begun(np.random.default_rng(seed), vocab, by_reference=True)
    for name, one, other in zip(kernel._fields, kernel, expected):
        torch.testing.assert_close(one, other, msg=name)


@few
@given(vocabs, st.integers(0, 99))
def test_adjusted_logits_equal_the_reference(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = begun(rng, vocab)
    slots, positions = int32(4, -1, 0, 2), torch.from_numpy(rng.integers(0, 9, 4).astype(np.int32))
    mask_row = torch.from_numpy(rng.integers(-1, 2, 4).astype(np.int32))
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (2, -(-vocab // 32))).astype(np.int32))
    logits = torch.randn(4, vocab) * 5
    adjusted, expected, left = torch.zeros(4, vocab), torch.zeros(4, vocab), torch.empty(4, blocks(vocab))
    penalties.adjust(logits, tables, slots, positions, mask_row, bits, adjusted, left)
    penalties.reference(logits, tables, slots, positions, mask_row, bits, expected)
    torch.testing.assert_close(adjusted, expected)
    assert not adjusted[1].any()
    in_place = logits.clone()
    penalties.adjust(in_place, tables, slots, positions, mask_row, bits, in_place, left)
    assert torch.equal(in_place[[0, 2, 3]], adjusted[[0, 2, 3]]) and torch.equal(in_place[1], logits[1])


def test_banned_stops_may_be_drawn_where_a_mask_leaves_nothing_else() -> None:
    tables = make_tables(1, 40, torch.device("cpu"))
    tables.floats[0, INIT_FLOATS.index("repetition")] = 1
    tables.ints[0, INIT_INTS.index("min_tokens")], tables.ints[0, INIT_INTS.index("stop_len")] = 5, 1
    tables.stops[0, 3] = 1
    left = torch.empty(1, blocks(40))
    for bits, finite in ((int32(8, 0), [3]), (int32(24, 0), [4])):
        logits = torch.zeros(1, 40)
        penalties.adjust(logits, tables, int32(0), int32(0), int32(0), bits.view(1, 2), logits, left)
        assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == finite


@pytest.mark.parametrize("vocab", [1, 4095, 4097, 9000])
def test_the_best_id_is_the_lowest_of_equals_and_a_broken_row_says_so(vocab: int) -> None:
    logits = torch.randint(4, (5, vocab)).float()
    logits[1, -1], logits[2], logits[3, 0] = float("nan"), float("-inf"), float("inf")
    values, ids = torch.empty(5), torch.empty(5, dtype=torch.int32)
    best(logits, values, ids, torch.empty(5, blocks(vocab)), torch.empty(5, blocks(vocab), dtype=torch.int32))
    expected, at = sampling.best(logits)
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert torch.isfinite(values).tolist() == [True, False, False, False, True]
    assert ids[[0, 3, 4]].tolist() == at[[0, 3, 4]].tolist()


def drawn(
    kernel: bool, logits: Tensor, tables: SlotTables, slots: Tensor, positions: Tensor, number: int
) -> list[Tensor]:
    values, at = sampling.best(logits)
    commits = torch.ones_like(slots)
    commits[-1] = 0
    tables = SlotTables(*(table.clone() for table in tables))
    noted, ids, status = torch.full((SLOTS,), -5), torch.full_like(slots, -7), torch.full_like(slots, -7)
    function = draw.draw if kernel else draw.reference
    function(logits, tables, values, at.int(), slots, positions, commits, noted, ids, status, number)
    return [noted, ids, status, tables.outputs]


@settings(max_examples=12, deadline=None)
@given(vocabs, st.integers(0, 9999), st.integers(0, 2))
def test_draws_equal_the_reference(vocab: int, seed: int, number: int) -> None:
    """Greedy and not, with and without filters, of rows that pad the batch and rows that are broken."""
    rng = np.random.default_rng(seed)
    tables = begun(rng, vocab)
    logits = torch.from_numpy(rng.normal(size=(4, vocab)).astype(np.float32)) * 4
    logits[0, int(rng.integers(vocab))] = float("-inf")
    if seed % 4 == 0:
        logits[2, 0] = float("nan")
    slots, positions = int32(4, -1, 0, 2), torch.from_numpy(rng.integers(0, 99, 4).astype(np.int32))
    one = drawn(True, logits, tables, slots, positions, number)
    other = drawn(False, logits, tables, slots, positions, number)
    for name, ours, theirs in zip(("future tokens", "ids", "status", "counts"), one, other):
        assert torch.equal(ours, theirs), name


def test_ids_of_equal_logits_stay_or_go_together() -> None:
    tables = make_tables(SLOTS, 100, torch.device("cpu"))
    tables.floats[0] = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    tables.ints[0, INIT_INTS.index("top_k")] = 2
    logits = torch.zeros(1, 100)
    logits[0, [3, 50, 97]], logits[0, 20] = 2.0, 3.0
    seen = {int(drawn(True, logits, tables, int32(0), int32(place), 0)[1][0]) for place in range(40)}
    assert seen == {3, 20, 50, 97}


def test_the_number_that_decides_is_that_of_the_reference() -> None:
    """Over even logits the id is the number itself, to one part in 5003."""
    tables = make_tables(SLOTS, 5003, torch.device("cpu"))
    tables.floats[:] = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    low, high = INIT_INTS.index("seed_low"), INIT_INTS.index("seed_high")
    tables.ints[0, low], tables.ints[0, high] = -2, 2**31 - 1
    ids = drawn(True, torch.zeros(1, 5003), tables, int32(0), int32(12345), 7)[1]
    seed = np.array([(2**31 - 1) << 32 | 0xFFFFFFFE], np.uint64)
    assert int(ids[0]) == int(sampling.uniform(seed, np.array([12345]), 7)[0] * 5003)


@few
@given(vocabs, st.integers(0, 99))
def test_logprobs_equal_the_reference(vocab: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(4, vocab + 3)[:, :vocab] * 4
    logits[3, 1] = logits[3, 0] = 20.0
    ids, counts = torch.randint(vocab, (4,), dtype=torch.int32), int32(-1, 0, 5, min(20, vocab))
    found = []
    for function in (report_logprobs, logprobs_reference):
        results = torch.full((4,), 9.0), torch.full((4, 20), 9, dtype=torch.int32), torch.full((4, 20), 9.0)
        function(logits, ids, counts, *results)
        found.append(results)
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][2], found[1][2])
    assert torch.equal(found[0][1][:3], found[1][1][:3])
    assert found[0][1][3, :2].tolist() == [0, 1], "equals are in the order of ids"
