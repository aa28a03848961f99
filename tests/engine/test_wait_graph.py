"""Rule R6: the requests that can never end, against a search through all that the real lanes could still do."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from typing import Any

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from laneway._admission import Admission, Refused, Ticket, TicketState
from laneway._wait_graph import Node, Place, blocked, circle

KEYS = ("x", "y")


def running(model: Hashable = "a", number: float = 1, **how: Any) -> Place:
    return Place(**{"model": model, "lane": "", "cap": 1, "number": number, "running": True, **how})


def waiting(model: Hashable = "a", number: float = 2, **how: Any) -> Place:
    return running(model, number, **{"running": False, **how})


# By hand.


def test_R6_nothing_is_blocked_without_nested_runs() -> None:
    nodes = [Node(name="p", place=running()), Node(name="q", place=waiting()), Node(name="n")]
    assert blocked(nodes) == {}


def test_R6_two_handlers_that_wait_for_each_others_lane() -> None:
    nodes = [
        Node(name="p", place=running("a"), nested=("c",)),
        Node(name="q", place=running("b"), nested=("d",)),
        Node(name="c", place=waiting("b")),
    ]
    assert blocked(nodes) == {}
    nodes.append(Node(name="d", place=waiting("a", math.inf)))
    waits = blocked(nodes)
    assert waits == {"p": ("c",), "c": ("q",), "q": ("d",), "d": ("p",)}
    assert circle(waits, "d") == ["d", "p", "c", "q"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (waiting("b", 2), ("q",)),
        (waiting("b", 2, cap=2), ()),
        (waiting("b", 2, cap=2, weight=2), ("q",)),
        (waiting("b", 2, cap=math.inf, weight=50), ()),
        (waiting("b", 2, lane="g"), ()),
        (waiting("b", 2, lane="g", exclusive=True), ("q",)),
        (waiting("b", 2, lane="g", keys=("x",)), ("q",)),
        (waiting("b", 2, lane="g", keys=("z",)), ()),
    ],
)
def test_R6_what_a_request_in_line_lacks(place: Place, reason: tuple[str, ...]) -> None:
    nodes = [
        Node(name="p", place=running("a"), nested=("c",)),
        Node(name="q", place=running("b", cap=place.cap, keys=("x",)), nested=("d",)),
        Node(name="d", place=waiting("a")),
        Node(name="c", place=place),
    ]
    assert blocked(nodes).get("c", ()) == reason


def test_R6_one_in_line_keeps_back_those_behind_it() -> None:
    stuck = [
        Node(name="p", place=running("a", 1, cap=2), nested=("c",)),
        Node(name="q", place=running("b", 1), nested=("d",)),
        Node(name="c", place=waiting("b", 2)),
    ]
    writer = Node(name="w", place=waiting("a", 2, cap=2, exclusive=True))
    heavy = Node(name="w", place=waiting("a", 2, cap=2, weight=2))
    keyed = Node(name="w", place=waiting("a", 2, cap=2, keys=("x",)))
    behind = Node(name="d", place=waiting("a", 3, cap=2))
    behind_key = Node(name="d", place=waiting("a", 3, cap=2, keys=("x",)))
    other_lane = Node(name="d", place=waiting("a", 3, cap=2, lane="g"))
    assert blocked([*stuck, writer, behind])["d"] == ("w",)
    assert blocked([*stuck, writer, other_lane])["d"] == ("w",)
    assert blocked([*stuck, heavy, behind])["d"] == ("w",)
    assert blocked([*stuck, heavy, other_lane]) == {}
    assert blocked([*stuck, keyed, behind_key]) == {}
    holds = attrs.evolve(stuck[0], place=running("a", 1, cap=2, keys=("x",)))
    assert blocked([holds, *stuck[1:], keyed, behind]) == {}
    assert blocked([holds, *stuck[1:], keyed, behind_key])["d"] == ("p",)


def test_R6_a_circle_through_three_models_and_one_without_a_lane() -> None:
    nodes = [
        Node(name="p", place=running("a"), nested=("n",)),
        Node(name="n", nested=("c",)),
        Node(name="c", place=waiting("b")),
        Node(name="q", place=running("b"), nested=("e",)),
        Node(name="e", place=waiting("c")),
        Node(name="r", place=running("c"), nested=("f",)),
        Node(name="f", place=waiting("a")),
        Node(name="beside", place=running("d")),
    ]
    waits = blocked(nodes)
    assert circle(waits, "f") == ["f", "p", "n", "c", "q", "e", "r"]
    assert "beside" not in waits
    assert blocked(nodes[:-2]) == {}
    assert circle(waits, "beside") == []


# Against a search.


@attrs.define(eq=False)
class Live:
    name: str
    model: int
    parent: Live | None
    ticket: Ticket | None


@attrs.define
class World:
    """Real lanes of several models, and who waits for whose end."""

    lanes: list[Admission]
    live: list[Live] = attrs.field(factory=list)
    made: int = 0

    def arrive(self, model: int, parent: Live | None, **how: Any) -> Live:
        ticket = None if how.pop("no_lane", False) else self.lanes[model].arrive("kind", **how)[0]
        self.made += 1
        self.live.append(Live(f"r{self.made}", model, parent, ticket))
        return self.live[-1]

    def can_end(self) -> list[Live]:
        """The requests that may end now: they run, and none of their nested runs lives."""
        awaited = {id(each.parent) for each in self.live}
        return [each for each in self.live if self.runs(each) and id(each) not in awaited]

    def runs(self, each: Live) -> bool:
        return each.ticket is None or each.ticket.state is TicketState.RUNNING

    def end(self, each: Live) -> None:
        self.live.remove(each)
        if each.ticket is not None:
            self.lanes[each.model].finish(each.ticket)

    def gates(self) -> list[Live]:
        return [each for each in self.live if each.ticket is not None and self.lanes[each.model].at_gate(each.ticket)]

    def open(self, each: Live) -> None:
        assert each.ticket is not None
        self.lanes[each.model].open_gate(each.ticket)

    def steps(self) -> list[World]:
        """Every world that can come next."""
        worlds = []
        for act, which in ((World.end, self.can_end()), (World.open, self.gates())):
            for each in which:
                copied, other = copy.deepcopy((self, each))
                act(copied, other)
                worlds.append(copied)
        return worlds

    def key(self) -> tuple[Any, ...]:
        return tuple((each.name, self.runs(each), each.ticket and each.ticket.gated) for each in self.live)

    def may_never_end(self) -> set[str]:
        """Who lives in some world in which nothing more can happen.

        Without gates there is one such world.  With them it may depend on which gate opens first.
        """
        gated = any(each.ticket is not None and each.ticket.gated for each in self.live)
        seen, todo, last = {self.key()}, [self], list[set[str]]()
        while todo:
            world = todo.pop()
            after = world.steps()
            if not after:
                last.append({each.name for each in world.live})
            for other in after:
                if other.key() not in seen:
                    seen.add(other.key())
                    todo.append(other)
        assert gated or all(names == last[0] for names in last)
        return set().union(*last)

    def nodes(self) -> list[Node]:
        return [
            Node(
                name=each.name,
                place=None if each.ticket is None else self._place(each.model, each.ticket),
                nested=tuple(other.name for other in self.live if other.parent is each),
            )
            for each in self.live
        ]

    def _place(self, model: int, ticket: Ticket) -> Place:
        return Place(
            model=model,
            lane=ticket.lane,
            cap=self.lanes[model].cap(ticket.lane),
            number=ticket.number,
            running=ticket.state is TicketState.RUNNING,
            exclusive=ticket.exclusive,
            weight=ticket.weight,
            keys=ticket.keys,
        )


ARRIVALS = st.fixed_dictionaries(
    {},
    optional={
        "exclusive": st.just(True),
        "gated": st.just(True),
        "weight": st.integers(1, 3),
        "keys": st.sets(st.sampled_from(KEYS), max_size=2).map(sorted),
        "lane": st.sampled_from(["", "g"]),
        "cap": st.integers(1, 3),
        "no_lane": st.just(True),
    },
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 2), st.none(), ARRIVALS),
        # More often than not they are nested.
        st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(0, 9), ARRIVALS),
        st.tuples(st.just("arrive"), st.integers(0, 1), st.integers(0, 9), st.just({})),
        st.tuples(st.sampled_from(["end", "open", "leave"]), st.integers(0, 9), st.none(), st.none()),
        st.tuples(st.just("claim"), st.integers(0, 9), st.sampled_from(KEYS), st.none()),
    ),
    max_size=12,
)


@given(st.tuples(*[st.integers(1, 2)] * 3), EVENTS)
def test_R6_who_can_never_end_is_what_a_search_through_all_that_can_happen_finds(
    parallel: tuple[int, ...], events: list[tuple[Any, ...]]
) -> None:
    world = World([Admission(each) for each in parallel])
    for what, number, argument, how in events:
        if what == "arrive":
            if len(world.live) == 7:  # a search through more takes long
                continue
            opens = [each for each in world.live if world.runs(each)]
            parent = opens[argument % len(opens)] if argument is not None and opens else None
            if "exclusive" in how:
                how = {name: value for name, value in how.items() if name != "gated"}
            tried = copy.deepcopy((world, parent))
            newcomer = tried[0].arrive(number, tried[1], **how)
            if newcomer.ticket is not None and not newcomer.ticket.gated:
                asked = {"exclusive": False, "weight": 1, "keys": (), "lane": "", **how, "cap": None}
                del asked["cap"]
                assert world.lanes[number].starts_now(**asked) is tried[0].runs(newcomer)
            waits = blocked(tried[0].nodes())
            never = tried[0].may_never_end()
            assert set(waits) == never
            if never:
                # Nothing was stuck before, so only a nested run in line can have done it.
                event("refused")
                assert parent is not None
                assert newcomer.name in never
                assert not tried[0].runs(newcomer)
                way = circle(waits, newcomer.name)
                assert way[0] == newcomer.name
                assert parent.name == way[-1]
                continue
            event("nested" if parent is not None else "plain")
            world.arrive(number, parent, **how)
        elif what == "claim":
            having = [each for each in world.live if each.ticket is not None and world.runs(each)]
            if having:
                each = having[number % len(having)]
                assert each.ticket is not None
                world.lanes[each.model].try_claim(each.ticket, argument)
        elif what == "leave":
            lined = [each for each in world.live if not world.runs(each)]
            if lined:
                each = lined[number % len(lined)]
                assert each.ticket is not None
                world.live.remove(each)
                world.lanes[each.model].withdraw(each.ticket)
        else:
            which = world.can_end() if what == "end" else world.gates()
            if which:
                (World.end if what == "end" else World.open)(world, which[number % len(which)])
        # A circle closes with an arrival, and never later.
        assert blocked(world.nodes()) == {}


def test_R6_A12_a_run_that_is_stuck_if_another_gate_opens_first_counts_as_stuck() -> None:
    world = World([Admission(1), Admission(2)])
    p = world.arrive(1, None)
    q = world.arrive(0, None)
    world.arrive(0, p)
    world.arrive(1, None, gated=True, weight=2, keys=["x"])
    world.arrive(1, None)  # passes the heavy one, which is at its gate
    world.arrive(1, q, gated=True)
    stuck = {"r1", "r2", "r3", "r4", "r6"}
    assert world.may_never_end() == stuck
    assert set(blocked(world.nodes())) == stuck
    # If the gate of the last one opens first, all of them end.
    (last,) = [each for each in world.gates() if each.name == "r6"]
    world.open(last)
    world.end(next(each for each in world.live if each.name == "r5"))
    assert world.runs(last)
    assert world.may_never_end() == set()


def test_R6_the_search_itself_knows_a_circle() -> None:
    world = World([Admission(1), Admission(1)])
    p, q = world.arrive(0, None), world.arrive(1, None)
    world.arrive(1, p)
    assert world.may_never_end() == set()
    world.arrive(0, q)
    assert world.may_never_end() == {"r1", "r2", "r3", "r4"}
    with pytest.raises(Refused):
        world.arrive(0, None, nowait=True)
