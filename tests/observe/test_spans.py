"""Spans end with their block, whatever ends it; a session takes everything inside it along."""

import asyncio

import pytest

from asyncrl.observe.spans import NO_SPAN, RecordedSpan, untraced
from asyncrl.ports import SpanKind


class Clock:
    """A second more at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def session() -> RecordedSpan:
    return RecordedSpan(SpanKind.SESSION, "session 0", Clock())


def test_a_span_has_a_beginning_an_end_and_facts() -> None:
    with session() as span, span.span(SpanKind.TURN, "turn 0") as turn:
        turn.note(tokens=3)
        turn.note(stop_reason="stop")
    (inner,) = span.inner
    assert (span.start_s, inner.start_s, inner.end_s, span.end_s) == (1.0, 2.0, 3.0, 4.0)
    assert (inner.name, inner.outcome, inner.facts) == ("turn 0", "ok", {"tokens": 3, "stop_reason": "stop"})


def fail(span: RecordedSpan, error: BaseException) -> None:
    with span, span.span(SpanKind.TOOL, "calculator") as tool:
        tool.note(outcome="ok")
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_an_error_ends_the_span_with_its_name_and_goes_on(error: BaseException) -> None:
    span = session()
    with pytest.raises(type(error)):
        fail(span, error)
    outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    assert [span.outcome, span.inner[0].outcome] == [outcome, outcome]


def test_what_is_still_open_ends_with_its_session() -> None:
    with session() as span:
        tool = span.span(SpanKind.TOOL, "hangs").__enter__()
        span.note(outcome="DeadlineError")
    (left,) = span.inner
    assert (left.outcome, left.end_s) == ("abandoned", 4.0)
    tool.note(outcome="ok", late=True)
    tool.__exit__(None, None, None)
    assert (left.outcome, left.end_s, left.facts) == ("abandoned", 4.0, {})


def test_a_guest_that_goes_on_after_its_session_adds_nothing() -> None:
    with session() as span:
        pass
    assert span.span(SpanKind.TURN, "turn 7") is NO_SPAN
    assert span.inner == []


def test_an_untraced_session_makes_no_object() -> None:
    span = untraced("a", 0)
    with span as entered, entered.span(SpanKind.TURN, "turn 0") as inner:
        inner.note(tokens=3)
    assert span is entered is inner is NO_SPAN
