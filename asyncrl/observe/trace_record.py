"""From what was collected about the traced groups of a step to the lines of its record.

lineage -> [RecordWriter] -> trace_file
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.fields import Tag
from asyncrl.observe.spans import RecordedSpan
from asyncrl.observe.trace_file import FieldLine, GroupRow, Record, SpanLine, Status, StepLine, TopologyRow, TrajectoryRow
from asyncrl.ports import Access, FieldReport, SpanKind, Topology


@dataclass(slots=True, kw_only=True)
class TracedSession:
    """A session, and from when to when it waited for its turn. Seconds here and below: since the origin of the trace."""

    session_id: int
    wait: tuple[float, float]
    span: RecordedSpan


@dataclass(slots=True, kw_only=True)
class TracedGroup:
    """A group from its admission on. row_fields: what the dataset gave with its prompt. A retry stands behind what it retries."""

    uid: str
    number: int
    admitted_s: float
    row_fields: tuple[str, ...]
    sessions: list[TracedSession] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TracedStep:
    """The step under way; keys, uids and tags of its traced rows, in the order that all reports follow."""

    version: int
    keys: tuple[str, ...]
    uids: tuple[str, ...]
    tags: tuple[Tag, ...]
    sampled_s: float
    reports: list[FieldReport] = field(default_factory=list)


class RecordWriter:
    """Makes the lines of a record."""

    def __init__(self, *, step: int, incarnation: int) -> None:
        self._step = step
        self._incarnation = incarnation
        self._groups: list[GroupRow] = []
        self._lines: list[FieldLine | SpanLine] = []

    def record(self, *, version: int, wall_time: float, actor: Topology, rollout: Topology) -> Record:
        head = StepLine(
            step=self._step,
            incarnation=self._incarnation,
            version=version,
            wall_time=wall_time,
            num_lines=len(self._lines),
            actor=TopologyRow.of(actor),
            rollout=TopologyRow.of(rollout),
            groups=tuple(self._groups),
        )
        return Record(head=head, lines=tuple(self._lines))

    def add_trained(self, group: TracedGroup, step: TracedStep) -> None:
        own = [row for row, uid in enumerate(step.uids) if uid == group.uid]
        sums = next((report.mask_sums for report in step.reports if report.mask_sums is not None), None)
        rows = [(step.keys[row], step.tags[row], None if sums is None else sums[row]) for row in own]
        self._groups.append(_group_row(group, "trained", tuple(_trajectory_row(*row) for row in rows)))
        self._add_row_fields(group)
        for report in step.reports:
            self._add_report(group.uid, report, own)
        self._add_sessions(group)
        ended = max((session.span.end_s or session.span.start_s for session in group.sessions), default=step.sampled_s)
        self._add_span(group.uid, None, SpanKind.WAIT, "in replay", ended, step.sampled_s)

    def add_dropped(self, group: TracedGroup) -> None:
        self._groups.append(_group_row(group, "dropped", ()))
        self._add_row_fields(group)
        self._add_sessions(group)

    def add_timings(self, timings: Iterable[tuple[str, float, float]]) -> None:
        for name, start_s, end_s in timings:
            self._add_span(None, None, SpanKind.STAGE, name, start_s, end_s)

    def _add_row_fields(self, group: TracedGroup) -> None:
        """Objects that came with the row, and the uid that the feed gave it."""
        for stage, names in (("dataset", group.row_fields), ("feed", ("uid",))):
            for name in names:
                schema = FieldReport(
                    stage=stage,
                    access=Access.WRITE,
                    field=name,
                    dtype="object",
                    device="cpu",
                    layout="object",
                    shape=(),
                    lengths=(1,),
                    mask_sums=None,
                )
                self._add_report(group.uid, schema, (0,))

    def _add_report(self, uid: str, report: FieldReport, rows: Sequence[int]) -> None:
        sums = report.mask_sums
        self._lines.append(
            FieldLine(
                step=self._step,
                incarnation=self._incarnation,
                uid=uid,
                stage=report.stage,
                access=str(report.access),
                field=report.field,
                dtype=report.dtype,
                device=report.device,
                layout=report.layout,
                shape=report.shape,
                lengths=tuple(report.lengths[row] for row in rows),
                mask_sums=None if sums is None else tuple(sums[row] for row in rows),
            )
        )

    def _add_sessions(self, group: TracedGroup) -> None:
        for session in sorted(group.sessions, key=lambda session: session.session_id):
            self._add_span(group.uid, session.session_id, SpanKind.WAIT, "before the session", *session.wait)
            for span in (session.span, *session.span.inner):
                end_s = span.start_s if span.end_s is None else span.end_s
                self._add_span(
                    group.uid, session.session_id, span.kind, span.name, span.start_s, end_s, span.outcome or "open", span.facts
                )

    def _add_span(
        self,
        uid: str | None,
        session_id: int | None,
        kind: SpanKind,
        name: str,
        start_s: float,
        end_s: float,
        outcome: str = "ok",
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._lines.append(
            SpanLine(
                step=self._step,
                incarnation=self._incarnation,
                uid=uid,
                session_id=session_id,
                span=kind,
                name=name,
                start_s=round(start_s, 6),
                end_s=round(end_s, 6),
                outcome=outcome,
                facts=dict(facts or {}),
            )
        )


def _group_row(group: TracedGroup, status: Status, rows: tuple[TrajectoryRow, ...]) -> GroupRow:
    return GroupRow(uid=group.uid, number=group.number, status=status, admitted_s=round(group.admitted_s, 6), rows=rows)


def _trajectory_row(key: str, tag: Tag, mask_sum: int | None) -> TrajectoryRow:
    numbers = {name: int(tag[name]) for name in TrajectoryRow.__struct_fields__ if name in tag and name != "is_padding"}
    return TrajectoryRow(key=key, is_padding=bool(tag.get("is_padding", False)), mask_sum=mask_sum, **numbers)
