"""A run's folder, lines of metrics in it, and records of its trace."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.observe.metrics import MetricsLog
from asyncrl.observe.run_folder import RunFolder, create_run_folder
from asyncrl.observe.trace_file import FieldLine, GroupRow, Record, SpanLine, StepLine, TopologyRow, TrajectoryRow
from asyncrl.ports import SpanKind, Topology


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path, "run")


@pytest.fixture
def log_steps(tmp_path: Path) -> Callable[..., RunFolder]:
    """log_steps(name, {step: metrics}): the folder of a run with these metrics."""

    def log_steps(name: str, steps: Mapping[int, Mapping[str, float]]) -> RunFolder:
        made = create_run_folder(tmp_path, name)
        with MetricsLog(made) as log:
            for step, metrics in steps.items():
                log.log(step, metrics)
        return made

    return log_steps


def _trajectory(key: str) -> TrajectoryRow:
    lengths = {"prompt_len": 2, "response_len": 5, "seq_len": 7, "policy_len": 3}
    versions = {"global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}
    return TrajectoryRow(key=key, is_padding=False, mask_sum=3, **lengths, **versions)


def _field(step: int, uid: str, stage: str, name: str, lengths: tuple[int, ...]) -> FieldLine:
    return FieldLine(
        step=step,
        incarnation=0,
        uid=uid,
        stage=stage,
        access="write",
        field=name,
        dtype="int64",
        device="cpu",
        layout="ragged",
        shape=(),
        lengths=lengths,
        mask_sums=(3,) * len(lengths) if stage == "agents" else None,
    )


def _span(step: int, uid: str | None, session_id: int | None, kind: SpanKind, name: str, start_s: float, end_s: float) -> SpanLine:
    return SpanLine(
        step=step,
        incarnation=0,
        uid=uid,
        session_id=session_id,
        span=kind,
        name=name,
        start_s=start_s,
        end_s=end_s,
        outcome="ok",
        facts={"tokens": 3} if kind is SpanKind.TURN else {},
    )


_SESSION = (
    (SpanKind.SESSION, "session 0", 1.0, 3.0),
    (SpanKind.TURN, "turn 0", 1.0, 2.0),
    (SpanKind.TOOL, "slow", 2.0, 2.75),
    (SpanKind.TOOL, "fast", 2.0, 2.5),
    (SpanKind.REWARD, "reward", 2.75, 2.9),
)


def _record(step: int, *uids: str, version: int | None = None) -> Record:
    lines: list[FieldLine | SpanLine] = []
    for uid in uids:
        lines.append(_field(step, uid, "dataset", "raw_prompt", (1,)))
        lines += [_field(step, uid, stage, "responses", (5, 5)) for stage in ("agents", "update_actor")]
        lines += [_span(step, uid, 0, *span) for span in _SESSION]
    lines.append(_span(step, None, None, SpanKind.STAGE, "update_actor", 3.5, 4.0))
    groups = [
        GroupRow(uid=uid, number=number, status="trained", admitted_s=0.5, rows=tuple(_trajectory(f"{uid}_{n}_0") for n in (0, 1)))
        for number, uid in enumerate(uids)
    ]
    head = StepLine(
        step=step,
        incarnation=0,
        version=step - 1 if version is None else version,
        wall_time=1e9,
        num_lines=len(lines),
        actor=TopologyRow.of(Topology(world=4, sp=2)),
        rollout=TopologyRow.of(Topology(world=8, tp=8)),
        groups=tuple(groups),
    )
    return Record(head=head, lines=tuple(lines))


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """make_record(step, *uids, version=...): a record of a step with two trajectories a group, whose tools overlap."""
    return _record
