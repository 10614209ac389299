"""How late is the event loop while 1,000 sessions are live? Milliseconds.

    python benchmarks/loop_lag.py [--sessions 1000] [--seconds 20] [--tool 1.0] [--engines torch scripted] [--json]

Real: GroupRunner, sessions of up to three turns with tool calls, the calculator behind an async wait (log-normal, median 1 s,
sigma 0.8, 10 s at most), chat template, rule reward, TransferQueue with its journal, admission, replay, whose batches are sampled,
read and retired as a step does. `torch`: the embedded engine, on its own thread in this process, with the quick start's tiny model
after a while of lessons. `scripted`: an engine that answers after 0.2 s without a model. Not here: the training thread.

As many groups are started as it takes to keep so many sessions live. After a warm-up a timer of 10 ms notes how much later it
fires, as the product's own `loop_lag/*` does. Beside it: sessions a second, and the share of a core that the loop's thread and the
whole process use.

JSON: a block for each engine: p50_ms, p99_ms, max_ms, live (mean), sessions_per_s, loop_cpu, process_cpu.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.agents.runner import GroupRunner
from asyncrl.config import ModelConfig, SFTRun, TrainRun, load_run, parse_run
from asyncrl.event_loop import rare_collections, run_loop
from asyncrl.examples.calculator import make
from asyncrl.examples.problems import draw_problem
from asyncrl.examples.quickstart import SFT_CONFIG, sft_overrides
from asyncrl.keys import TRAIN, StepLease
from asyncrl.observe.loop_lag import LoopLag
from asyncrl.ports import GenerateRequest, Json, Prompt, RolloutEngine, Span, SpanKind
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.rewards.scoring import open_scorer
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.sft import WarmStart
from asyncrl.tools import FunctionTool, tool
from asyncrl.tools.calculator import calculator as plain_calculator
from asyncrl.training.model import load_model
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

CONFIGS = Path(__file__).parent.parent / "configs"
BATCH, GROUP_SIZE = 16, 8
SIGMA, CAP_S, SCRIPTED_S = 0.8, 10.0, 0.2
SLOTS = 128
WARM_UP_S = 5.0
INTERVAL_S = 0.01
READ = ["prompts", "responses", "response_mask", "rollout_log_probs", "token_versions", "reward_score"]
"""What a training step reads."""

Numbers = dict[str, float]


def make_model(folder: Path, steps: int) -> Path:
    """The quick start's model after some steps of demonstrations."""
    files = make(folder / "data", seed=1)
    stage = [f"sft.stages=['{files.mechanics}']", "sft.stage_shares=[]", f"sft.total_steps={steps}"]
    learner = WarmStart(load_run(SFTRun, CONFIGS / SFT_CONFIG, [*sft_overrides(files, runs=folder, seed=1), *stage]))
    for _ in range(steps):
        learner.step()
    learner.export(folder / "model")
    return folder / "model"


def slow_calculator(median_s: float) -> FunctionTool:
    asked = 0

    async def calculator(expression: str) -> str:
        """Calculate one operation (+, -, * or /) on two numbers.

        Args:
            expression: Two numbers with an operation between them, such as "12 + 34".
        """
        nonlocal asked
        asked += 1
        digest = hashlib.blake2b(f"{expression} {asked}".encode(), digest_size=8).digest()
        normal = random.Random(int.from_bytes(digest, "big")).gauss(0.0, 1.0)
        await asyncio.sleep(min(median_s * math.exp(SIGMA * normal), CAP_S))
        return str(plain_calculator.call({"expression": expression}, {}))

    return tool(name="calculator")(calculator)


def configuration(model: Path) -> TrainRun:
    return parse_run(
        TrainRun,
        {
            "data": {"train_files": ["-"], "train_batch_size": BATCH, "max_prompt_length": 32, "max_response_length": 128},
            "model": {"path": str(model)},
            "rollout": {"n": GROUP_SIZE, "max_num_seqs": SLOTS},
            "agent": {
                "name": "tool_agent",
                "tools": ["calculator"],
                "max_turns": 4,
                "max_tokens_per_turn": 24,
                "max_concurrent_tools": 1 << 16,
            },
            "reward": {"function": "exact_match"},
        },
    )


class Script:
    """Two calls, then an answer, each after a while."""

    def __init__(self, template: ChatTemplate) -> None:
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'
        self._call = template.encode_assistant(call)
        self._answer = template.encode_assistant("46")

    async def __call__(self, request: GenerateRequest) -> Sequence[int]:
        await asyncio.sleep(SCRIPTED_S)
        return self._answer if request.request_id.endswith("_2") else self._call


class Live:
    """The sessions under way, counted by their spans."""

    def __init__(self) -> None:
        self.number = 0
        self.ended = 0
        self.fewer = asyncio.Event()

    def span(self, uid: str, session_id: int) -> Span:
        return _Counted(self)

    def end(self) -> None:
        self.number -= 1
        self.ended += 1
        self.fewer.set()


class _Counted:
    __slots__ = ("_live",)

    is_traced = False

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def span(self, kind: SpanKind, name: str) -> Span:
        return _Counted(None)

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.end()


class Crowd:
    """A run without its training: groups come, finish, are sampled, read and retired."""

    def __init__(self, queue: TransferQueue, admission: Admission, replay: ReplayBuffer, runner: GroupRunner, live: Live) -> None:
        self._queue = queue
        self._admission = admission
        self._replay = replay
        self._runner = runner
        self._live = live
        self._source = random.Random(1)
        self._number = 0

    async def admit(self, wanted: int, world: RealWorld) -> None:
        """Keep `wanted` sessions live."""
        while True:
            while self._live.number < wanted:
                problem = draw_problem(self._source, held_out=False)
                prompt = Prompt(
                    uid=world.uid(self._number),
                    messages=[{"role": "user", "content": problem.question}],
                    data_source="sums",
                    ground_truth=str(problem.answer),
                    number=self._number,
                )
                self._number += 1
                self._admission.admit(prompt.uid)
                self._runner.start(prompt)
                self._live.number += GROUP_SIZE
                await asyncio.sleep(0)
            self._live.fewer.clear()
            await self._live.fewer.wait()

    async def train(self) -> None:
        """Step after step, without the compute."""
        step = 0
        while True:
            step += 1
            batch = await self._replay.sample(step, BATCH)
            lease = StepLease(step=step)
            await self._queue.open_lease(lease, keys=batch.keys, partition_id=TRAIN)
            await self._queue.kv_batch_get(batch.keys, partition_id=TRAIN, fields=READ)
            await self._queue.retire(batch.keys, partition_id=TRAIN, step=step, lease=lease)
            await self._queue.close_lease(lease)
            self._admission.publish(step)
            await self._queue.purge(step)


async def measure(
    engine: RolloutEngine, template: ChatTemplate, slow: FunctionTool, run: TrainRun, folder: Path, *, sessions: int, seconds: float
) -> Numbers:
    live = Live()
    admission = Admission(batch_size=BATCH, max_staleness=sessions)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(RealWorld())
        journal = open_queue(folder / "journal.db", sync="normal", world=world, commit_timeout_s=60.0)
        queue = await stack.enter_async_context(journal)
        scorer = await stack.enter_async_context(open_scorer(run.reward, world=world))
        await stack.enter_async_context(engine)
        replay = ReplayBuffer(queue, admission, group_size=GROUP_SIZE, config=run.replay, world=world)
        agents = GroupRunner(queue, engine, scorer, template, {"calculator": slow}, run, world, live.span)
        runner = await stack.enter_async_context(agents)
        crowd = Crowd(queue, admission, replay, runner, live)
        tasks = [asyncio.create_task(work) for work in (replay.run(), crowd.admit(sessions, world), crowd.train())]
        await asyncio.sleep(WARM_UP_S)
        found = await _lag(live, seconds)
        failed = [task.exception() for task in tasks if task.done()]
        assert not failed, failed
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return found


async def _lag(live: Live, seconds: float) -> Numbers:
    lives: list[int] = []
    ended, process_s, began = live.ended, time.process_time(), time.perf_counter()
    async with LoopLag(interval_s=INTERVAL_S) as lag:
        while time.perf_counter() - began < seconds:
            await asyncio.sleep(0.5)
            lives.append(live.number)
        stats = lag.stats()
    took_s = time.perf_counter() - began
    return {
        "p50_ms": stats["p50_s"] * 1e3,
        "p99_ms": stats["p99_s"] * 1e3,
        "max_ms": stats["max_s"] * 1e3,
        "live": statistics.fmean(lives),
        "sessions_per_s": (live.ended - ended) / took_s,
        "loop_cpu": stats["cpu_s"] / took_s,
        "process_cpu": (time.process_time() - process_s) / took_s,
    }


def measure_engine(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> Numbers:
    run = configuration(model)
    slow = slow_calculator(arguments.tool)
    template = load_chat_template(ModelConfig(path=str(model)), [slow.schema])
    if name == "torch":
        engine: RolloutEngine = TorchEngine(
            load_model(run.model), max_num_seqs=SLOTS, context_len=run.max_model_len, decode=template.decode
        )
    else:
        engine = ScriptedEngine(Script(template))
    folder.mkdir()
    crowd = measure(engine, template, slow, run, folder, sessions=arguments.sessions, seconds=arguments.seconds)
    with rare_collections():  # as in a run
        return {each: round(value, 3) for each, value in run_loop(crowd).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000, help="live at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="24 at most count")
    parser.add_argument("--tool", type=float, default=1.0, help="seconds of a tool call, the median")
    parser.add_argument("--warm-start", type=int, default=200, help="steps of the model's lessons")
    parser.add_argument("--engines", nargs="+", choices=["torch", "scripted"], default=["torch", "scripted"])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, Numbers] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), arguments.warm_start)
        for name in arguments.engines:
            numbers = found[name] = measure_engine(name, model, Path(scratch) / name, arguments)
            print(
                f"{name:8} {numbers['live']:.0f} sessions live, {numbers['sessions_per_s']:.0f} a second: lag p50 "
                f"{numbers['p50_ms']:.2f} ms, p99 {numbers['p99_ms']:.2f} ms, max {numbers['max_ms']:.2f} ms; the loop's thread "
                f"computes {numbers['loop_cpu']:.0%} of the time, the process {numbers['process_cpu']:.0%}",
                flush=True,
            )
    print("goal: p99 10 ms or less")
    if arguments.json:
        print(json.dumps({"bench": "loop-lag", **found}))


if __name__ == "__main__":
    main()
