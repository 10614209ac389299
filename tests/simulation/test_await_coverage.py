"""Every line of the controller that waits meets a cancellation and an error; and the count can fail."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.await_coverage import LEFT_OUT, cover
from asyncrl.simulation.faults import FaultKind
from asyncrl.simulation.faults.awaits import AwaitCoverage, report
from asyncrl.simulation.stacks import waiting_frames

SMALLEST = load_run(Scenario, Path(__file__).parents[2] / "configs" / "sim" / "smallest.toml")


@pytest.fixture(scope="module")
def covered() -> AwaitCoverage:
    return cover(SMALLEST)


@pytest.mark.long
def test_every_line_that_waits_meets_a_cancellation_and_an_error(covered: AwaitCoverage) -> None:
    """All of them. A new line that nothing reaches needs a variant that does, or a reason in LEFT_OUT."""
    told = report(covered, but=LEFT_OUT)
    assert "\n" not in told, told
    assert told.startswith("coverage of awaits: ")


@pytest.mark.long
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_line_that_is_left_out_is_one_that_waits_for_nothing(covered: AwaitCoverage, kind: FaultKind) -> None:
    """Faults are thrown wherever a task waits: had it ever waited, it would have met one."""
    texts = LEFT_OUT[kind]
    assert [text for text in texts if not any(text in line.text for line in covered.lines)] == []
    left_out = [line for line in covered.lines if any(text in line.text for text in texts)]
    assert [line for line in left_out if line not in covered.missing(kind)] == []


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "waits.py"
    path.write_text(
        "import asyncio\n"
        "async def outer(group, task):\n"
        "    async with group:\n"
        "        await inner(task)\n"
        "async def inner(task):\n"
        "    await (\n"
        "        task\n"
        "    )\n"
        "async def other():\n"
        "    await asyncio.sleep(0)\n"
    )
    monkeypatch.setattr("asyncrl.simulation.faults.awaits.PACKAGE", tmp_path)
    return path.name


async def test_a_line_is_met_by_what_is_thrown_where_it_waits_and_by_nothing_else(source: str, tmp_path: Path) -> None:
    coverage = AwaitCoverage([source])
    names: dict[str, object] = {}
    exec(compile((tmp_path / source).read_text(), str(tmp_path / source), "exec"), names)
    assert [line.line for line in coverage.lines] == [3, 4, 6, 10]
    future = asyncio.get_running_loop().create_future()
    outer = names["outer"]
    assert callable(outer)
    task = asyncio.create_task(outer(asyncio.timeout(None), future))
    await asyncio.sleep(0)
    coverage.met(FaultKind.AWAIT_CANCEL, list(waiting_frames(task.get_coro())))
    assert [line.line for line in coverage.missing(FaultKind.AWAIT_CANCEL)] == [10]
    assert [line.line for line in coverage.missing(FaultKind.AWAIT_ERROR)] == [3, 4, 6, 10]
    future.set_exception(KeyError("lost"))
    with pytest.raises(KeyError) as caught:
        await task
    coverage.failed(caught.value)
    assert [line.line for line in coverage.missing(FaultKind.AWAIT_ERROR)] == [10]
    assert report(coverage) == (
        "coverage of awaits: 3 of 4 lines met a cancel, 3 of 4 an error\n"
        f"  no cancel: {source}:10  await asyncio.sleep(0)\n"
        f"  no error: {source}:10  await asyncio.sleep(0)"
    )
    left_out = dict.fromkeys((FaultKind.AWAIT_CANCEL, FaultKind.AWAIT_ERROR), ("asyncio.sleep(0)",))
    assert report(coverage, but=left_out) == "coverage of awaits: 3 of 3 lines met a cancel, 3 of 3 an error"
