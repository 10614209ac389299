"""What every session was at, from moment to moment, from the spans that the product's own trace would record.

GroupRunner -> session_span -> [SessionTimes] -> idle, report, timeline, perfetto

It adds a listener to the spans and changes nothing: a run with it has the same events as one without. A session is in one state at
a time, so its states add up to its life. Tool calls at the same time: the time up to the end of each, since the end of the one
before, is that one's. Invariants:
1. The segments of a session join each other from its begin to its end.
2. Nothing of a session is kept after its group was trained or dropped, but the columns of `segments`.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from asyncrl.ports import Generation, Json, SessionSpan, Span, SpanKind

QUEUE, SLOT, CONTROLLER, REWARD, LOST = "queue for a slot", "generate", "controller", "reward", "call that failed"
TOOL_PREFIX = "tool "
OTHER_TOOLS = f"{TOOL_PREFIX}(others)"
MAX_TOOLS = 24
"""Tools that are told apart: a table of more is no table."""
Segment = tuple[str, float, float]
"""(state, begin, end), in virtual seconds."""


class Segments:
    """Columns of all segments: `states` [S] numbers into `names`, `starts` and `ends` [S] in virtual seconds."""

    def __init__(self) -> None:
        self.names = [QUEUE, SLOT, CONTROLLER, REWARD, LOST]
        self.states = array("H")
        self.starts = array("d")
        self.ends = array("d")
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """Of a state; tools beyond `MAX_TOOLS` share one."""
        found = self._numbers.get(name)
        if found is None and len(self.names) >= 5 + MAX_TOOLS:
            return self.number(OTHER_TOOLS) if name != OTHER_TOOLS else self._add(name)
        return self._add(name) if found is None else found

    def _add(self, name: str) -> int:
        self._numbers[name] = len(self.names)
        self.names.append(name)
        return self._numbers[name]

    def add(self, segment: Segment) -> None:
        state, start, end = segment
        self.states.append(self.number(state))
        self.starts.append(start)
        self.ends.append(end)


@dataclass(slots=True, kw_only=True)
class Session:
    """One session under way, or ended. tokens: sampled, of the model; versions: weight version -> tokens."""

    uid: str
    number: int
    begin_s: float
    since: float
    state: str = CONTROLLER
    end_s: float | None = None
    outcome: str = ""
    num_tools: int = 0
    num_turns: int = 0
    tokens: float = 0.0
    versions: dict[int, float] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    slot: tuple[float, float] | None = None
    """From when to when the call under way had its slot."""

    @property
    def name(self) -> str:
        return f"{self.uid}_{self.number}"


class SessionTimes:
    """All sessions of a run. `now`: the clock of the life under way. ended: told of each session, when it has ended."""

    def __init__(self, *, begun: Callable[[Session], None], ended: Callable[[Session], None]) -> None:
        self.segments = Segments()
        self.now: Callable[[], float] = float
        self.latencies: dict[str, array[float]] = {}
        """Tool, turn and reward -> seconds of each call, as its session waited for it."""
        self.outcomes: dict[str, int] = {}
        """`tool outcome` -> calls."""
        self._open: dict[tuple[str, int], Session] = {}
        self._begun = begun
        self._ended = ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    def watch(self, inner: SessionSpan) -> SessionSpan:
        """What the runner calls in place of `inner`."""

        def session_span(uid: str, session_id: int) -> Span:
            return _SessionSpan(inner(uid, session_id), self, uid, session_id)

        return session_span

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        """An engine has answered a call of a session, which had a slot from when to when."""
        uid, number = request_id.split("_", 2)[:2]
        session = self._open.get((uid, int(number)))
        if session is None:
            return
        session.slot = slot
        session.tokens += num_tokens
        num_ids = max(len(generation.token_ids), 1)
        for span in generation.version_spans:
            share = num_tokens * (span.end - span.start) / num_ids
            session.versions[span.version] = session.versions.get(span.version, 0.0) + share

    def cut(self, now: float) -> None:
        """The process has ended: so have its sessions."""
        for session in list(self._open.values()):
            self.end(session, "cut", now)

    # --- told by the spans

    def begin(self, uid: str, number: int) -> Session:
        now = self.now()
        session = Session(uid=uid, number=number, begin_s=now, since=now)
        self._open[uid, number] = session
        self._begun(session)
        return session

    def enter(self, session: Session, kind: SpanKind, name: str) -> None:
        if session.end_s is not None:
            return
        if kind is SpanKind.TOOL:
            session.num_tools += 1
            if session.num_tools > 1:
                return
        self._close(session, self.now())
        session.state = TOOL_PREFIX + name if kind is SpanKind.TOOL else REWARD if kind is SpanKind.REWARD else SLOT
        session.num_turns += kind is SpanKind.TURN

    def leave(self, session: Session, kind: SpanKind, name: str, entered_s: float, outcome: str) -> None:
        if session.end_s is not None:
            return
        now = self.now()
        told = TOOL_PREFIX + name if kind is SpanKind.TOOL else str(kind)
        self.latencies.setdefault(told, array("d")).append(now - entered_s)
        if kind is SpanKind.TOOL:
            self.outcomes[f"{name} {outcome}"] = self.outcomes.get(f"{name} {outcome}", 0) + 1
        if kind is SpanKind.TOOL:
            session.num_tools -= 1
            session.state = told
        self._close(session, now)
        if not session.num_tools:
            session.state = CONTROLLER

    def end(self, session: Session, outcome: str, now: float) -> None:
        if session.end_s is not None:
            return
        self._close(session, now)
        session.end_s, session.outcome = now, outcome
        del self._open[session.uid, session.number]
        self._ended(session)

    def _close(self, session: Session, now: float) -> None:
        """What it was at since the last change is a segment, or three: queue, slot, and the way back through the controller."""
        if session.state != SLOT:
            self._add(session, session.state, now)
            return
        slot, session.slot = session.slot, None
        if slot is None:
            self._add(session, LOST, now)
            return
        began_s, end_s = slot
        self._add(session, QUEUE, began_s)
        self._add(session, SLOT, end_s)
        self._add(session, CONTROLLER, now)

    def _add(self, session: Session, state: str, until: float) -> None:
        if until > session.since:
            segment = (state, session.since, until)
            session.segments.append(segment)
            self.segments.add(segment)
            session.since = until


class _Listener:
    """A span that also tells. Everything that the inner one does, it does."""

    __slots__ = ("_entered_s", "_inner", "_kind", "_name", "_outcome", "_session", "_times")

    is_traced = True

    def __init__(self, inner: Span, times: SessionTimes, session: Session, kind: SpanKind, name: str) -> None:
        self._inner = inner
        self._times = times
        self._session = session
        self._kind = kind
        self._name = name
        self._outcome = ""
        self._entered_s = 0.0

    def span(self, kind: SpanKind, name: str) -> Span:
        return _Listener(self._inner.span(kind, name), self._times, self._session, kind, name)

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        self._outcome = outcome or self._outcome
        self._inner.note(outcome=outcome, **facts)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        self._entered_s = self._times.now()
        self._times.enter(self._session, self._kind, self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        outcome = type(error).__name__ if error is not None else self._outcome or "ok"
        self._times.leave(self._session, self._kind, self._name, self._entered_s, outcome)
        self._inner.__exit__(kind, error, trace)


class _SessionSpan(_Listener):
    """The span of a whole session: it begins when it is made."""

    __slots__ = ()

    def __init__(self, inner: Span, times: SessionTimes, uid: str, number: int) -> None:
        super().__init__(inner, times, times.begin(uid, number), SpanKind.SESSION, "")

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        outcome = type(error).__name__ if error is not None else self._outcome or "ok"
        self._times.end(self._session, outcome, self._times.now())
        self._inner.__exit__(kind, error, trace)
