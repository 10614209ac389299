"""Is a run a pure function of its seed? Every seed runs in two processes that differ in all that must not matter.

`python -m asyncrl.simulation.determinism configs/sim/reference.toml --seeds 200` -> each seed that differs, and how many

The processes differ in their hash seed, in the order in which they run the seeds, and in Python's development mode (other
allocators, other warnings). Compared is a digest of every event and of what the run has left behind.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.errors import SimulationError
from asyncrl.simulation.faults import FaultKind
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import Outcome, simulate


def digest_of(outcome: Outcome) -> str:
    """Hex digits over the log, the end, every step's numbers and the checkpoints."""
    left = (outcome.log.digest, outcome.seconds, outcome.steps, outcome.num_lives, repr(outcome.failure), outcome.watcher.steps)
    steps = [checkpoint.step for checkpoint in outcome.machine.checkpoints]
    return hashlib.blake2b(repr((left, steps)).encode(), digest_size=16).hexdigest()


def digests(path: Path, seeds: Sequence[int], *, faults: frozenset[FaultKind], order: Order) -> Iterator[tuple[int, str]]:
    """(seed, digest), in the order of the seeds, run in this process."""
    scenario = load_run(Scenario, path)
    for seed in seeds:
        yield seed, digest_of(simulate(scenario, seed=seed, faults=faults, order=order, digest=True))


def differing(path: Path, seeds: Sequence[int], *, has_faults: bool, order: Order = Order.TASKS) -> list[int]:
    """Seeds whose two runs differ. Two processes at a time; raises SimulationError when one of them breaks down."""
    forward = _begin(path, seeds, has_faults, order, hash_seed=0, flags=())
    backward = _begin(path, seeds[::-1], has_faults, order, hash_seed=4_294_967_295, flags=("-X", "dev"))
    first, second = _lines_of(forward), _lines_of(backward)[::-1]
    return [seed for seed, one, other in zip(seeds, first, second, strict=True) if one != other]


def _begin(
    path: Path, seeds: Sequence[int], has_faults: bool, order: Order, *, hash_seed: int, flags: Sequence[str]
) -> "subprocess.Popen[str]":
    words = ["--print", ",".join(map(str, seeds)), "--order", order, *(() if has_faults else ("--no-faults",))]
    command = [sys.executable, *flags, "-W", "ignore", "-m", __spec__.name, str(path), *words]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _lines_of(process: "subprocess.Popen[str]") -> list[str]:
    """Bounded: a run ends by itself (`sim.max_s`, `sim.max_lives`)."""
    lines = process.communicate()[0].splitlines()
    if process.returncode:
        raise SimulationError(f"a process that ran the seeds ended with status {process.returncode}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: exit status 1 when a seed's two runs differ."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description="Run every seed in two processes and compare.")
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from 0")
    parser.add_argument("--order", type=Order, choices=list(Order), default=Order.TASKS)
    parser.add_argument("--no-faults", action="store_true", help="the world as it should be")
    parser.add_argument("--print", metavar="SEEDS", help="run these, comma-separated, in this process, and print their digests")
    asked = parser.parse_args(arguments)
    if asked.print:
        faults = frozenset[FaultKind]() if asked.no_faults else frozenset(FaultKind)
        for seed, digest in digests(
            asked.scenario, [int(seed) for seed in asked.print.split(",")], faults=faults, order=asked.order
        ):
            _say(f"{seed} {digest}")
        return 0
    seeds = range(asked.seeds)
    different = differing(asked.scenario, seeds, has_faults=not asked.no_faults, order=asked.order)
    for seed in different:
        _say(f"seed {seed} differs from itself")
    _say(f"{len(seeds)} seeds twice, {len(different)} differ")
    return 1 if different else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may stop early, as `head` does
    sys.exit(main())
