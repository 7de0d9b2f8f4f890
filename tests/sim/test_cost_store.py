"""The simulated store's time: bandwidth is shared, names of pages go in the order of their use."""

from __future__ import annotations

import pytest

from headrace.server.sim.bandwidth import SharedBandwidth
from headrace.server.sim.cost_store import StoredKeys
from headrace.server.sim.virtual_loop import run, running_loop


def ends_ms(transfers: list[tuple[int, int]], cancelled: tuple[int, int] | None = None) -> list[float]:
    """Ends in ms of transfers `(begins after ms, bytes)` over a channel of 1000 bytes a ms; -1 where there was none."""

    async def main() -> list[float]:
        loop = running_loop()
        channel = SharedBandwidth(loop, 1e6)
        ends = [-1.0] * len(transfers)
        numbers: dict[int, int] = {}

        def begin(index: int, size_bytes: int) -> None:
            numbers[index] = channel.begin(size_bytes, lambda: ends.__setitem__(index, loop.time_ns() / 1e6))

        for index, (at_ms, size_bytes) in enumerate(transfers):
            loop.call_at_ns(at_ms * 1_000_000, begin, index, size_bytes)
        if cancelled is not None:
            index, at_ms = cancelled
            loop.call_at_ns(at_ms * 1_000_000, lambda: shares.append(channel.cancel(numbers[index])))
        done = loop.create_future()
        loop.call_at_ns(10**12, done.set_result, None)
        await done
        assert channel.under_way == 0
        return ends

    shares: list[float] = []
    ends = run(main())
    if cancelled is not None:
        ends.append(shares[0])
    return ends


def test_a_transfer_alone_has_all_the_bandwidth() -> None:
    assert ends_ms([(0, 5000)]) == pytest.approx([5.0], abs=1e-4)


def test_two_transfers_get_half_each_and_the_longer_the_rest() -> None:
    assert ends_ms([(0, 4000), (0, 6000)]) == pytest.approx([8.0, 10.0], abs=1e-4)


def test_a_later_arrival_slows_what_is_under_way() -> None:
    # 2 ms alone, then both until the second has had its 1000 bytes, then alone again.
    assert ends_ms([(0, 5000), (2, 1000)]) == pytest.approx([6.0, 4.0], abs=1e-4)


def test_a_cancelled_transfer_gives_its_share_back_and_says_how_far_it_came() -> None:
    first, second, share = ends_ms([(0, 4000), (0, 4000)], cancelled=(1, 4))
    assert second == -1.0
    assert share == pytest.approx(0.5, abs=1e-4)
    assert first == pytest.approx(6.0, abs=1e-4)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_the_longest_unused_page_goes_first_and_a_chain_from_its_end() -> None:
    stored = StoredKeys(4)
    stored.add(key(1) + key(2))
    stored.add(key(3) + key(4))
    stored.touch(key(1))
    stored.add(key(5))
    assert stored.contains(key(1)) and not stored.contains(key(2))
    assert stored.contains(key(3) + key(4)) == 2
    assert len(stored) == 4 and stored.evicted_pages == 1


def test_what_is_stored_is_counted_from_the_first_key() -> None:
    stored = StoredKeys(10)
    stored.add(key(1) + key(2) + key(4))
    assert stored.contains(key(1) + key(2) + key(3) + key(4)) == 2
