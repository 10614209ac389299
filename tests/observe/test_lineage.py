"""Lineage: which groups are traced, and what becomes of them, whatever becomes of their step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from asyncrl.observe.lineage import Lineage
from asyncrl.observe.spans import NO_SPAN
from asyncrl.observe.trace_file import FieldLine, Record, SpanLine
from asyncrl.ports import Access, FieldReport, HeldField, Prompt, SpanKind, StepContext, Topology, World


@dataclass
class Clock:
    """The part of a World that the lineage needs: seconds that a test sets."""

    at: float = 100.0

    def now(self) -> float:
        return self.at

    def wall_time(self) -> float:
        return 1e9


@dataclass
class Bench:
    """A lineage of one group in every three, and the groups that are alive."""

    clock: Clock = field(default_factory=Clock)
    alive: set[str] = field(default_factory=set)
    groups_a_step: int = 1

    def __post_init__(self) -> None:
        self.lineage = Lineage(
            cast(World, self.clock),
            groups_a_step=self.groups_a_step,
            batch_size=3,
            actor=Topology(world=2),
            rollout=Topology(),
            is_alive=self.alive.__contains__,
        )

    def admit(self, *numbers: int) -> None:
        for number in numbers:
            uid = f"u{number}"
            self.alive.add(uid)
            self.lineage.admit(
                Prompt(uid=uid, messages=[], data_source="x", number=number, columns={"reward_model": {}, "level": 3, "index": 1})
            )

    def sample(self, step: int, *uids: str) -> tuple[int, ...]:
        """Two trajectories a group; returns the traced rows."""
        keys = [f"{uid}_{session}_0" for uid in uids for session in (0, 1)]
        rows = self.lineage.rows_of([uid for uid in uids for _ in (0, 1)])
        if rows:
            chosen = [keys[row] for row in rows]
            held = [held_field("responses", rows), held_field("reward_score", rows), held_field("response_mask", rows)]
            self.lineage.begin_step(StepContext(step=step, version=step - 1, seed=0), chosen, [TAG] * len(rows), held)
        self.alive -= set(uids)
        return rows


TAG: dict[str, int | str] = {
    "prompt_len": 2,
    "response_len": 3,
    "seq_len": 5,
    "policy_len": 2,
    "global_steps": 0,
    "min_global_steps": 0,
    "max_global_steps": 0,
    "is_padding": False,
    "status": "finished",
}


def schema(rows: Sequence[int]) -> dict[str, Any]:
    """Lengths and sums that tell the rows apart."""
    lengths = tuple(10 + row for row in rows)
    sums = tuple(row for row in rows)
    return {"dtype": "int64", "device": "cpu", "layout": "ragged", "shape": (), "lengths": lengths, "mask_sums": sums}


def held_field(name: str, rows: Sequence[int], *, by_stage: bool = False) -> HeldField:
    return HeldField(field=name, by_stage=by_stage, **schema(rows))


def report(stage: str, access: Access, name: str, rows: Sequence[int]) -> FieldReport:
    return FieldReport(stage=stage, access=access, field=name, **schema(rows))


def way(record: Record, uid: str) -> list[tuple[str, str, str]]:
    return [(line.stage, line.access, line.field) for line in record.lines if isinstance(line, FieldLine) and line.uid == uid]


def test_the_choice_follows_the_prompts_number_alone() -> None:
    for groups_a_step, traced in ((0, []), (1, [0, 3, 6]), (2, [0, 1, 3, 4, 6, 7]), (9, list(range(9)))):
        bench = Bench(groups_a_step=groups_a_step)
        bench.admit(*range(9))
        assert [n for n in range(9) if bench.lineage.session_span(f"u{n}", 0) is not NO_SPAN] == traced
        assert bench.lineage.rows_of(f"u{n}" for n in range(9)) == tuple(traced)


def test_a_trained_group_has_its_fields_in_the_order_of_the_way() -> None:
    bench = Bench()
    bench.admit(0, 1, 2)
    rows = bench.sample(1, "u0", "u1", "u2")
    assert rows == (0, 1)
    bench.lineage.add([report("advantage", Access.READ, "responses", rows), report("advantage", Access.WRITE, "returns", rows)])
    bench.lineage.retire([held_field("responses", rows), held_field("returns", rows, by_stage=True)])
    record = bench.lineage.end_step(1)
    assert record is not None
    assert way(record, "u0") == [
        *(("dataset", "write", name) for name in ("raw_prompt", "data_source", "reward_model", "extra_info", "index")),
        *(("dataset", "write", name) for name in ("tools_kwargs", "ground_truth", "row_columns", "level")),
        ("feed", "write", "uid"),
        ("agents", "write", "responses"),
        ("agents", "write", "response_mask"),
        ("rewards", "write", "reward_score"),
        *(("sample", "take", name) for name in ("responses", "reward_score", "response_mask")),
        ("advantage", "read", "responses"),
        ("advantage", "write", "returns"),
        ("retire", "free", "responses"),
        ("retire", "free", "returns"),
    ]
    assert (record.head.version, record.head.actor.dp, record.head.num_lines) == (0, 2, len(record.lines))
    assert [(row.key, row.policy_len, row.mask_sum) for row in record.head.groups[0].rows] == [("u0_0_0", 2, 0), ("u0_1_0", 2, 1)]


def test_each_of_several_groups_has_its_own_rows() -> None:
    bench = Bench(groups_a_step=2)
    bench.admit(0, 1, 2)
    rows = bench.sample(1, "u2", "u1", "u0")
    assert rows == (2, 3, 4, 5)
    record = bench.lineage.end_step(1)
    assert record is not None
    found = {line.uid: line.lengths for line in record.lines if isinstance(line, FieldLine) and line.stage == "sample"}
    assert found == {"u1": (12, 13), "u0": (14, 15)}
    assert [group.uid for group in record.head.groups] == ["u1", "u0"]


def test_a_step_that_is_tried_again_is_recorded_once() -> None:
    bench = Bench()
    bench.admit(0)
    rows = bench.sample(1, "u0")
    bench.lineage.add([report("failed", Access.READ, "responses", rows)])
    bench.sample(1, "u0")
    record = bench.lineage.end_step(1)
    assert record is not None
    assert "failed" not in {stage for stage, _, _ in way(record, "u0")}


def test_a_dropped_group_is_in_the_record_of_the_step_under_way_and_in_no_other() -> None:
    bench = Bench()
    bench.admit(0, 1, 2, 3)
    with bench.lineage.session_span("u0", 0) as span:
        span.note(outcome="EngineError", failure="the engine was lost")
    bench.alive.remove("u0")
    bench.lineage.time("gen", 100.0, 101.0)
    record = bench.lineage.end_step(1)
    assert record is not None
    assert [(group.uid, group.status, group.rows) for group in record.head.groups] == [("u0", "dropped", ())]
    outcomes = {(line.name, line.outcome) for line in record.lines if isinstance(line, SpanLine)}
    assert outcomes == {("before the session", "ok"), ("session 0", "EngineError"), ("gen", "ok")}
    (gen,) = [line for line in record.lines if isinstance(line, SpanLine) and line.uid is None]
    assert (gen.start_s, gen.end_s) == (0.0, 1.0), "from the origin"
    assert bench.lineage.end_step(2) is None, "u3 is alive, and nothing else is left"


def test_a_step_without_a_traced_group_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.admit(1, 2)
    assert bench.sample(1, "u1", "u2") == ()
    bench.lineage.time("gen", 100.0, 101.0)
    bench.lineage.add([])
    assert bench.lineage.end_step(1) is None
    bench.admit(3)
    bench.sample(2, "u3")
    record = bench.lineage.end_step(2)
    assert record is not None
    assert [line.name for line in record.lines if isinstance(line, SpanLine)] == ["in replay"], "not the time of step 1"


def test_seconds_count_from_the_origin_and_a_retry_waits_from_the_end_of_what_it_retries() -> None:
    bench = Bench()
    bench.clock.at = 101.0
    bench.admit(0)
    for start in (102.0, 105.0):
        bench.clock.at = start
        with bench.lineage.session_span("u0", 0) as span, span.span(SpanKind.TURN, "turn 0"):
            bench.clock.at = start + 1
    bench.clock.at = 110.0
    bench.sample(1, "u0")
    record = bench.lineage.end_step(1)
    assert record is not None
    spans = [(line.name, line.start_s, line.end_s) for line in record.lines if isinstance(line, SpanLine)]
    assert spans == [
        ("before the session", 1.0, 2.0),
        ("session 0", 2.0, 3.0),
        ("turn 0", 2.0, 3.0),
        ("before the session", 3.0, 5.0),
        ("session 0", 5.0, 6.0),
        ("turn 0", 5.0, 6.0),
        ("in replay", 6.0, 10.0),
    ]
    assert (record.head.wall_time, record.head.groups[0].admitted_s) == (1e9, 1.0)


@pytest.mark.parametrize("steps", [200])
def test_nothing_is_kept_of_what_was_recorded(steps: int) -> None:
    bench = Bench()
    for step in range(steps):
        bench.admit(3 * step)
        bench.sample(step + 1, f"u{3 * step}")
        bench.lineage.time("gen", 100.0, 101.0)
        assert bench.lineage.end_step(step + 1) is not None
    assert bench.lineage.rows_of(f"u{n}" for n in range(3 * steps)) == ()
