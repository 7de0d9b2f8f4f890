"""Reading traces, and the tokens they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.server.config import BadSetting
from headrace.server.sim.workload import read_trace

TRACE = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"


def test_a_mooncake_trace_is_read_with_its_times_and_lengths() -> None:
    workload = read_trace(TRACE)
    first, last = workload.requests[0], workload.requests[-1]
    assert len(workload.requests) == 40 and first.arrival_ns == 0
    assert last.arrival_ns == 239_999_000_000
    assert all(len(one.blocks) == -(-one.prompt_tokens // 512) for one in workload.requests)


def test_speed_divides_the_times_and_limit_cuts_the_trace() -> None:
    workload = read_trace(TRACE, limit=10, speed=2.0)
    assert len(workload.requests) == 10
    assert [one.arrival_ns * 2 for one in workload.requests] == [
        one.arrival_ns for one in read_trace(TRACE, limit=10).requests
    ]


def test_equal_blocks_are_equal_tokens_and_different_ones_are_not() -> None:
    workload = read_trace(TRACE)
    a, b = next(
        (one, other)
        for i, one in enumerate(workload.requests)
        for other in workload.requests[i + 1 :]
        if one.blocks[0] == other.blocks[0]
        and len(one.blocks) > 3 < len(other.blocks)
        and one.blocks[2] != other.blocks[2]
    )
    ids_a, ids_b = workload.prompt_ids(a, 128_256), workload.prompt_ids(b, 128_256)
    assert ids_a.dtype == np.int32 and len(ids_a) == a.prompt_tokens
    assert ids_a.min() >= 0 and ids_a.max() < 128_256
    assert (ids_a[:512] == ids_b[:512]).all()
    assert (ids_a[1024:1536] != ids_b[1024:1536]).mean() > 0.99


def test_shared_tokens_are_all_but_each_block_s_first_appearance(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 5, "input_length": 1500, "output_length": 5, "hash_ids": [1, 3, 4]}\n'
        '{"timestamp": 9, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'
    )
    assert read_trace(path).shared_tokens() == 512 + 1000


def test_an_azure_trace_has_lengths_and_times_but_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,3180,8\n"
    )
    workload = read_trace(path)
    assert [one.prompt_tokens for one in workload.requests] == [4808, 3180]
    assert workload.requests[1].arrival_ns == pytest.approx(500_000_000, abs=1000)
    assert workload.shared_tokens() == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5, "hash_ids": []}', "line 2.*input_length"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1]}',
            "line 2: 600 tokens are 2 blocks",
        ),
        ('{"timestamp": -1, "input_length": 6, "output_length": 5, "hash_ids": [1]}', "line 2"),
        ('{"timestamp": 4, "input_length": 6, "output_length": 5, "hash_ids": [9223372036854775808]}', "line 2"),
        (
            '{"timestamp": 1e300, "input_length": 6, "output_length": 5, "hash_ids": [1]}',
            "line 2: it comes more than 366 days after the first",
        ),
    ],
)
def test_a_malformed_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(BadSetting, match=says):
        read_trace(path)


def test_a_request_before_the_one_above_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n'
    path.write_text(line % 3 + line % 2)
    with pytest.raises(BadSetting, match="line 2: it came before"):
        read_trace(path)


def test_a_malformed_row_of_an_azure_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    for row in ("yesterday,5,5", "2023-11-16 18:17:04.9,1000000000000,5"):
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n{row}\n")
        with pytest.raises(BadSetting, match="line 3"):
            read_trace(path)


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="can't be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadSetting, match="has no request"):
        read_trace(tmp_path / "empty.jsonl")
