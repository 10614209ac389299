"""How much sooner is an asynchronous run done than a synchronous one, when tools take time? Real runs of both, taking turns.

    python benchmarks/async_vs_sync.py [--seeds 3] [--steps 40] [--runs DIR] [--json]

1. A policy: the quick start's tiny model, taught to call the calculator and then, for a few steps, not to bother. Rows: the quick
   start's problems with two operations, which take three turns: two calls and an answer. It finds that out in the first steps.
2. Runs of `asyncrl train`, each in a process of its own, sync and async in turn: 8 groups x 4 sessions a step, `max_staleness` 2.
   The tool is async and waits a log-normal time (median 0.3 s, sigma 0.8, 3 s at most) that follows from its arguments and from how
   often they came before, so both modes draw the same times. Then the same with a tool that takes no time.
3. Wall seconds: from the first admission to the end of the last step, without start-up, evaluation and export. Both modes train on
   the same number of trajectories.
4. The reward reached: held-out problems solved by the last weights at temperature 1.

ratio: seconds of sync / seconds of async. ideal_ratio: a step of the sync run / the ideal step, which is max(train, generation /
concurrency), all of it measured in the sync run: train = seconds of a step that are not `timing_s/gen`; generation = seconds of all
sessions of a step, added up (trace.jsonl); concurrency = sessions that the bound lets run at once, (max_staleness + 1) x 32.
in_order_ratio: the ideal where it also counts that batches are taken whole and in the order of admission: a step takes at least the
slowest session of a batch / (max_staleness + 1). All are medians over the seeds.

JSON: ratio, ideal_ratio, in_order_ratio, ratio_no_latency, reward_sync, reward_async, warm_start, and every run's numbers: wall_s,
cpu_s, steps, and the mean seconds of a step by timing_s/*.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from asyncrl import cli
from asyncrl.assembly import run_evaluation
from asyncrl.config import SFTRun, load_run
from asyncrl.event_loop import run_loop
from asyncrl.examples.calculator import make
from asyncrl.examples.problems import Problem, draw_problem, to_row
from asyncrl.examples.quickstart import SFT_CONFIG, sft_overrides
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import RunFolder, newest_run_folder
from asyncrl.observe.trace_file import SpanLine, TraceFile
from asyncrl.ports import SpanKind
from asyncrl.preflight import check_eval
from asyncrl.sft import WarmStart
from asyncrl.tools import tool
from asyncrl.tools.calculator import calculator as plain_calculator

CONFIGS = Path(__file__).parent.parent / "configs"
MODULE = "asyncrl_benchmark_async_vs_sync"
GROUPS, SESSIONS, TURNS, MAX_STALENESS = 8, 4, 3, 2
SIGMA, CAP_S = 0.8, 3.0
TRAIN_ROWS, VAL_ROWS = 1024, 256
STYLE_SHARE = 0.08
"""Of the warm start: enough that most sessions guess, so that there is something to learn; with more none would call."""
MODES = ("sync", "async")
CONFIG = f"""
[data]
train_files = "-"
train_batch_size = {GROUPS}
max_prompt_length = 32
max_response_length = 128

[model]
path = "-"

[rollout]
n = {SESSIONS}
max_num_seqs = {GROUPS * SESSIONS * (MAX_STALENESS + 1)}

[agent]
name = "tool_agent"
tools = ["{MODULE}:calculator"]
max_turns = {TURNS}
max_tokens_per_turn = 24
max_concurrent_tools = {GROUPS * SESSIONS * (MAX_STALENESS + 1)}

[reward]
function = "exact_match"

[actor]
clip_ratio_high = 0.28

[actor.optim]
lr = 3e-4
lr_scheduler_type = "linear"
min_lr_ratio = 0.1

[trainer]
save_freq = 0
trace_groups = {GROUPS}
tensorboard = false
"""
"""The quick start's settings, with a lower learning rate for smaller batches; slots, and calls at once, for all sessions that the
bound allows."""

_asked: Counter[str] = Counter()


def latency_s(expression: str, time_before: int, median_s: float) -> float:
    """Log-normal; the same for the same call of a run."""
    digest = hashlib.blake2b(f"{expression} {time_before}".encode(), digest_size=8).digest()
    normal = random.Random(int.from_bytes(digest, "big")).gauss(0.0, 1.0)
    return min(median_s * math.exp(SIGMA * normal), CAP_S)


@tool(name="calculator")
async def calculator(expression: str) -> str:
    """Calculate one operation (+, -, * or /) on two numbers.

    Args:
        expression: Two numbers with an operation between them, such as "12 + 34".
    """
    median_s = float(os.environ["TOOL_MEDIAN_S"])
    _asked[expression] += 1
    if median_s:
        await asyncio.sleep(latency_s(expression, _asked[expression], median_s))
    return str(plain_calculator.call({"expression": expression}, {}))


# --- the policy and its rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """model: taught to call the tool; train, val: problems of two operations; config: what all runs share."""

    model: Path
    train: Path
    val: Path
    config: Path


def make_task(folder: Path, warm_start_steps: int) -> Task:
    files = make(folder / "data", seed=1)
    task = Task(model=folder / "warm", train=folder / "train.jsonl", val=folder / "val.jsonl", config=folder / "async_vs_sync.toml")
    task.config.write_text(CONFIG, encoding="utf-8")
    write_rows(task.train, TRAIN_ROWS, held_out=False)
    write_rows(task.val, VAL_ROWS, held_out=True)
    shares = f"sft.stage_shares=[{1 - STYLE_SHARE}, {STYLE_SHARE}]"
    overrides = [*sft_overrides(files, runs=folder, seed=1), shares, f"sft.total_steps={warm_start_steps}"]
    learner = WarmStart(load_run(SFTRun, CONFIGS / SFT_CONFIG, overrides))
    for _ in range(warm_start_steps):
        learner.step()
    learner.export(task.model)
    return task


def write_rows(path: Path, count: int, *, held_out: bool) -> None:
    source = random.Random(1)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(source, held_out=held_out)
        if len(problem.steps) == TURNS - 1:
            found.setdefault(problem.question, problem)
    path.write_text("".join(json.dumps(to_row(problem, at)) + "\n" for at, problem in enumerate(found.values())), encoding="utf-8")


# --- one run, in a process of its own ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One run. median_s: of the tool; 0: it takes no time."""

    mode: str
    median_s: float
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """steps: trained. train_s, sessions_s, slowest_s: of a step, the mean. timing_s: metric -> mean seconds of a step."""

    wall_s: float
    cpu_s: float
    steps: int
    trajectories: int
    train_s: float
    sessions_s: float
    slowest_s: float
    timing_s: dict[str, float]
    turns: float
    reward: float

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps


def cpu_s() -> float:
    """User and system seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def train(asked: Asked, task: Task, runs: Path) -> RunFolder:
    name = f"{asked.mode}-{asked.median_s:g}-{asked.seed}"
    overrides = [
        f"data.train_files='{task.train}'",
        f"model.path='{task.model}'",
        f"trainer.default_local_dir='{runs}'",
        f"trainer.experiment_name='{name}'",
        f"trainer.seed={asked.seed}",
        f"trainer.total_training_steps={asked.steps}",
        f"trainer.mode='{asked.mode}'",
        *([f"trainer.max_staleness={MAX_STALENESS}"] if asked.mode == "async" else []),
    ]
    os.environ["TOOL_MEDIAN_S"] = str(asked.median_s)
    with contextlib.redirect_stdout(sys.stderr):
        cli.train(task.config, overrides)
    return newest_run_folder(runs, name)


def success(model: Path, task: Task) -> float:
    """Held-out problems solved at temperature 1, with a tool that takes no time."""
    os.environ["TOOL_MEDIAN_S"] = "0"
    run, rows = check_eval(model, task.val, task.config, ["eval.greedy=false"])
    return run_loop(run_evaluation(run, rows))["eval/sampled/success"]


def measure(asked: Asked, task: Task, runs: Path) -> Measured:
    begin = cpu_s()
    folder = train(asked, task, runs)
    spent_s = cpu_s() - begin
    lines = read_metrics(folder.metrics)
    trace = TraceFile(folder.trace)
    sessions = [_session_seconds(trace, head.step) for head in trace.heads if head.step <= asked.steps]
    began = min(head.wall_time + group.admitted_s for head in trace.heads for group in head.groups)
    timing = {name for line in lines for name in line if name.startswith("timing_s/")}
    means = {name: statistics.fmean(line.get(name, 0.0) for line in lines) for name in sorted(timing)}
    return Measured(
        wall_s=lines[-1]["wall_time"] - began,
        cpu_s=spent_s,
        steps=len(lines),
        trajectories=sum(map(len, sessions)),
        train_s=means["timing_s/step"] - means["timing_s/gen"],
        sessions_s=statistics.fmean(map(sum, sessions)),
        slowest_s=statistics.fmean(map(max, sessions)),
        timing_s={name: round(value, 4) for name, value in means.items()},
        turns=statistics.fmean(line["num_turns/mean"] for line in lines),
        reward=success(folder.export, task),
    )


def _session_seconds(trace: TraceFile, step: int) -> list[float]:
    """Of each session of the groups that the step trained on."""
    record = trace.read(step)
    trained = {group.uid for group in record.head.groups if group.status == "trained"}
    return [
        line.end_s - line.start_s
        for line in record.lines
        if isinstance(line, SpanLine) and line.span is SpanKind.SESSION and line.uid in trained
    ]


def in_own_process(asked: Asked, task: Task, runs: Path) -> Measured:
    """Raises CalledProcessError, with its output shown, when it fails."""
    given = {"asked": asdict(asked), "task": {name: str(path) for name, path in asdict(task).items()}, "runs": str(runs)}
    command = [sys.executable, __file__, "--child", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def run_child(text: str) -> None:
    """What `in_own_process` starts: one run, its numbers as the last line."""
    given = json.loads(text)
    sys.modules[MODULE] = sys.modules[__name__]
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    task = Task(**{name: Path(path) for name, path in given["task"].items()})
    print(json.dumps(asdict(measure(Asked(**given["asked"]), task, Path(given["runs"])))))


# --- both modes beside each other -------------------------------------------------------------------------------------------------


Pair = dict[str, Measured]
"""Mode -> its run."""


def measure_pairs(task: Task, runs: Path, *, median_s: float, seeds: int, steps: int) -> list[Pair]:
    """A pair of runs a seed; who goes first changes."""
    pairs: list[Pair] = []
    for seed in range(1, seeds + 1):
        found: Pair = {}
        for mode in MODES if seed % 2 else reversed(MODES):
            found[mode] = in_own_process(Asked(mode=mode, median_s=median_s, seed=seed, steps=steps), task, runs)
            _print_run(mode, median_s, seed, found[mode])
        assert len({(each.steps, each.trajectories) for each in found.values()}) == 1, "both train on as many trajectories"
        pairs.append(found)
    return pairs


def _print_run(mode: str, median_s: float, seed: int, run: Measured) -> None:
    step = f"a step {run.step_s:6.3f} s: waits {run.timing_s['timing_s/gen']:6.3f}, trains {run.train_s:6.3f}"
    print(
        f"{mode:5}  tool {median_s:g} s  seed {seed}  wall {run.wall_s:7.2f} s  cpu {run.cpu_s:6.1f} s  {step}  "
        f"turns {run.turns:.2f}  reward {run.reward:.3f}",
        flush=True,
    )


def ratio(pair: Pair) -> float:
    return pair["sync"].wall_s / pair["async"].wall_s


def ideal_ratio(pair: Pair) -> float:
    sync = pair["sync"]
    concurrency = (MAX_STALENESS + 1) * GROUPS * SESSIONS
    return sync.step_s / max(sync.train_s, sync.sessions_s / concurrency)


def in_order_ratio(pair: Pair) -> float:
    sync = pair["sync"]
    return min(ideal_ratio(pair), sync.step_s / (sync.slowest_s / (MAX_STALENESS + 1)))


def summary(slow: Sequence[Pair], quick: Sequence[Pair]) -> dict[str, float]:
    found = {
        "ratio": statistics.median(map(ratio, slow)),
        "ideal_ratio": statistics.median(map(ideal_ratio, slow)),
        "in_order_ratio": statistics.median(map(in_order_ratio, slow)),
        "ratio_no_latency": statistics.median(map(ratio, quick)),
        **{f"reward_{mode}": statistics.fmean(pair[mode].reward for pair in slow) for mode in MODES},
    }
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run")
    parser.add_argument("--median", type=float, default=0.3, help="seconds of the tool, the median")
    parser.add_argument("--warm-start", type=int, default=600, help="steps of the warm start")
    parser.add_argument("--runs", type=Path, help="folder to keep policy and runs in; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        run_child(arguments.child)
        return
    sys.modules[MODULE] = sys.modules[__name__]
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        task = make_task(runs, arguments.warm_start)
        before = success(task.model, task)
        slow, quick = (
            measure_pairs(task, runs, median_s=median_s, seeds=arguments.seeds, steps=arguments.steps)
            for median_s in (arguments.median, 0.0)
        )
    found = {**summary(slow, quick), "warm_start": round(before, 3)}
    for name, value in found.items():
        print(f"{name:18} {value:7.3f}")
    if arguments.json:
        every = {"slow_tool": slow, "no_latency": quick}
        runs_of = {name: [{mode: asdict(run) for mode, run in pair.items()} for pair in pairs] for name, pairs in every.items()}
        print(json.dumps({"bench": "async-vs-sync", **found, **runs_of}))


if __name__ == "__main__":
    main()
