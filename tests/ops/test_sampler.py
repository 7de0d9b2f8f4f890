"""Each sampling parameter has its effect on its own request, and none on the next one in its slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
import torch
from ops.slot_inits import SlotInit, init_counts, write_inits
from torch import Tensor

from headrace.ops.sampler import Sampler
from headrace.ops.sampling import Choose, choose
from headrace.ops.simd.draws import Chooser
from headrace.ops.wire import BatchRing, Counts, RingGeometry, StepResults

SLOTS, VOCAB = 6, 100
GEOMETRY = RingGeometry(slots=1, max_batch_bytes=1 << 14, max_samples=SLOTS, max_wants=0, vocab=VOCAB)


CHOICES: Final[dict[str, Choose]] = {"torch": choose, "compiled": Chooser(VOCAB)}


@pytest.fixture(autouse=True, params=CHOICES)
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampling, "choice", request.param, raising=False)


class Sampling:
    """A sampler, and rows of logits that are the same in every step."""

    choice: str

    def __init__(self, *inits: SlotInit) -> None:
        self.sampler = Sampler(SLOTS, VOCAB, CHOICES[self.choice])
        self.ring = BatchRing(bytearray(GEOMETRY.size_bytes), GEOMETRY)
        self.begin(*inits)

    def begin(self, *inits: SlotInit) -> None:
        counts = Counts(**(dict.fromkeys(Counts.__struct_fields__, 0) | init_counts(inits)))
        batch = self.ring.write(0, 0, counts)
        write_inits(batch, inits)
        self.sampler.begin(batch)

    def step(
        self,
        rows: dict[int, tuple[int, Tensor]],
        masks: dict[int, Sequence[int]] | None = None,
        skips: Sequence[int] = (),
    ) -> StepResults:
        """`rows`: slot → output position, logits; `masks`: slot → ids that may be drawn; `skips`: rows left out."""
        results = self.ring.results(0)
        mask_rows, bits = self.ring.masks(0)
        allowed = masks or {}
        for at, (slot, ids) in enumerate(allowed.items()):
            mask_rows[at] = list(rows).index(slot)
            bits[at] = 0
            for token in ids:
                bits[at, token // 32] |= np.uint32(1 << token % 32)
        self.sampler.sample(
            torch.stack([logits for _, logits in rows.values()]),
            np.array(list(rows), np.int32),
            np.array([position for position, _ in rows.values()], np.int32),
            mask_rows[: len(allowed)],
            bits[: len(allowed)],
            results,
            skips,
        )
        return results

    def ids(self, slot: int, logits: Tensor, count: int, first: int = 0) -> list[int]:
        """So many outputs of one request alone."""
        return [int(self.step({slot: (position, logits)}).ids[0]) for position in range(first, first + count)]


def logits(**high: float) -> Tensor:
    """Zeros, but for `t7=3.0`: the logit of id 7 is 3."""
    row = torch.zeros(VOCAB)
    for name, value in high.items():
        row[int(name[1:])] = value
    return row


RANDOM = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))


def test_greedy_draws_the_best() -> None:
    assert Sampling(SlotInit(0)).ids(0, logits(t7=3.0, t9=2.9), 3) == [7, 7, 7]


def test_the_same_seed_draws_the_same_ids_in_any_slot_and_beside_anyone() -> None:
    alone = Sampling(SlotInit(1, temperature=1.0, seed=77)).ids(1, RANDOM, 20)
    crowd = Sampling(
        SlotInit(0, temperature=0.5, seed=1),
        SlotInit(4, temperature=1.0, seed=77),
        SlotInit(2),
        SlotInit(3, temperature=1.0, seed=2, top_p=0.5, repetition=1.5),
    )
    together = [int(crowd.step(dict.fromkeys((0, 2, 4, 3), (position, RANDOM))).ids[2]) for position in range(20)]
    assert together == alone
    assert len(set(alone)) > 10


def test_another_seed_draws_other_ids() -> None:
    sampling = Sampling(SlotInit(0, temperature=1.0, seed=1), SlotInit(1, temperature=1.0, seed=1 << 40))
    assert sampling.ids(0, RANDOM, 20) != sampling.ids(1, RANDOM, 20)


def test_a_request_that_resumes_draws_on_as_if_it_had_not_stopped() -> None:
    whole = Sampling(SlotInit(0, temperature=1.0, seed=3, frequency=0.7)).ids(0, RANDOM, 30)
    resumed = Sampling(SlotInit(5, outputs=whole[:12], temperature=1.0, seed=3, frequency=0.7))
    assert resumed.ids(5, RANDOM, 18, first=12) == whole[12:]


def test_top_k_of_one_is_greedy() -> None:
    assert set(Sampling(SlotInit(0, temperature=5.0, top_k=1)).ids(0, logits(t7=0.1), 20)) == {7}


def test_top_p_and_min_p_cut_the_tail() -> None:
    row = logits(t1=8.0, t2=7.9)
    assert set(Sampling(SlotInit(0, temperature=1.0, top_p=0.9)).ids(0, row, 30)) == {1, 2}
    assert set(Sampling(SlotInit(0, temperature=1.0, min_p=0.5)).ids(0, row, 30)) == {1, 2}


def test_frequency_penalty_adds_up_with_every_drawn_id() -> None:
    row = logits(t7=3.0, t9=2.5)
    assert Sampling(SlotInit(0, frequency=1.0)).ids(0, row, 5) == [7, 9, 7, 9, 7]


def test_presence_penalty_counts_once() -> None:
    row = logits(t7=3.0, t9=2.5, t11=1.9)
    assert Sampling(SlotInit(0, presence=1.0)).ids(0, row, 4) == [7, 9, 7, 7]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    row = logits(t7=3.0, t9=2.5, t11=2.0)
    assert Sampling(SlotInit(0, prompt=[7, 7], repetition=1.4)).ids(0, row, 3) == [9, 7, 7]


def test_outputs_before_the_init_count_as_often_as_they_stand_there() -> None:
    row = logits(t7=3.0, t9=0.5)
    assert Sampling(SlotInit(0, outputs=[7, 7, 7], frequency=1.0)).ids(0, row, 1, first=3) == [9]
    assert Sampling(SlotInit(0, outputs=[7, 7], frequency=1.0)).ids(0, row, 1, first=2) == [7]


def test_the_prompt_does_not_count_for_frequency_and_presence() -> None:
    row = logits(t7=3.0, t9=2.5)
    assert Sampling(SlotInit(0, prompt=[7] * 9, frequency=1.0, presence=1.0)).ids(0, row, 1) == [7]


def test_logit_bias_lifts_and_bans() -> None:
    row = logits(t7=3.0, t9=2.5)
    assert Sampling(SlotInit(0, bias={50: 4.0})).ids(0, row, 2) == [50, 50]
    assert Sampling(SlotInit(0, bias={7: -100.0})).ids(0, row, 2) == [9, 9]


def test_logit_bias_has_the_last_word_over_penalties() -> None:
    row = logits(t7=3.0, t9=2.5)
    assert Sampling(SlotInit(0, outputs=[7] * 4, frequency=1.0, bias={7: 100.0})).ids(0, row, 1, first=4) == [7]


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    row = logits(t7=3.0, t8=2.8, t9=2.5)
    assert Sampling(SlotInit(0, stops=[7, 8], min_tokens=2)).ids(0, row, 4) == [9, 9, 7, 7]


def test_without_min_tokens_stop_ids_are_drawn_at_once() -> None:
    assert Sampling(SlotInit(0, stops=[7])).ids(0, logits(t7=3.0), 1) == [7]


def test_a_mask_leaves_only_what_it_allows_in_its_own_row() -> None:
    sampling = Sampling(SlotInit(0), SlotInit(1, temperature=1.0), SlotInit(2))
    row = logits(t7=3.0)
    for position in range(10):
        results = sampling.step(dict.fromkeys((0, 1, 2), (position, row)), masks={1: [31, 32, 99], 2: [64]})
        assert results.ids[0] == 7
        assert results.ids[1] in (31, 32, 99)
        assert results.ids[2] == 64


def test_a_mask_that_allows_only_stop_ids_wins_over_min_tokens() -> None:
    sampling = Sampling(SlotInit(0, stops=[7, 8], min_tokens=5))
    results = sampling.step({0: (0, logits(t3=2.0))}, masks={0: [8]})
    assert (results.status[0], results.ids[0]) == (0, 8)


def test_a_mask_that_allows_nothing_fails_that_sample_alone() -> None:
    sampling = Sampling(SlotInit(0), SlotInit(1))
    row = logits(t7=3.0)
    results = sampling.step({0: (0, row), 1: (0, row)}, masks={0: []})
    assert results.status[:2].tolist() == [1, 0]
    assert results.ids[1] == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_that_sample_alone(bad: float, temperature: float) -> None:
    sampling = Sampling(*(SlotInit(slot, temperature=temperature, seed=slot) for slot in range(3)))
    expected = [int(sampling.step({slot: (0, RANDOM)}).ids[0]) for slot in range(3)]
    broken = RANDOM.clone()
    broken[40] = bad
    results = sampling.step({0: (0, RANDOM), 1: (0, broken), 2: (0, RANDOM)})
    assert results.status[:3].tolist() == [0, 1, 0]
    assert [int(results.ids[0]), int(results.ids[2])] == [expected[0], expected[2]]
    assert 0 <= results.ids[1] < VOCAB


def test_drawn_ids_become_future_tokens_of_their_slots() -> None:
    sampling = Sampling(SlotInit(4), SlotInit(2))
    sampling.step({4: (0, logits(t7=1.0)), 2: (0, logits(t9=1.0))})
    assert sampling.sampler.future_tokens[[4, 2]].tolist() == [7, 9]


def test_a_skipped_row_leaves_no_trace_and_draws_the_same_id_when_it_is_repeated() -> None:
    inits = [SlotInit(0, temperature=1.0, seed=5, frequency=2.0), SlotInit(1, frequency=2.0)]
    skipping, other = Sampling(*inits), Sampling(*inits)
    drawn = []
    for position in range(6):
        rows = {1: (position, logits(t9=1.0)), 0: (position, RANDOM)}
        before = skipping.sampler.future_tokens[0]
        skipping.step({0: rows[0], 3: (0, RANDOM)}, skips=[0])
        assert skipping.sampler.future_tokens[0] == before
        drawn.append(int(skipping.step(rows).ids[1]))
        assert drawn[-1] == int(other.step(rows).ids[1])
    assert len(set(drawn)) > 1


def test_logprobs_are_of_the_raw_logits_whatever_was_done_to_them() -> None:
    init = SlotInit(1, temperature=0.7, top_k=3, bias={5: 9.0}, outputs=[7], presence=1.0, logprobs=2, seed=1)
    sampling = Sampling(SlotInit(0), init)
    results = sampling.step({0: (0, RANDOM), 1: (1, RANDOM)})
    expected = RANDOM.double().log_softmax(0)
    assert results.logprobs[1] == pytest.approx(float(expected[int(results.ids[1])]), abs=1e-5)
    assert results.top_ids[1].tolist() == RANDOM.topk(20).indices.tolist()
    assert results.top_logprobs[1].tolist() == pytest.approx(expected.topk(20).values.tolist(), abs=1e-5)


def test_logprobs_of_nobody_are_not_computed() -> None:
    sampling = Sampling(SlotInit(0), SlotInit(1, logprobs=0))
    results = sampling.ring.results(0)
    results.logprobs[:] = results.top_logprobs[:] = 55
    sampling.step({0: (0, RANDOM)})
    assert results.logprobs[0] == 55
    sampling.step({1: (0, RANDOM)})
    assert results.logprobs[0] == pytest.approx(float(RANDOM.log_softmax(0).max()), abs=1e-5)
    assert results.top_logprobs[0, 0] == 55


@pytest.mark.parametrize(
    ("following", "expected"),
    [
        (SlotInit(0), [7, 7, 7]),
        (SlotInit(0, frequency=0.4), [7, 7, 9]),
        (SlotInit(0, bias={50: 0.1}), [7, 7, 7]),
        (SlotInit(0, stops=[11], min_tokens=5), [7, 7, 7]),
        (SlotInit(0, prompt=[11], repetition=1.3), [7, 9, 7]),
    ],
    ids=["greedy", "frequency", "bias", "min_tokens", "repetition"],
)
def test_the_next_request_in_a_slot_inherits_nothing_not_even_from_an_overrun_step(
    following: SlotInit, expected: list[int]
) -> None:
    everything = SlotInit(
        slot=0,
        prompt=[7],
        outputs=[9],
        bias={7: -50.0, 9: -50.0, 11: 3.0},
        stops=[7, 9],
        min_tokens=100,
        temperature=2.0,
        top_k=50,
        repetition=2.0,
        frequency=2.0,
        presence=2.0,
        logprobs=5,
        seed=9,
    )
    sampling = Sampling(everything)
    row = logits(t7=3.0, t9=2.5, t11=2.0)
    sampling.ids(0, row, 5, first=1)
    sampling.begin(following)
    assert sampling.ids(0, row, 3) == expected


def test_two_requests_with_all_parameters_begin_in_one_batch_without_mixing() -> None:
    sampling = Sampling(
        SlotInit(0, prompt=[7], outputs=[1, 2], bias={9: 5.0}, stops=[3], repetition=3.0),
        SlotInit(1, prompt=[9, 9], bias={7: 0.5, 9: -1.0}, stops=[7], min_tokens=1),
    )
    row = logits(t7=3.0, t9=2.5, t11=2.0)
    results = sampling.step({0: (2, row), 1: (0, row)})
    assert results.ids[:2].tolist() == [9, 11]


@pytest.mark.parametrize(
    "init", [SlotInit(0, prompt=[VOCAB], repetition=2.0), SlotInit(0, stops=[-1], min_tokens=1), SlotInit(SLOTS)]
)
def test_an_init_with_ids_or_slots_that_do_not_exist_is_refused(init: SlotInit) -> None:
    with pytest.raises(ValueError, match="slot init has a"):
        Sampling(init)
