"""What the trace costs: the recorder's own CPU seconds as a share of a training step's.

    python benchmarks/trace_cost.py [CONFIG.toml] [--steps 20] [--groups 1] [--json]

A real run of the configuration (the quick start's, after `make train` has made its data and warm start), with every function of the
recorder timed by its thread's CPU clock: spans, reports of the stages, the store's description, the line in trace.jsonl. What the
timing itself takes is counted as the recorder's, so the share is an upper bound. A comparison of runs with and without a trace
drowns in the noise of a shared machine.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import assembly
from asyncrl.agents import loop, session
from asyncrl.config import TrainRun, load_run
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.sight import Sight
from asyncrl.observe.spans import RecordedSpan
from asyncrl.observe.trace_file import TraceLog
from asyncrl.preflight import check_train
from asyncrl.stages import stage
from asyncrl.transfer_queue import store

RECORDER: list[tuple[Any, tuple[str, ...]]] = [
    (Lineage, ("admit", "session_span", "rows_of", "begin_step", "add", "retire", "time", "end_step")),
    (RecordedSpan, ("span", "note", "__exit__")),
    (TraceLog, ("append",)),
    (loop, ("_facts_of",)),
    (session, ("_facts_of",)),
    (stage, ("mask_sums", "reports_of")),
    (store, ("describe",)),
]
"""Every function that a trace calls and an untraced run does not, by its owner."""


def time_recorder(spent: Counter[str]) -> None:
    """Add the CPU seconds of every call to `spent`. Raises AttributeError when the recorder has other functions by now."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                spent[name] += time.thread_time() - started  # type: ignore[assignment]  # a Counter of seconds

        return call

    for owner, names in RECORDER:
        for name in names:
            setattr(owner, name, timed(name, getattr(owner, name)))


def note_steps(marks: list[float]) -> None:
    """The process's CPU clock at the end of each step."""
    end_step = Sight.end_step

    async def noted(self: Sight, *args: Any, **named: Any) -> None:
        await end_step(self, *args, **named)
        marks.append(time.process_time())

    Sight.end_step = noted  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=1, help="trainer.trace_groups")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    spent: Counter[str] = Counter()
    marks: list[float] = []
    time_recorder(spent)
    note_steps(marks)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "trainer.default_local_dir": f"'{folder}'",
            "trainer.total_training_steps": arguments.steps + 1,
            "trainer.trace_groups": arguments.groups,
            "trainer.val_before_train": "false",
            "trainer.test_freq": 0,
            "eval.max_rows": 4,
        }
        run = load_run(TrainRun, arguments.config, [f"{key}={value}" for key, value in settings.items()])
        inputs = check_train(run)
        path = asyncio.run(assembly.run_training(run, inputs))
        trace_bytes = (path / "trace.jsonl").stat().st_size
    step_s = statistics.mean(after - before for before, after in itertools.pairwise(marks))
    recorder_s = sum(spent.values()) / (arguments.steps + 1)
    share = recorder_s / step_s
    print(f"a step {step_s * 1e3:.0f} CPU ms, the recorder {recorder_s * 1e3:.2f} of them: {share:.2%} (goal: below 1 %)")
    print(f"trace.jsonl {trace_bytes / (arguments.steps + 1) / 1e3:.0f} kB a step; most: {spent.most_common(3)}")
    if arguments.json:
        print(json.dumps({"bench": "trace-cost", "step_ms": step_s * 1e3, "recorder_ms": recorder_s * 1e3, "share": share}))


if __name__ == "__main__":
    main()
