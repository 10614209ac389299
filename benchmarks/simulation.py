"""How fast the simulator is: runs and steps a second of a scenario, with and without faults and oracles, against bare asyncio.

    python benchmarks/simulation.py [SCENARIO.toml] [--seeds 40] [--repeats 3] [--json]

`bare` is asyncio alone: as many groups, sessions and turns as the scenario has, each turn with three waits under a deadline and a
task of its own for its tool, without a controller; `virtual` is the same on the simulator's loop. CPU seconds of the process (this
one has one thread); of `--repeats` rounds over the same seeds the fastest counts, since a busy machine only ever adds.
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.draws import draw_count, unit
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.run import simulate

NONE: frozenset[FaultKind] = frozenset()
MODES: dict[str, tuple[frozenset[FaultKind], bool]] = {
    "controller": (NONE, False),
    "oracles": (NONE, True),
    "faults": (ALL, False),
    "faults, oracles": (ALL, True),
}
"""Name -> (faults, whether oracles look)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one mode, over all seeds. A resume is a step of a task; a step is that, or an event of an edge."""

    name: str
    runs_per_s: float
    steps_per_s: float
    resumes_per_s: float
    virtual_s_per_s: float
    steps: float
    """A run."""
    lives: float
    """A run."""


@dataclass(slots=True, kw_only=True)
class Total:
    """Over the seeds of one round."""

    steps: int = 0
    resumes: int = 0
    virtual_s: float = 0.0
    lives: int = 0


def measure(name: str, num_runs: int, repeats: int, round_of: Callable[[], Total]) -> Speed:
    best, total = float("inf"), Total()
    for _ in range(repeats):
        began = time.process_time()
        total = round_of()
        best = min(best, time.process_time() - began)
    return Speed(
        name=name,
        runs_per_s=num_runs / best,
        steps_per_s=total.steps / best,
        resumes_per_s=total.resumes / best,
        virtual_s_per_s=total.virtual_s / best,
        steps=total.steps / num_runs,
        lives=total.lives / num_runs,
    )


# --- with the controller ----------------------------------------------------------------------------------------------------------


def simulated(scenario: Scenario, seeds: Iterable[int], faults: frozenset[FaultKind], oracles: bool) -> Total:
    total = Total()
    for seed in seeds:
        outcome = simulate(scenario, seed=seed, faults=faults, oracles=oracles)
        if outcome.failure is not None:
            raise SystemExit(f"seed {seed}: {type(outcome.failure).__name__}: {outcome.failure}")
        total.steps += outcome.steps
        total.virtual_s += outcome.seconds
        total.lives += outcome.num_lives
    return total


def resumes_of(scenario: Scenario, seeds: Iterable[int], faults: frozenset[FaultKind]) -> int:
    """Not measured with: it keeps the whole log."""
    logs = (simulate(scenario, seed=seed, faults=faults, oracles=False, keep_events=None).log for seed in seeds)
    return sum(line.split()[1] == "step" for log in logs for line in log.lines())


# --- without --------------------------------------------------------------------------------------------------------------------


async def bare_run(scenario: Scenario, wait: Callable[[float], "asyncio.Future[None]"]) -> None:
    """The waits of the scenario's sessions, with `wait` in place of engine, journal and tool."""
    groups = scenario.trainer.total_training_steps * scenario.data.train_batch_size
    async with asyncio.TaskGroup() as sessions:
        for number in range(groups * scenario.rollout.n):
            sessions.create_task(bare_session(draw_count(scenario.sim.sessions.turns, unit(number)), wait))


async def bare_session(turns: int, wait: Callable[[float], "asyncio.Future[None]"]) -> None:
    for turn in range(turns):
        for seconds in (0.3, 0.001):
            async with asyncio.timeout(60):
                await wait(seconds)
        if turn + 1 < turns:
            async with asyncio.TaskGroup() as tool:
                tool.create_task(bare_tool(wait))


async def bare_tool(wait: Callable[[float], "asyncio.Future[None]"]) -> None:
    async with asyncio.timeout(60):
        await wait(0.2)


def soon(seconds: float) -> "asyncio.Future[None]":
    """Real time is not waited for."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, None)
    return future


def in_time(seconds: float) -> "asyncio.Future[None]":
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_later(seconds, future.set_result, None)
    return future


def bare(scenario: Scenario, num_runs: int) -> Total:
    for _ in range(num_runs):
        asyncio.run(bare_run(scenario, soon))
    return Total()


def virtual(scenario: Scenario, seeds: Iterable[int]) -> Total:
    total = Total()
    for seed in seeds:
        loop = VirtualLoop(seed)
        loop.run_until_complete(bare_run(scenario, in_time))
        total.steps += loop.steps
        total.virtual_s += loop.time()
        loop.close()
    return total


# --- told -----------------------------------------------------------------------------------------------------------------------


def table(speeds: Iterable[Speed]) -> Iterable[str]:
    yield f"{'':16} {'runs/s':>8} {'steps/s':>9} {'resumes/s':>9} {'virtual s/s':>11} {'steps a run':>11} {'lives a run':>11}"
    for speed in speeds:
        rates = f"{speed.runs_per_s:8.1f} {speed.steps_per_s:9.0f} {speed.resumes_per_s:9.0f} {speed.virtual_s_per_s:11.0f}"
        yield f"{speed.name:16} {rates} {speed.steps:11.0f} {speed.lives:11.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", type=Path, default=Path("configs/sim/reference.toml"))
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    scenario, seeds = load_run(Scenario, arguments.scenario), range(arguments.seeds)
    simulate(scenario, seed=0)  # what is made once a process

    def measured(name: str, round_of: Callable[[], Total]) -> Speed:
        return measure(name, len(seeds), arguments.repeats, round_of)

    speeds = [measured("bare", lambda: bare(scenario, len(seeds))), measured("virtual", lambda: virtual(scenario, seeds))]
    resumes = {faults: resumes_of(scenario, seeds, faults) for faults in (NONE, ALL)}
    for name, (faults, oracles) in MODES.items():

        def round_of(faults: frozenset[FaultKind] = faults, oracles: bool = oracles) -> Total:
            total = simulated(scenario, seeds, faults, oracles)
            total.resumes = resumes[faults]
            return total

        speeds.append(measured(name, round_of))
    print("\n".join(table(speeds)))
    if arguments.json:
        print(
            json.dumps({"bench": "simulation", "scenario": str(arguments.scenario), "modes": [asdict(speed) for speed in speeds]})
        )


if __name__ == "__main__":
    main()
