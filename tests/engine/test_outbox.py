"""Rule S2's buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import laneway
from laneway._outbox import PAUSE_AT, Outbox

IDS = st.sampled_from([None, "a", "b"])
EVENTS = st.one_of(
    st.text(max_size=3).map(laneway.TextDelta),
    st.integers(0, 9).map(laneway.Progress),
    st.just("a plugin's own event"),
)


def _tag(stream: str | None, event: object) -> object:
    if stream is None or isinstance(event, str):
        return event
    return laneway.BatchEvent(stream, event)  # type: ignore[arg-type]


def _texts(events: list[object]) -> dict[str | None, str]:
    texts: dict[str | None, str] = {}
    for event in events:
        stream = event.id if isinstance(event, laneway.BatchEvent) else None
        inner = event.event if isinstance(event, laneway.BatchEvent) else event
        if isinstance(inner, laneway.TextDelta):
            texts[stream] = texts.get(stream, "") + inner.text
    return texts


@given(st.lists(st.one_of(st.tuples(IDS, EVENTS), st.just("read"))))
def test_S2_whatever_is_read_when_no_text_is_lost_and_text_never_stands_twice_unread(script: list[object]) -> None:
    box, put, got = Outbox(), [], []
    for action in script:
        if isinstance(action, str):
            if box:
                got.append(box.get())
            continue
        assert isinstance(action, tuple)
        event = _tag(*action)
        put.append(event)
        box.put(event)
    while box:
        got.append(box.get())
    assert _texts(got) == _texts(put)
    assert [event for event in got if isinstance(event, str)] == [event for event in put if isinstance(event, str)]


def test_S2_interleaved_items_merge_each_into_its_own() -> None:
    box = Outbox()
    for text in "12":
        for item in ("a", "b"):
            box.put(laneway.BatchEvent(item, laneway.TextDelta(text)))
    done = laneway.BatchEvent("a", laneway.Done("eos", laneway.Stats()))
    box.put(done)
    assert [box.get() for _ in range(len(box))] == [
        laneway.BatchEvent("a", laneway.TextDelta("12")),
        laneway.BatchEvent("b", laneway.TextDelta("12")),
        done,
    ]


def test_S2_a_pausing_outbox_keeps_events_apart_and_asks_for_a_pause() -> None:
    box = Outbox(merging=False)
    for number in range(PAUSE_AT):
        assert not box.full
        box.put(laneway.TextDelta(str(number)))
    assert box.full
    assert len(box) == PAUSE_AT


def test_a_discarding_outbox_keeps_nothing() -> None:
    box = Outbox()
    box.put(laneway.TextDelta("x"))
    box.discard()
    box.put(laneway.TextDelta("y"))
    assert not box
