"""The agent's state machine: fairness, order, cancelling, bounds. Its lanes are stepped by hand."""

from __future__ import annotations

import pytest
from storage.hand_lanes import HALF_MIB, World
from storage.pages import MODEL, chain, keys_of

from headrace.kvcache.storage.lanes import InlineLanes
from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.page_store import StoreRefused
from headrace.kvcache.storage.protocol import (
    MAX_READS,
    Cancel,
    Close,
    Delete,
    Deleted,
    Found,
    Lookup,
    OpenStore,
    Read,
    ReadDone,
    ReadProgress,
    Refused,
    Reply,
    Stats,
    StatsReply,
    StoreFailed,
    Touch,
    Write,
    Written,
)
from headrace.kvcache.storage.service import READS_PER_WRITE, StorageService


def done_of(replies: list[Reply], id: int) -> ReadDone | Written:
    (done,) = [reply for reply in replies if isinstance(reply, ReadDone | Written) and reply.id == id]
    return done


def test_a_page_goes_to_the_store_and_comes_back_into_another_host_page() -> None:
    world = World()
    run = chain("a", 5)
    world.write(1, run)
    world.lanes.run()
    written = done_of(world.take(), 1)
    assert isinstance(written, Written)
    assert (written.stored, written.dropped, written.size_bytes) == (5, [], 5 * HALF_MIB)
    world.read(2, run, first_page=20)
    world.lanes.run()
    read = done_of(world.take(), 2)
    assert isinstance(read, ReadDone)
    assert (read.good, read.missing, read.corrupt, read.size_bytes) == (5, 0, 0, 5 * HALF_MIB)
    assert world.right(run, 5, first_page=20)


def test_b05_a_small_read_behind_a_large_one_waits_for_a_few_pieces_of_it() -> None:
    world = World(lanes=2)
    large, small = world.stored("large", 40), world.stored("small", 2)
    world.read(1, large)
    world.read(2, small, first_page=50)
    steps = 0
    while not any(isinstance(reply, ReadDone) for reply in world.replies):
        world.lanes.step()
        steps += 1
    assert done_of(world.take(), 2).id == 2
    assert steps == 4, "two pieces of the large one that were under way, the one whose turn it was, the small one's"


def test_b05_large_reads_take_turns() -> None:
    world = World(lanes=1)
    a, b = world.stored("a", 12), world.stored("b", 12)
    world.read(1, a)
    world.read(2, b, first_page=20)
    world.lanes.run()
    order = "".join("a" if key in keys_of(a) else "b" for _, key in world.store.calls)
    assert order == "aabababababb"


def test_progress_is_told_as_the_contiguous_prefix_grows() -> None:
    world = World(lanes=4)
    run = world.stored("a", 8)
    world.read(1, run)
    world.lanes.step(2)
    world.lanes.step(1)
    assert world.take() == [], "the first piece is not there"
    world.lanes.step(0)
    assert world.take() == [ReadProgress(1, 6)]
    world.lanes.run()
    done = done_of(world.take(), 1)
    assert isinstance(done, ReadDone) and done.good == 8


def test_b06_a_read_of_what_is_not_there_is_answered_at_once() -> None:
    world = World()
    world.read(1, chain("a", 5))
    assert world.take() == [ReadDone(1, 0, missing=5)]


def test_a_lookup_is_answered_while_all_lanes_are_busy() -> None:
    world = World(lanes=1)
    run = world.stored("a", 8)
    world.read(1, run)
    world.service.handle(Lookup(7, 0, run.keys + chain("b", 1).keys))
    assert world.take() == [Found(7, 8)]
    world.service.handle(Lookup(8, 0, chain("b", 1).keys + run.keys, each=True))
    assert world.take() == [Found(8, 0, bytes([0, *[1] * 8]))]


def test_b11_a_bad_page_ends_the_read_and_those_before_it_count() -> None:
    world = World(lanes=1)
    run = world.stored("a", 12)
    world.store.bad_key = keys_of(run)[5]
    world.read(1, run)
    world.lanes.run()
    done = done_of(world.take(), 1)
    assert isinstance(done, ReadDone)
    assert (done.good, done.corrupt, done.message) == (5, 1, "bad")
    assert len(world.store.calls) == 3, "nothing behind it is read"


def test_a_bad_page_ahead_of_pages_that_were_good_takes_them_out() -> None:
    world = World(lanes=4)
    run = world.stored("a", 8)
    world.store.bad_key = keys_of(run)[0]
    world.read(1, run)
    for which in (3, 2, 1, 0):
        world.lanes.step(which)
    done = done_of(world.take(), 1)
    assert isinstance(done, ReadDone) and done.good == 0


def test_a_cancelled_read_is_answered_when_nothing_touches_its_pages() -> None:
    world = World(lanes=2)
    run = world.stored("a", 20)
    world.read(1, run)
    world.service.handle(Cancel(1))
    assert world.take() == [] and len(world.lanes.waiting) == 2
    world.lanes.step(1)
    assert not any(isinstance(reply, ReadDone) for reply in world.take())
    world.lanes.step()
    done = done_of(world.take(), 1)
    assert isinstance(done, ReadDone)
    assert (done.good, done.message) == (4, "cancelled")
    assert not world.lanes.waiting and world.right(run, 4)


def test_a_read_cancelled_before_it_began_is_answered_at_once() -> None:
    world = World(lanes=1)
    a, b = world.stored("a", 4), world.stored("b", 4)
    world.read(1, a)
    world.read(2, b)
    world.service.handle(Cancel(2))
    assert world.take() == [ReadDone(2, 0, message="cancelled")]
    world.lanes.run()
    assert not any(key in keys_of(b) for _, key in world.store.calls)


def test_a_cancelled_write_says_which_pages_were_stored() -> None:
    world = World(lanes=2)
    world.write(1, chain("a", 12))
    world.service.handle(Cancel(1))
    world.lanes.run()
    done = done_of(world.take(), 1)
    assert isinstance(done, Written)
    assert (done.stored, done.dropped) == (8, [8, 9, 10, 11])


@pytest.mark.parametrize("id", [1, 99])
def test_cancelling_what_has_ended_or_never_was_does_nothing(id: int) -> None:
    world = World()
    world.write(1, chain("a", 2))
    world.lanes.run()
    world.take()
    world.service.handle(Cancel(id))
    assert world.take() == []


def test_an_id_can_be_used_again_when_its_reply_has_come_and_not_before() -> None:
    world = World()
    run = world.stored("a", 2)
    world.read(1, run)
    world.read(1, run)
    (refused,) = world.take()
    assert isinstance(refused, ReadDone) and "under way" in refused.message
    world.lanes.run()
    world.take()
    world.read(1, run)
    world.lanes.run()
    assert isinstance(done_of(world.take(), 1), ReadDone)


def test_reads_go_before_writes() -> None:
    world = World(lanes=1)
    a = world.stored("a", 4)
    world.write(1, chain("w", 24), first_page=10)
    world.read(2, a)
    world.lanes.run()
    assert [call for call, _ in world.store.calls] == ["put", "get", "get", "put", "put"]


def test_writes_leave_a_lane_to_reads() -> None:
    world = World(lanes=4)
    world.write(1, chain("w", 40))
    assert len(world.lanes.waiting) == 3
    world.read(2, world.stored("a", 2), first_page=50)
    assert len(world.lanes.waiting) == 4


def test_b07_steady_reads_do_not_starve_writes() -> None:
    world = World(lanes=1)
    runs = [world.stored(str(number), 8) for number in range(5)]
    for id, run in enumerate(runs):
        world.read(id, run)
    world.write(100, chain("w", 4), first_page=40)
    world.lanes.run()
    calls = [call for call, _ in world.store.calls]
    assert calls.index("put") <= READS_PER_WRITE + 1
    assert calls.index("put") < len(calls) - 6, "while reads were waiting"


def test_pages_of_one_write_are_stored_in_order_and_not_mixed_with_another() -> None:
    world = World(lanes=1)
    a, b = chain("a", 20), chain("b", 20)
    world.write(1, a)
    world.write(2, b, first_page=20)
    world.lanes.run()
    assert [key in keys_of(a) for _, key in world.store.calls] == [True] * 3 + [False] * 3


def test_a_write_that_fails_in_one_piece_is_given_up() -> None:
    world = World(lanes=1)
    run = chain("a", 32)
    world.store.bad_key = keys_of(run)[9]
    world.write(1, run)
    world.lanes.run()
    done = done_of(world.take(), 1)
    assert isinstance(done, Written)
    assert (done.stored, done.dropped, done.message) == (8, list(range(8, 32)), "full")
    assert len(world.store.calls) == 2


@pytest.mark.parametrize("kind", ["read", "write"])
def test_one_transfer_too_many_is_answered_at_once(kind: str) -> None:
    world = World(lanes=1)
    run = world.stored("a", 2)
    for id in range(2 * MAX_READS):
        world.read(id, run)
    assert world.take() == []
    if kind == "read":
        world.read(-1, run)
    else:
        world.write(-1, run)
    (reply,) = world.take()
    assert isinstance(reply, ReadDone | Written) and "transfers already" in reply.message
    world.lanes.run()
    assert len([reply for reply in world.take() if isinstance(reply, ReadDone)]) == 2 * MAX_READS


def test_a_bug_in_a_store_costs_a_piece_and_not_the_reply() -> None:
    world = World(lanes=1)
    run = world.stored("a", 4)
    world.store.raises = RuntimeError("a bug")
    world.read(1, run)
    world.lanes.run()
    done = done_of(world.take(), 1)
    assert isinstance(done, ReadDone)
    assert done.good == 0 and "a bug" in done.message


def test_a_store_that_fails_is_told_of_once_and_everything_is_answered() -> None:
    world = World(lanes=1)
    run = world.stored("a", 8)
    for id in (1, 2, 3):
        world.read(id, run, first_page=10 * id)
    world.store.failure = "the disk is gone"
    world.lanes.run()
    replies = world.take()
    assert [reply for reply in replies if isinstance(reply, StoreFailed)] == [StoreFailed("the disk is gone")]
    assert sorted(reply.id for reply in replies if isinstance(reply, ReadDone)) == [1, 2, 3]
    assert "the disk is gone" in done_of(replies, 3).message
    world.read(4, run)
    world.service.handle(Lookup(5, 0, run.keys))
    world.service.handle(Delete(6))
    assert world.take() == [
        ReadDone(4, 0, message="the disk is gone"),
        Found(5, 0),
        Deleted(6, 0, 0, "the disk is gone"),
    ]


def test_deleting_goes_first_and_says_how_much_went() -> None:
    world = World(lanes=1)
    run = world.stored("a", 8)
    world.read(1, run)
    world.service.handle(Delete(2))
    world.lanes.run()
    replies = world.take()
    assert Deleted(2, 8, 8 * HALF_MIB) in replies
    done = done_of(replies, 1)
    assert isinstance(done, ReadDone) and (done.good, done.missing) == (2, 1)


def test_a_touch_makes_pages_the_last_to_go() -> None:
    world = World()
    a, b = world.stored("a", 1), world.stored("b", 1)
    world.service.handle(Touch(0, a.keys))
    assert list(world.store._pages) == [(0, b.keys), (0, a.keys)]


def test_stats_are_the_stores() -> None:
    world = World()
    world.stored("a", 3)
    world.service.handle(Stats(1))
    (reply,) = world.take()
    assert isinstance(reply, StatsReply) and (reply.id, reply.stats.pages) == (1, 3)


def test_tidying_is_done_when_due_and_when_idle_and_not_twice_at_once() -> None:
    world = World(lanes=4)
    run = world.stored("a", 8)
    world.store.untidy = True
    world.read(1, run)
    world.lanes.run()
    assert world.store.tidied == 1
    world.service.idle()
    world.service.idle()
    world.lanes.run()
    assert world.store.tidied == 2


def test_closing_answers_everything_and_ends_when_nothing_is_under_way() -> None:
    world = World(lanes=1)
    run = world.stored("a", 8)
    world.read(1, run)
    world.write(2, chain("w", 2), first_page=20)
    world.service.handle(Delete(3))
    world.service.handle(Close())
    replies = world.take()
    assert done_of(replies, 2) == Written(2, 0, [0, 1], message="the store is closing")
    assert Deleted(3, 0, 0, "the store is closing") in replies
    assert (world.service.finished, world.store.closed) == (False, False)
    world.lanes.run()
    assert done_of(world.take(), 1).id == 1
    assert (world.service.finished, world.store.closed) == (True, True)


def test_a_store_that_is_refused_ends_the_agent() -> None:
    replies: list[Reply] = []

    def refuse(command: OpenStore) -> tuple[MemoryStore, InlineLanes]:
        raise StoreRefused("no such disk")

    service = StorageService(replies.append, memoryview(bytearray(4096)), refuse, lambda: 0.0)
    service.handle(OpenStore("disk", 1, 4, [4096], [0], [1], MODEL))
    assert replies == [Refused("no such disk")] and service.finished


@pytest.mark.parametrize(
    ("offsets", "sizes", "pages"),
    [([1], [4096], [1]), ([0], [4095], [1]), ([0], [4096], [2]), ([0], [0], [1]), ([-4096], [4096], [1])],
)
def test_a_host_pool_that_does_not_fit_is_refused(offsets: list[int], sizes: list[int], pages: list[int]) -> None:
    replies: list[Reply] = []
    service = StorageService(
        replies.append,
        memoryview(bytearray(4096)),
        lambda command: (MemoryStore(1), InlineLanes()),
        lambda: 0.0,
    )
    service.handle(OpenStore("memory", 1, 4, sizes, offsets, pages, MODEL))
    assert isinstance(replies[0], Refused)


@pytest.mark.parametrize(
    "change",
    [
        {"group": 1},
        {"group": -1},
        {"namespace": b"short"},
        {"keys": bytes(17)},
        {"tokens": b""},
        {"host_pages": [0]},
        {"host_pages": [-1, 0]},
        {"host_pages": [0, 64]},
        {"host_pages": []},
    ],
)
def test_a_malformed_transfer_is_answered_and_touches_nothing(change: dict[str, object]) -> None:
    world = World()
    run = world.stored("a", 2)
    fields: dict[str, object] = {
        "group": 0,
        "namespace": run.namespace,
        "keys": run.keys,
        "tokens": run.tokens,
        "host_pages": [0, 1],
    } | change
    world.service.handle(Read(1, parent=run.parents[:16], **fields))  # type: ignore[arg-type]
    world.service.handle(Write(2, parents=run.parents, **fields))  # type: ignore[arg-type]
    read, written = world.take()
    assert isinstance(read, ReadDone) and read.good == 0 and read.message
    assert isinstance(written, Written) and written.stored == 0 and written.message
    assert not world.lanes.waiting
    assert bytes(world.pool) == bytes(len(world.pool))


def test_nothing_is_found_before_the_store_is_open() -> None:
    replies: list[Reply] = []
    service = StorageService(
        replies.append, memoryview(bytearray(4096)), lambda command: (MemoryStore(1), InlineLanes()), lambda: 0.0
    )
    service.handle(Lookup(1, 0, bytes(16)))
    service.handle(Cancel(2))
    service.handle(Touch(0, bytes(16)))
    service.handle(Read(3, 0, bytes(16), bytes(16), bytes(16), bytes(16), [0]))
    service.handle(Close())
    assert replies == [Found(1, 0), ReadDone(3, 0, message="the store is not open")]
    assert service.finished
