"""The scorer: right scores, and no hostile function costs more than its own session."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from asyncrl.errors import DeadlineError, RewardError, RunFolderError
from asyncrl.ports import RewardRequest, RewardResult
from asyncrl.rewards.scoring import Scorer

Project = Callable[[str], Path]
Opened = Callable[..., AbstractAsyncContextManager[Scorer]]
Ask = Callable[..., RewardRequest]

BY_TEXT = """
    def score(data_source, solution_str, ground_truth, extra_info):
        {hostile}
        return float(solution_str)
"""
"""A function that scores the text's number, and does something else when the text says `hostile`."""


def hostile(deed: str) -> str:
    return BY_TEXT.format(hostile=f"if solution_str == 'hostile': {deed}")


async def test_rules_score(opened: Opened, ask: Ask) -> None:
    async with opened("gsm8k") as scorer:
        assert await scorer.score(ask("#### 1,000", "1000")) == RewardResult(score=1.0, extra={"pred": "1000"})
    async with opened("exact_match") as scorer:
        assert await scorer.score(ask("a", "b")) == RewardResult(score=0.0)


async def test_the_function_sees_the_whole_request(project: Project, opened: Opened, ask: Ask) -> None:
    project("""
        import json
        def score(data_source, solution_str, ground_truth, extra_info):
            seen = json.dumps([data_source, solution_str, ground_truth, extra_info])  # more than a result may hold
            return {"score": 1, "seen": seen, "pid": os.getpid()}
    """)
    async with opened("my_rewards:score") as scorer:
        result = await scorer.score(ask("s\ud800\0", {"a": [1, None, 2**70]}, num_turns=2))
    assert json.loads(result.extra["seen"]) == ["test", "s\ud800\0", {"a": [1, None, 2**70]}, {"num_turns": 2}]
    assert result.extra["pid"] != os.getpid()


async def test_many_sessions_share_few_workers_in_order(project: Project, opened: Opened, ask: Ask) -> None:
    project("""
        count = 0
        def score(**request):
            global count
            count += 1
            return {"score": float(request["solution_str"]), "count": count, "pid": os.getpid()}
    """)
    async with opened("my_rewards:score", num_workers=2) as scorer:
        results = await asyncio.gather(*(scorer.score(ask(str(i))) for i in range(200)))
    assert [result.score for result in results] == [float(i) for i in range(200)]
    assert len({result.extra["pid"] for result in results}) == 2
    for pid in {result.extra["pid"] for result in results}:
        counts = [result.extra["count"] for result in results if result.extra["pid"] == pid]
        assert counts == sorted(counts), "a later session was scored before an earlier one"


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines (my_rewards.py:4 in score)"),
        ("return None", "returned None; it must be a finite number"),
        ("return '1.0'", "returned '1.0'"),
        ("return True", "returned True"),
        ("return float('nan')", "returned nan"),
        ("return {'score': float('inf')}", "returned 'score': inf"),
        ("return {'acc': 1}", "without 'score'; its keys: 'acc'"),
        ("return {'score': 1.0, 'set': {1}}", "returned dict that cannot be sent: a value of type set"),
        ("return object()", "returned object that cannot be sent"),
        ("return asyncio.sleep(0)", "returned coroutine that cannot be sent"),
        ("return {'score': 1.0, 'x': 'y' * 70_000_000}", "returned dict that cannot be sent"),
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("score(data_source, solution_str, ground_truth, extra_info)", "raised RecursionError"),
        ("os._exit(3)", "the reward worker ended with exit code 3"),
        ("os._exit(0)", "the reward worker ended with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9 (SIGKILL, out of memory?)"),
        ("__import__('ctypes').string_at(0)", "was ended by signal 11 (SIGSEGV)"),
        ("os.closerange(3, 100)", "the reward worker ended with exit code 1"),
        ("[os.write(fd, b'noise' * 10) for fd in range(3, 100) if os.path.exists(f'/proc/self/fd/{fd}')]", ""),
    ],
)
async def test_a_failure_is_an_error_of_its_own_session_and_never_a_number(
    project: Project, opened: Opened, ask: Ask, deed: str, message: str
) -> None:
    project(hostile(deed))
    async with opened("my_rewards:score") as scorer:
        before, error, after, last = await asyncio.gather(
            *(scorer.score(ask(text)) for text in ("1", "hostile", "2", "3")), return_exceptions=True
        )
        assert (before, after, last) == tuple(RewardResult(score=score) for score in (1.0, 2.0, 3.0))
        assert isinstance(error, RewardError)
        assert "reward function 'my_rewards:score'" in str(error)
        assert message in str(error)
        assert "\n" not in str(error)
        assert scorer.stats()["failed"] == 1


@pytest.mark.parametrize(
    "deed",
    [
        "print('x' * 5_000_000)",
        "os.write(1, b'raw bytes on stdout' * 1000)",
        "os.system('echo from a child')",
        "sys.stdout.close()",
        "sys.stdout = None",
        "os.close(1); os.close(0)",
        "sys.stdin.read()",
        "os.fork() or os._exit(0)",
        "os.fork()",  # both return from the function; one answer counts
        "os.fork() or sys.exit(1)",
        "os.fork() or time.sleep(1000)",  # a child left behind
        "threading.Thread(target=time.sleep, args=(1000,)).start()",
        "sys.setrecursionlimit(50)",
        "os.chdir('/')",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ],
)
async def test_odd_but_harmless_deeds_change_no_score(project: Project, opened: Opened, ask: Ask, deed: str) -> None:
    project(hostile(f"{deed}; solution_str = 7"))
    async with opened("my_rewards:score") as scorer:
        scores = [(await scorer.score(ask(text))).score for text in ("1", "hostile", "2", "3")]
        assert scores == [1.0, 7.0, 2.0, 3.0]
        assert scorer.stats()["workers_started"] == 1


async def test_output_of_the_function_goes_to_the_log(project: Project, opened: Opened, ask: Ask, tmp_path: Path) -> None:
    project(hostile("print('told'); os.system('echo by a child'); solution_str = 7"))
    async with opened("my_rewards:score") as scorer:
        await scorer.score(ask("hostile"))
    assert (tmp_path / "worker.log").read_text().splitlines() == ["told", "by a child"]


async def test_a_log_that_cannot_be_written_is_one_line_of_the_user(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "worker.log").mkdir()
    with pytest.raises(
        RunFolderError, match=r"worker\.log cannot be written: Is a directory; the folder of a run must stay writable"
    ):
        async with opened("exact_match"):
            pass


async def test_a_hanging_call_is_killed_at_its_deadline_and_the_others_go_on(project: Project, opened: Opened, ask: Ask) -> None:
    project(hostile("(signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(1000))"))
    async with opened("my_rewards:score", timeout_s=0.3) as scorer:
        calls = [scorer.score(ask(text)) for text in ("1", "hostile", "2", "hostile", "3")]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [result.score for result in results[::2]] == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
        for error in results[1::2]:
            assert isinstance(error, DeadlineError)
            assert "'my_rewards:score' took longer than reward.timeout_s = 0.3" in str(error)
        stats = scorer.stats()
        assert (stats["scored"], stats["failed"], stats["timed_out"]) == (3, 0, 2)
        assert (stats["workers"], stats["workers_started"], stats["workers_ended"]) == (1, 3, 2)


async def test_a_busy_loop_in_c_code_is_killed_too(project: Project, opened: Opened, ask: Ask) -> None:
    project(hostile("'x' in ('a' * 100_000 + 'b') or __import__('re').match('(a|a)*c', 'a' * 50)"))
    async with opened("my_rewards:score", timeout_s=0.3) as scorer:
        with pytest.raises(DeadlineError):
            await scorer.score(ask("hostile"))
        assert (await scorer.score(ask("1"))).score == 1.0


async def test_a_killed_worker_takes_its_children_along(project: Project, opened: Opened, ask: Ask, tmp_path: Path) -> None:
    project(hostile("(child := os.fork()) and open('child', 'w').write(str(child)); time.sleep(1000)"))
    async with opened("my_rewards:score", timeout_s=0.3) as scorer:
        with pytest.raises(DeadlineError):
            await scorer.score(ask("hostile"))
    await _end_of(int((tmp_path / "child").read_text()))


async def test_a_child_left_behind_ends_with_the_scorer(project: Project, opened: Opened, ask: Ask, tmp_path: Path) -> None:
    project(hostile("(child := os.fork()) or time.sleep(1000); open('child', 'w').write(str(child)); solution_str = 7"))
    async with opened("my_rewards:score") as scorer:
        assert (await scorer.score(ask("hostile"))).score == 7.0
    await _end_of(int((tmp_path / "child").read_text()))


RUN_THAT_IS_KILLED = """if True:
    import asyncio, os
    from asyncrl.config import RewardConfig
    from asyncrl.ports import RewardRequest
    from asyncrl.rewards.scoring import open_scorer
    from asyncrl.world import RealWorld

    async def main():
        async with RealWorld() as world, open_scorer(RewardConfig(function="my_rewards:score"), world=world) as scorer:
            await scorer.score(RewardRequest(data_source="", solution_str="", ground_truth=None, extra_info={}, response_len=1))

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux only")
async def test_a_hanging_worker_ends_with_a_killed_run(project: Project, tmp_path: Path) -> None:
    project("""
        def score(**request):
            open("worker", "w").write(str(os.getpid()))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
    """)
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_THAT_IS_KILLED)
    assert await run.wait() == -signal.SIGKILL
    await _end_of(int((tmp_path / "worker").read_text()))


async def _end_of(pid: int) -> None:
    """Returns when the process, which is no child of ours, is gone: a kill takes effect a little after it was sent."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), 20)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def test_a_worker_that_dies_idle_is_replaced_without_a_lost_score(project: Project, opened: Opened, ask: Ask) -> None:
    project("def score(**request): return {'score': 1, 'pid': os.getpid()}")
    async with opened("my_rewards:score") as scorer:
        pid = (await scorer.score(ask())).extra["pid"]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while scorer.stats()["workers"]:  # noqa: ASYNC110  the scorer tells nobody that an idle worker has died
                await asyncio.sleep(0)
        results = await asyncio.gather(*(scorer.score(ask()) for _ in range(3)))
    assert [result.score for result in results] == [1.0] * 3
    assert {result.extra["pid"] for result in results} != {pid}


async def test_a_request_to_a_worker_that_is_dying_is_an_error_at_most(project: Project, opened: Opened, ask: Ask) -> None:
    project("def score(**request): return {'score': 1, 'pid': os.getpid()}")
    async with opened("my_rewards:score") as scorer:
        os.kill((await scorer.score(ask())).extra["pid"], signal.SIGKILL)
        results = await asyncio.gather(*(scorer.score(ask()) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(result, RewardResult) for result in results) >= 2
    assert all(isinstance(result, RewardResult | RewardError) for result in results)


async def test_a_module_that_stops_importing_fails_sessions_with_the_reason(project: Project, opened: Opened, ask: Ask) -> None:
    project(hostile("os._exit(1)"))
    async with opened("my_rewards:score") as scorer:
        with pytest.raises(RewardError, match="exit code 1"):
            await scorer.score(ask("hostile"))
        path = project("1 / 0")
        with pytest.raises(RewardError, match=r"no new reward worker could be started: .* ZeroDivisionError"):
            await scorer.score(ask("1"))
        project(hostile("pass"))
        os.utime(path, (1, 1))  # another date than the compiled file's
        assert (await scorer.score(ask("1"))).score == 1.0


async def test_cancelling_a_waiting_score_loses_no_worker(project: Project, opened: Opened, ask: Ask, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "here")
    os.mkfifo(tmp_path / "gate")
    project(hostile("(open('here', 'w').close(), open('gate').read()); solution_str = 7"))
    async with opened("my_rewards:score") as scorer:
        tasks = [asyncio.create_task(scorer.score(ask(text))) for text in ("hostile", "1", "2", "3")]
        await asyncio.to_thread((tmp_path / "here").read_text)  # the first call is in the worker
        for task in tasks[1:3]:
            task.cancel()
        (tmp_path / "gate").write_text("go")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results[1:3]] == [asyncio.CancelledError] * 2
        assert [results[0], results[3]] == [RewardResult(score=7.0), RewardResult(score=3.0)]
        assert scorer.stats()["workers_started"] == 1
        assert scorer.stats()["waiting"] == 0


async def test_cancelling_a_running_score_ends_its_worker_and_serves_the_next(
    project: Project, opened: Opened, ask: Ask, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "here")
    project(hostile("(open('here', 'w').close(), time.sleep(1000))"))
    async with opened("my_rewards:score") as scorer:
        task = asyncio.create_task(scorer.score(ask("hostile")))
        await asyncio.to_thread((tmp_path / "here").read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await scorer.score(ask("1"))).score == 1.0


async def test_cancelling_after_any_number_of_loop_turns_loses_nothing(opened: Opened, ask: Ask) -> None:
    async with opened("exact_match", num_workers=2) as scorer:
        for turns in range(0, 40, 3):
            tasks = [asyncio.create_task(scorer.score(ask("a", "a"))) for _ in range(6)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            scores = await asyncio.gather(*(scorer.score(ask("a", "a")) for _ in range(6)))
            assert [score.score for score in scores] == [1.0] * 6
            assert scorer.stats()["waiting"] == 0


async def test_closing_fails_what_is_in_flight_and_reaps_all(project: Project, opened: Opened, ask: Ask) -> None:
    project(hostile("time.sleep(1000)"))
    async with opened("my_rewards:score", num_workers=2) as scorer:
        tasks = [asyncio.create_task(scorer.score(ask("hostile"))) for _ in range(5)]
        for _ in range(3):
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {str(result) for result in results} == {"reward function 'my_rewards:score': the scorer was closed"}
    with pytest.raises(RewardError, match="the scorer was closed"):
        await scorer.score(ask("1"))


async def test_closing_while_a_replacement_starts_reaps_it(project: Project, opened: Opened, ask: Ask) -> None:
    project(hostile("os._exit(1)"))
    async with opened("my_rewards:score") as scorer:
        with pytest.raises(RewardError):
            await scorer.score(ask("hostile"))
        task = asyncio.create_task(scorer.score(ask("1")))
        await asyncio.sleep(0)
    with pytest.raises(RewardError, match="the scorer was closed"):
        await task


async def test_an_error_of_the_run_passes_through_the_scorer_unwrapped(opened: Opened) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with opened("gsm8k"):
            raise LookupError("mine")


async def test_exit_handlers_of_the_module_run_at_close(project: Project, opened: Opened, ask: Ask, tmp_path: Path) -> None:
    project("import atexit\natexit.register(lambda: open('bye', 'w').close())\ndef score(**request): return 1")
    async with opened("my_rewards:score") as scorer:
        await scorer.score(ask())
    assert (tmp_path / "bye").exists()


async def test_no_descriptor_is_left_open(opened: Opened, ask: Ask) -> None:
    async with opened("gsm8k") as scorer:  # the loop's own helpers are open by now
        await scorer.score(ask("1", "1"))
    before = os.listdir("/proc/self/fd")
    async with opened("gsm8k", num_workers=3) as scorer:
        await scorer.score(ask("1", "1"))
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_a_request_that_json_cannot_hold_is_an_error(opened: Opened, ask: Ask) -> None:
    async with opened("gsm8k") as scorer:
        with pytest.raises(RewardError, match="the row cannot be given to reward function 'gsm8k': a value of type set"):
            await scorer.score(ask("1", "1", numbers={1}))
        assert (await scorer.score(ask("1", "1"))).score == 1.0


async def test_numpy_numbers_are_numbers(project: Project, opened: Opened, ask: Ask) -> None:
    project("import numpy as np\ndef score(**request): return {'score': np.float32(0.5), 'acc': np.bool_(True)}")
    async with opened("my_rewards:score") as scorer:
        assert await scorer.score(ask()) == RewardResult(score=0.5, extra={"acc": True})


async def test_a_function_may_use_alarm_signals_for_its_own_limits(project: Project, opened: Opened, ask: Ask) -> None:
    project("""
        def late(*_):
            raise TimeoutError("own limit")
        def score(**request):
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            try:
                time.sleep(1000)
            except TimeoutError:
                return 0.25
    """)
    async with opened("my_rewards:score") as scorer:
        assert (await scorer.score(ask())).score == 0.25


def test_the_worker_loads_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = "import sys, asyncrl.rewards.worker; print(sorted({'torch', 'numpy', 'pydantic', 'asyncio'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
