"""Activity: who did what from when to when in a simulated run: engines, trainer, sessions, groups.

edges -> seams ┐
sight -> stages ├-> [Activity] -> grid, report, timeline, perfetto
session spans  ┘

It only listens: a run with it has the same events as one without. What is kept are columns of numbers, and of sessions only those
whose group is alive, a few for their tracks, and the one that each batch waited for.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.ports import Generation
from asyncrl.simulation.session_times import Session, SessionTimes
from asyncrl.simulation.watcher import Watcher
from asyncrl.trainer import Trainer
from asyncrl.wiring import Edges

TRAINER, TOOL, REWARD, ENGINE = "trainer", "tool", "reward", "engine"
WAIT = "gen"
"""The trainer's name for its wait for a batch."""
TRACK_SESSIONS = 256
"""Sessions whose segments are kept for a track of their own: more than anybody scrolls through."""


@dataclass(slots=True)
class Intervals:
    """Begins and ends of one kind of work, in virtual seconds."""

    starts: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, start_s: float, end_s: float) -> None:
        self.starts.append(start_s)
        self.ends.append(end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The trainer waited for the batch of `step`. last: the session that ended last in it; None when no batch came."""

    step: int
    start_s: float
    end_s: float
    last: Session | None


@dataclass(slots=True)
class Points:
    """Columns that hold from `times[i]` to the next one. Groups: admitted and not begun, with sessions under way, finished, and in
    the step. `room`: sessions that might begin, and have not: nobody but the controller, or its limit, holds them back."""

    times: "array[float]" = field(default_factory=lambda: array("d"))
    pending: "array[int]" = field(default_factory=lambda: array("q"))
    running: "array[int]" = field(default_factory=lambda: array("q"))
    finished: "array[int]" = field(default_factory=lambda: array("q"))
    training: "array[int]" = field(default_factory=lambda: array("q"))
    room: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, now: float, *counts: int) -> None:
        """The newest of several at one moment stands."""
        columns = (self.pending, self.running, self.finished, self.training, self.room)
        if self.times and self.times[-1] == now:
            for column, count in zip(columns, counts, strict=True):
                column[-1] = count
            return
        self.times.append(now)
        for column, count in zip(columns, counts, strict=True):
            column.append(count)


@dataclass(slots=True)
class _Group:
    """Of a group whose first session has begun."""

    begun: int = 0
    failed: int = 0
    ended: list[Session] = field(default_factory=list)


class Activity(Watcher):
    """An Observer and a Watcher of one run. `work`: (who, what) -> intervals, engines as `("engine 3", "row")`; `stages`: name ->
    intervals; `lives`: (begin, end) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[tuple[str, str], Intervals] = {}
        self.stages: dict[str, Intervals] = {}
        self.lives: list[tuple[float, float]] = []
        self.waits: list[Wait] = []
        self.points = Points()
        self.sessions = SessionTimes(begun=self._begun, ended=self._ended)
        self.watch_sessions = self.sessions.watch
        self.tracks: list[Session] = []
        self.staleness: Counter[int] = Counter()
        """Versions that a trained token was behind -> tokens, rounded for each session."""
        self.generated_lens = array("d")
        """Tokens of each session whose group was trained or failed."""
        self.open_tokens = 0.0
        """Of groups that were neither when their process ended. Among their sessions those that have ended are the short ones."""
        self.trained_lens = array("d")
        self.turns = array("q")
        """Of each session that was trained."""
        self.num_sessions = 0
        """That began."""
        self._groups: dict[str, _Group] = {}
        self._num_finished = self._num_begun = 0
        self._began_s = 0.0

    # --- what seams tell

    def busy(self, who: str, what: str, start_s: float, end_s: float) -> None:
        intervals = self.work.get((who, what))
        if intervals is None:
            intervals = self.work[who, what] = Intervals()
        intervals.add(start_s, end_s)

    def answered(self, request_id: str, generation: Generation, num_tokens: int, slot: tuple[float, float]) -> None:
        self.sessions.answered(request_id, generation, num_tokens, slot)

    # --- what the controller tells

    def begin(self, trainer: Trainer, edges: Edges) -> None:
        super().begin(trainer, edges)
        self.sessions.now = trainer.world.now
        self._began_s = trainer.world.now()
        self._note()

    def end(self, now_s: float) -> None:
        super().end(now_s)
        self.open_tokens += sum(session.tokens for group in self._groups.values() for session in group.ended)
        self._groups.clear()
        self.sessions.cut(now_s)
        self._num_begun = self._num_finished = 0
        self.lives.append((self._began_s, now_s))
        self.points.add(now_s, 0, 0, 0, 0, 0)

    def timed(self, name: str, start_s: float, end_s: float) -> None:
        self.stages.setdefault(name, Intervals()).add(start_s, end_s)
        if name == WAIT:
            self._sampled(start_s, end_s)
        self._note()

    # --- groups

    def _begun(self, session: Session) -> None:
        self._groups.setdefault(session.uid, _Group()).begun += 1
        self._num_begun += 1
        self.num_sessions += 1
        if self._is_first_of_batch() and len(self.tracks) < TRACK_SESSIONS:
            self.tracks.append(session)
        self._note()

    def _is_first_of_batch(self) -> bool:
        assert self.trainer is not None
        return (len(self._groups) - 1) % self.trainer.run.data.train_batch_size == 0

    def _ended(self, session: Session) -> None:
        assert self.trainer is not None
        group = self._groups.get(session.uid)
        if group is None:
            self.open_tokens += session.tokens
            return
        group.ended.append(session)
        group.failed += session.outcome != "ok"
        if len(group.ended) == self.trainer.run.rollout.n:
            if group.failed:  # it is dropped as soon as replay sees it
                self._forget(session.uid)
            else:
                self._num_finished += 1
        self._note()

    def _forget(self, uid: str) -> None:
        group = self._groups.pop(uid)
        self._num_begun -= group.begun
        self.generated_lens.extend(session.tokens for session in group.ended)

    def _sampled(self, start_s: float, end_s: float) -> None:
        assert self.trainer is not None
        step = self.trainer.step + 1
        uids = self.trainer.admission.recorded(step) or ()
        sessions = [session for uid in uids if uid in self._groups for session in self._groups[uid].ended]
        for session in sessions:
            self._trained(session, version=(step - 1) // self.trainer.run.publish_freq)
        for uid in uids:
            if uid in self._groups:
                self._num_finished -= 1
                self._forget(uid)
        last = max(sessions, key=lambda session: (session.end_s or 0.0, session.name), default=None)
        self.waits.append(Wait(step=step, start_s=start_s, end_s=end_s, last=last))

    def _trained(self, session: Session, *, version: int) -> None:
        self.trained_lens.append(session.tokens)
        self.turns.append(session.num_turns)
        for sampled, tokens in session.versions.items():
            self.staleness[version - sampled] += round(tokens)

    def _note(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        alive, training = trainer.admission.num_alive, trainer.admission.num_recorded
        run = trainer.run
        limit = (run.max_staleness + 1) * run.data.train_batch_size * run.publish_freq
        room = max((limit - training) * trainer.run.rollout.n - self._num_begun, 0)
        running = len(self._groups) - self._num_finished
        self.points.add(self.sessions.now(), max(alive - len(self._groups), 0), running, self._num_finished, training, room)
