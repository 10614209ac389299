"""Incidents: counted without end, kept up to a number, written with time and incarnation, told in a few lines."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config import TrainerConfig
from asyncrl.observe.incidents import MOST_KEPT, IncidentLog, Incidents, incident_lines
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import RunFolder
from asyncrl.observe.sight import Sight, open_sight
from asyncrl.ports import Incident, IncidentKind, World
from asyncrl.world import RealWorld

RETRY = Incident(kind=IncidentKind.RETRY, what="session", text="the engine died", uid="a", session_id=0, attempt=1, turn=0)
LATE = Incident(kind=IncidentKind.DEADLINE, what="tool", text="30 s", limit="agent.tool_timeout_s")


class Clock:
    now_s = 5.0

    def now(self) -> float:
        return self.now_s

    def wall_time(self) -> float:
        return 1000.0 + self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def incidents(clock: Clock) -> Incidents:
    return Incidents(cast("World", clock))


def test_they_are_kept_with_the_parts_that_apply(incidents: Incidents, clock: Clock) -> None:
    """Session 0 and turn 0 are numbers like others."""
    incidents.report(RETRY)
    clock.now_s = 7.5
    incidents.report(LATE)
    retry = {"kind": "retry", "what": "session", "text": "the engine died", "uid": "a", "session_id": 0, "attempt": 1, "turn": 0}
    late = {"kind": "deadline", "what": "tool", "text": "30 s", "limit": "agent.tool_timeout_s"}
    assert incidents.take() == [{"wall_time": 1005.0, "run_s": 0.0, **retry}, {"wall_time": 1007.5, "run_s": 2.5, **late}]
    assert incidents.take() == []


def test_they_are_counted_by_kind_and_place_also_after_they_were_taken(incidents: Incidents) -> None:
    assert incidents.counts() == {}
    for incident in (RETRY, LATE, RETRY):
        incidents.report(incident)
        incidents.take()
    assert incidents.counts() == {"incidents/retry_session": 2.0, "incidents/deadline_tool": 1.0}


def test_a_flood_is_counted_and_not_kept(incidents: Incidents) -> None:
    for _ in range(MOST_KEPT + 7):
        incidents.report(LATE)
    *kept, last = incidents.take()
    assert len(kept) == MOST_KEPT
    assert last == {"wall_time": 1005.0, "run_s": 0.0, "left_out": 7}
    assert incidents.counts() == {"incidents/deadline_tool": MOST_KEPT + 7.0}
    incidents.report(LATE)
    assert len(incidents.take()) == 1, "the places are free again, and what was left out is told once"


def test_the_file_is_made_by_the_first_and_grown_by_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    log = IncidentLog(path)
    assert not path.exists()
    log.append([{"kind": "retry"}, {"kind": "drop"}])
    with path.open("a") as file:
        file.write('{"kind": "la')  # as a kill leaves it
    IncidentLog(path, incarnation=3).append([{"kind": "stall"}])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["incarnation"]) for line in lines] == [("retry", 0), ("drop", 0), ("stall", 3)]


def test_a_line_a_kind_that_happened_in_the_order_of_the_kinds() -> None:
    counts = {
        "incidents/drop_group": 1.0,
        "incidents/deadline_tool": 2.0,
        "incidents/deadline_generate": 5.0,
        "incidents/lag_loop": 0.0,
    }
    counts |= {"incidents/deadline_reward": 2.0}
    assert incident_lines(counts) == ["deadline x 9: generate 5, reward 2, tool 2", "drop x 1: group 1"]
    assert incident_lines({"groups/failure": 3.0}) == []


# --- behind the trainer's door ----------------------------------------------------------------------------------------------------

OpenSight = Callable[[RealWorld, Incidents], Any]


@pytest.fixture
def opened(folder: RunFolder) -> OpenSight:
    @asynccontextmanager
    async def opened(world: RealWorld, incidents: Incidents) -> AsyncIterator[Sight]:
        config = TrainerConfig(tensorboard=False)
        lineage = cast("Any", NoLineage())
        async with open_sight(folder, config, lineage, incidents, world=world, total_steps=2, incarnation=4) as sight:
            yield sight

    return opened


class NoLineage:
    def end_step(self, step: int) -> None:
        return None

    def time(self, name: str, started: float, ended: float) -> None:
        return None


def written(folder: RunFolder) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in folder.incidents.read_text().splitlines()]


async def test_each_step_writes_them_and_has_their_counts(folder: RunFolder, opened: OpenSight) -> None:
    async with RealWorld() as world:
        incidents = Incidents(world)
        async with opened(world, incidents) as sight:
            incidents.report(RETRY)
            await sight.end_step(1, {}, num_tokens=0)
            assert [line["kind"] for line in written(folder)] == ["retry"]
            incidents.report(LATE)
            incidents.report(RETRY)
            await sight.end_step(2, {}, num_tokens=0)
    assert [(line["kind"], line["incarnation"]) for line in written(folder)] == [("retry", 4), ("deadline", 4), ("retry", 4)]
    counts = [
        (row["incarnation"], row["incidents/retry_session"], row.get("incidents/deadline_tool"))
        for row in read_metrics(folder.metrics)
    ]
    assert counts == [(4, 1.0, None), (4, 2.0, 1.0)]


async def _failing(sight: AbstractAsyncContextManager[Sight], incidents: Incidents) -> None:
    async with sight:
        incidents.report(LATE)
        raise ZeroDivisionError


async def test_a_run_that_fails_leaves_them_and_tells_of_each_kind(
    folder: RunFolder, opened: OpenSight, capsys: pytest.CaptureFixture[str]
) -> None:
    async with RealWorld() as world:
        incidents = Incidents(world)
        with pytest.raises(ZeroDivisionError):
            await _failing(opened(world, incidents), incidents)
    assert [line["text"] for line in written(folder)] == ["30 s"]
    assert "incidents: deadline x 1: tool 1\n" in capsys.readouterr().err


async def test_what_befalls_an_engine_is_said_at_once(
    folder: RunFolder, opened: OpenSight, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the step ends: with a single engine it does not, until that one is back."""
    async with RealWorld() as world:
        incidents = Incidents(world)
        async with opened(world, incidents):
            incidents.report(RETRY)
            incidents.report(Incident(kind=IncidentKind.RETRY, what="engine", text="engine 0 is started anew"))
            assert capsys.readouterr().err == "engine 0 is started anew\n"
    assert [line["what"] for line in written(folder)] == ["session", "engine"]


async def test_a_run_without_any_has_no_file_and_no_line(
    folder: RunFolder, opened: OpenSight, capsys: pytest.CaptureFixture[str]
) -> None:
    async with RealWorld() as world, opened(world, Incidents(world)) as sight:
        await sight.end_step(1, {}, num_tokens=0)
    assert not folder.incidents.exists()
    assert "incidents" not in capsys.readouterr().err
