"""Two uses of a place need an order, unless both read; an order is known by events, not by who was first."""

from __future__ import annotations

from ops.happens_before import Accesses, Clock

from headrace.ops.streams import Operation, Region

PAGE = [Region("pages", 1, [7])]


def read(accesses: Accesses, actor: str, clock: Clock) -> None:
    accesses.note(actor, clock, Operation(f"read by {actor}", PAGE, []))


def write(accesses: Accesses, actor: str, clock: Clock) -> None:
    accesses.note(actor, clock, Operation(f"write by {actor}", [], PAGE))


def test_readers_need_no_order_among_themselves() -> None:
    accesses = Accesses()
    read(accesses, "a", Clock())
    read(accesses, "b", Clock())
    assert accesses.conflicts == []


def test_a_read_that_does_not_know_of_the_write_is_named_with_it() -> None:
    accesses = Accesses()
    write(accesses, "a", Clock())
    read(accesses, "b", Clock())
    expected = "read by b reads place 7 of pages, layer 1: nothing says that write by a has written it"
    assert accesses.conflicts == [expected]


def test_a_write_must_know_of_every_reader() -> None:
    accesses, one, two = Accesses(), Clock(), Clock()
    read(accesses, "a", one)
    read(accesses, "b", two)
    knows_one = one.copy()
    write(accesses, "c", knows_one)
    assert accesses.conflicts == [
        "write by c overwrites place 7 of pages, layer 1: nothing says that read by b has read it"
    ]


def test_knowledge_is_passed_on() -> None:
    accesses, one, two, three = Accesses(), Clock(), Clock(), Clock()
    write(accesses, "a", one)
    two.learn(one)
    three.learn(two)
    read(accesses, "c", three)
    write(accesses, "c", three)
    assert accesses.conflicts == []


def test_what_an_actor_does_later_is_not_known_from_what_was_learnt_before() -> None:
    accesses, one, two = Accesses(), Clock(), Clock()
    write(accesses, "a", one)
    two.learn(one)
    write(accesses, "a", one)
    read(accesses, "b", two)
    assert len(accesses.conflicts) == 1


def test_another_layer_and_another_page_are_other_places() -> None:
    accesses = Accesses()
    write(accesses, "a", Clock())
    elsewhere = [Region("pages", 0, [7]), Region("pages", 1, [8]), Region("other pages", 1, [7])]
    accesses.note("b", Clock(), Operation("elsewhere", elsewhere, elsewhere))
    assert accesses.conflicts == []
