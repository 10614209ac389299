"""Lineage: which box of the way wrote, read and ended every field of a few prompt groups, and what their time went to.

feed, sessions, sample, stages, retire -> [lineage] -> trace.jsonl, a record a step

Fields come from what was really there: the prompt, the columns that the store holds at sample and at retire, and the stages' own
reports. The catalogue only names producers and consumers, when the trace is shown. All of it stays in memory until its step ends:
the groups traced are a few a step, and only those alive are kept. Owns no file.

Invariants:
1. Which groups are traced follows from the prompt's number alone: `trace_groups` of every `batch_size` in a row.
2. A traced group is in exactly one record: of the step that trained it, or of the step in which it was dropped.
3. Where no group is traced nothing is done, beyond asking whether one is.
"""

from collections.abc import Callable, Iterable, Sequence

from asyncrl.fields import CATALOGUE, Tag
from asyncrl.keys import TrajectoryKey
from asyncrl.observe.spans import NO_SPAN, RecordedSpan
from asyncrl.observe.trace_file import Record
from asyncrl.observe.trace_record import RecordWriter, TracedGroup, TracedSession, TracedStep
from asyncrl.ports import Access, FieldReport, HeldField, Prompt, Span, SpanKind, StepContext, Topology, World

AGENTS, REWARDS, SAMPLE, RETIRE = "agents", "rewards", "sample", "retire"

_PROMPT_FIELDS = ("raw_prompt", "data_source", "ground_truth", "extra_info", "tools_kwargs", "row_columns")
"""Fields of a dataset row that its prompt holds, beside those that are named as its columns."""


class Lineage:
    """Collects what is told about traced groups. groups_a_step 0: traces nothing.

    is_alive: whether the group of a uid is still to be trained; a traced one that is neither alive nor trained was dropped.
    """

    def __init__(
        self,
        world: World,
        *,
        groups_a_step: int,
        batch_size: int,
        actor: Topology,
        rollout: Topology,
        is_alive: Callable[[str], bool],
        incarnation: int = 0,
    ) -> None:
        self._world = world
        self._groups_a_step = groups_a_step
        self._batch_size = batch_size
        self._topologies = {"actor": actor, "rollout": rollout}
        self._is_alive = is_alive
        self._incarnation = incarnation
        self._origin = world.now()
        self._wall_time = world.wall_time()
        self._groups: dict[str, TracedGroup] = {}
        self._timings: list[tuple[str, float, float]] = []
        self._step: TracedStep | None = None

    # --- before sample

    def admit(self, prompt: Prompt) -> None:
        """A group was admitted; here it is decided whether it is traced."""
        if prompt.number % self._batch_size < self._groups_a_step:
            fields = (*_PROMPT_FIELDS, *prompt.columns)
            self._groups[prompt.uid] = TracedGroup(
                uid=prompt.uid, number=prompt.number, admitted_s=self._now(), row_fields=_in_order(fields)
            )

    def session_span(self, uid: str, session_id: int) -> Span:
        """The span of a session that begins now."""
        group = self._groups.get(uid)
        if group is None:
            return NO_SPAN
        span = RecordedSpan(SpanKind.SESSION, f"session {session_id}", self._now)
        since = max(
            (tried.span.end_s or 0.0 for tried in group.sessions if tried.session_id == session_id), default=group.admitted_s
        )
        group.sessions.append(TracedSession(session_id=session_id, wait=(since, span.start_s), span=span))
        return span

    # --- the step

    def rows_of(self, uids: Iterable[str | None]) -> tuple[int, ...]:
        """Positions of the rows that belong to traced groups. uids: of each row of a batch, None for padding."""
        if not self._groups:
            return ()
        return tuple(row for row, uid in enumerate(uids) if uid in self._groups)

    def begin_step(self, context: StepContext, keys: Sequence[str], tags: Sequence[Tag], held: Iterable[HeldField]) -> None:
        """A batch with traced rows was sampled. keys, tags, held: of these rows. What a failed try of the step told is forgotten.

        The store does not say who of the agents and the rewards wrote a column: the catalogue's producer places its line.
        """
        self._step = step = TracedStep(
            version=context.version,
            keys=tuple(keys),
            uids=tuple(TrajectoryKey.parse(key).uid for key in keys),
            tags=tuple(tags),
            sampled_s=self._now(),
        )
        held = tuple(held)
        written = [_report(_author(column), Access.WRITE, column) for column in held]
        step.reports += sorted(written, key=lambda report: report.stage == REWARDS)
        step.reports += [_report(SAMPLE, Access.TAKE, column) for column in held]

    def add(self, reports: Iterable[FieldReport]) -> None:
        """What a stage of the step has read and written."""
        if self._step is not None:
            self._step.reports += reports

    def retire(self, held: Iterable[HeldField]) -> None:
        """What the store holds of the traced rows when they are retired."""
        self.add(_report(RETIRE, Access.FREE, column) for column in held)

    def time(self, name: str, start_s: float, end_s: float) -> None:
        """The trainer did `name` from `start_s` to `end_s`, both of `world.now()`."""
        if self._groups_a_step:
            self._timings.append((name, start_s - self._origin, end_s - self._origin))

    def end_step(self, number: int) -> Record | None:
        """The record of step `number`, which is forgotten here; None when it has no traced group. Groups dropped since the last one
        are in it too."""
        step, self._step = self._step, None
        timings, self._timings = self._timings, []
        trained = [] if step is None else [self._groups.pop(uid) for uid in dict.fromkeys(step.uids)]
        dropped = [self._groups.pop(uid) for uid in [uid for uid in self._groups if not self._is_alive(uid)]]
        if not trained and not dropped:
            return None
        writer = RecordWriter(step=number, incarnation=self._incarnation)
        for group in trained:
            assert step is not None
            writer.add_trained(group, step)
        for group in dropped:
            writer.add_dropped(group)
        writer.add_timings(timings)
        return writer.record(version=number - 1 if step is None else step.version, wall_time=self._wall_time, **self._topologies)

    def _now(self) -> float:
        return self._world.now() - self._origin


def _author(column: HeldField) -> str:
    """Sessions write their rewards with their rows: the catalogue tells them apart."""
    entry = CATALOGUE.get(column.field)
    return REWARDS if entry is not None and entry.producer == REWARDS else AGENTS


def _report(stage: str, access: Access, column: HeldField) -> FieldReport:
    return FieldReport(
        stage=stage,
        access=access,
        field=column.field,
        dtype=column.dtype,
        device=column.device,
        layout=column.layout,
        shape=column.shape,
        lengths=column.lengths,
        mask_sums=column.mask_sums,
    )


def _in_order(names: Sequence[str]) -> tuple[str, ...]:
    """As the catalogue has them, then the others."""
    known = [name for name in CATALOGUE if name in names]
    return (*known, *(name for name in names if name not in CATALOGUE))
