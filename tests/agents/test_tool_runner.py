"""Every call ends in a text for the model: results, errors, deadlines, limits; infrastructure errors are raised."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from asyncrl.agents.tool_calls import ToolCall
from asyncrl.agents.tool_runner import Outcome, ToolAnswer, ToolRunner
from asyncrl.config import TrainRun
from asyncrl.ports import Json
from asyncrl.tools import FunctionTool, load_tools
from asyncrl.world import RealWorld

NewRun = Callable[..., TrainRun]


def made(function: Callable[..., object], name: str = "probe") -> FunctionTool:
    function.__doc__ = function.__doc__ or "Probe."
    return FunctionTool(function, name=name)


async def ask(runner: ToolRunner, name: str = "probe", **arguments: Json) -> ToolAnswer:
    return await runner.run(ToolCall(name=name, arguments=arguments), {"probe": {"secret": 7}})


@pytest.fixture
def runner_of(new_run: NewRun, world: RealWorld) -> Callable[..., ToolRunner]:
    def build(*tools: FunctionTool, **agent: Json) -> ToolRunner:
        return ToolRunner({tool.name: tool for tool in tools}, new_run(agent=agent).agent, world)

    return build


RunnerOf = Callable[..., ToolRunner]


async def test_sync_and_async_tools_answer_alike(runner_of: RunnerOf) -> None:
    main_thread = threading.get_ident()
    threads: list[int] = []

    def blocking(x: int) -> int:
        threads.append(threading.get_ident())
        return x + 1

    async def waiting(x: int) -> int:
        threads.append(threading.get_ident())
        return x + 1

    async with runner_of(made(blocking, "blocking"), made(waiting, "waiting")) as runner:
        answers = [await ask(runner, name, x=1) for name in ("blocking", "waiting")]
    assert answers == [ToolAnswer(text="2", outcome=Outcome.OK)] * 2
    assert threads[0] != main_thread
    assert threads[1] == main_thread


async def test_the_dataset_rows_arguments_reach_the_tool_and_stay_hidden(runner_of: RunnerOf) -> None:
    def probe(x: int, *, tools_kwargs: dict[str, Json]) -> str:
        return f"{x} {tools_kwargs['secret']}"

    tool = made(probe)
    assert "tools_kwargs" not in str(tool.schema)
    async with runner_of(tool) as runner:
        assert (await ask(runner, x=1)).text == "1 7"
        refused = await ask(runner, x=1, tools_kwargs={"secret": 8})
    assert refused.outcome is Outcome.INVALID


async def test_what_does_not_fit_is_answered(runner_of: RunnerOf) -> None:
    async with runner_of(load_tools(["calculator"])["calculator"]) as runner:
        unknown = await ask(runner, "calculater", expression="1 + 1")
        mistyped = await ask(runner, "calculator", expression=3)
        missing = await ask(runner, "calculator")
    assert unknown == ToolAnswer(text="error: there is no tool 'calculater'; tools: calculator", outcome=Outcome.UNKNOWN)
    assert (mistyped.outcome, "`expression`" in mistyped.text) == (Outcome.INVALID, True)
    assert (missing.outcome, "`expression`" in missing.text) == (Outcome.INVALID, True)


@pytest.mark.parametrize(
    "error", [ValueError("bad\nvalue"), StopIteration(), SystemExit(3), FileNotFoundError("x"), TimeoutError(), RecursionError()]
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_tool_that_raises_is_told_to_the_model(error: BaseException, is_async: bool, runner_of: RunnerOf) -> None:
    async def waiting() -> str:
        raise error

    def blocking() -> str:
        raise error

    async with runner_of(made(waiting if is_async else blocking)) as runner:
        answer = await ask(runner)
    assert answer.outcome is Outcome.ERROR
    # Python itself turns a StopIteration that leaves a coroutine into a RuntimeError.
    assert answer.text.startswith(f"error: {type(error).__name__}") or isinstance(error, StopIteration)
    assert "\n" not in answer.text


@pytest.mark.parametrize("error", [MemoryError(), ConnectionResetError("gone")])
@pytest.mark.parametrize("is_async", [True, False])
async def test_infrastructure_errors_are_raised(error: Exception, is_async: bool, runner_of: RunnerOf) -> None:
    async def waiting() -> str:
        raise error

    def blocking() -> str:
        raise error

    async with runner_of(made(waiting if is_async else blocking)) as runner:
        with pytest.raises(type(error)):
            await ask(runner)


@pytest.mark.parametrize("result", [{1, 2}, object()])
async def test_a_result_that_is_no_text_and_no_json_is_an_error_for_the_model(result: object, runner_of: RunnerOf) -> None:
    async with runner_of(made(lambda: result)) as runner:
        assert (await ask(runner)).outcome is Outcome.ERROR


async def test_a_cancellation_inside_a_tool_is_not_hidden(runner_of: RunnerOf) -> None:
    async def probe() -> str:
        raise asyncio.CancelledError

    async with runner_of(made(probe)) as runner:
        with pytest.raises(asyncio.CancelledError):
            await ask(runner)


async def test_the_deadline_is_the_tools_answer_and_the_call_is_cancelled(runner_of: RunnerOf) -> None:
    ended = asyncio.Event()

    async def probe() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with runner_of(made(probe), tool_timeout_s=0.01) as runner:
        answer = await ask(runner)
        await ended.wait()
    assert answer == ToolAnswer(text="error: probe took longer than 0.01 s", outcome=Outcome.TIMEOUT)


async def test_a_tool_that_ignores_its_cancellation_is_left_behind_counted_and_refused(runner_of: RunnerOf) -> None:
    let_go = asyncio.Event()

    async def probe() -> str:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    def other() -> str:
        return "ok"

    async with runner_of(made(probe), made(other, "other"), tool_timeout_s=0.01, max_abandoned_tools=1) as runner:
        assert (await ask(runner)).outcome is Outcome.TIMEOUT
        assert runner.num_abandoned == 1
        assert (await ask(runner)).outcome is Outcome.REFUSED
        assert (await ask(runner, "other")).outcome is not Outcome.REFUSED  # threads are counted apart
        let_go.set()


async def test_hanging_threads_are_counted_and_further_calls_refused(runner_of: RunnerOf) -> None:
    let_go = threading.Event()

    def probe() -> str:
        let_go.wait()
        return "late"

    async with runner_of(made(probe), tool_timeout_s=0.01, max_abandoned_tools=2) as runner:
        outcomes = [(await ask(runner)).outcome for _ in range(3)]
        stats = runner.stats()
        let_go.set()
    assert outcomes == [Outcome.TIMEOUT, Outcome.TIMEOUT, Outcome.REFUSED]
    assert (stats["timeout"], stats["refused"], stats["abandoned"]) == (2.0, 1.0, 2.0)


async def test_no_more_calls_of_a_tool_run_at_once_than_allowed(runner_of: RunnerOf) -> None:
    running, most = 0, 0

    async def probe() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return ""

    async with runner_of(made(probe), max_concurrent_tools=3) as runner:
        await asyncio.gather(*[ask(runner) for _ in range(20)])
    assert most == 3


async def test_cancelling_the_caller_cancels_the_tool(runner_of: RunnerOf) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def probe() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with runner_of(made(probe)) as runner:
        caller = asyncio.create_task(ask(runner))
        await started.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await ended.wait()
        assert runner.num_abandoned == 0
