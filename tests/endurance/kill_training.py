"""Real trainers that die at any moment (`kill -9`) and are resumed until their run ends, and what their runs say afterwards.

    python tests/endurance/kill_training.py [--kills 50] [--seed 1] [--borders] [--case sync]

Each life is forked from this process, which has imported everything, so that it costs a second and not a cold start; see
`training_life.py`. A run goes through many lives: each is killed at a random time or at a random pass of a random point (a site of
the controller, a stage, a step of a checkpoint, a file), and the next one resumes; now and then it finds the newest checkpoint
damaged. What must hold at the end: `training_checks.py`.
Where the setting is deterministic and no token may be old, the weights must be, byte for byte, those of a run that nobody killed.

--borders: one run for each point that a run passes, killed there once: the borders of all stages, one by one.

The last line of the output is one JSON object.
"""

import argparse
import gc
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.endurance.training_checks import problems, read_told
    from tests.endurance.training_life import Death, live, prepare
else:
    sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not on the path with PYTHONSAFEPATH
    from training_checks import problems, read_told
    from training_life import Death, live, prepare

STEPS = 8
MOST_LIVES = 12
"""Of a run; the last one is left alone."""
HANG_TIMEOUT_S = 120.0
SEED = 1
"""Of every run: its uids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of run. is_exact: its weights do not depend on chance or on kills."""

    overrides: tuple[str, ...]
    max_staleness: int = 0
    is_exact: bool = False


EXACT = ("rollout.deterministic=true",)
ASYNC = ("trainer.mode=async",)
CASES = {
    "sync": Case(overrides=("trainer.mode=sync", *EXACT), is_exact=True),
    "bound 0": Case(overrides=(*ASYNC, "trainer.max_staleness=0", *EXACT), is_exact=True),
    "bound 2": Case(overrides=(*ASYNC, "trainer.max_staleness=2"), max_staleness=2),
    "bound 2, calls end first": Case(
        overrides=(*ASYNC, "trainer.max_staleness=2", "rollout.in_flight_updates=false"), max_staleness=2
    ),
    "two steps a version": Case(
        overrides=(*ASYNC, "trainer.max_staleness=1", "trainer.publish_freq=2", "eval.where=snapshot"), max_staleness=1
    ),
}


# --- lives ----------------------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None], *, killed_after_s: float | None = None) -> bool:
    """Do `work` in a forked process. True: it came to its end; False: it was killed. Raises SystemExit for any other end."""
    assert threading.active_count() == 1, "a forked process has one thread; the others' locks would stay locked in it"
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            redirect_output()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    watch = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([watch], [], [], HANG_TIMEOUT_S if killed_after_s is None else killed_after_s)
        if not ended:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(watch)
        _, status = os.waitpid(pid, 0)
    if not ended and killed_after_s is None:
        raise SystemExit(f"a life did not end within {HANG_TIMEOUT_S} s:\n{Path('output.txt').read_text(encoding='utf-8')[-4000:]}")
    if status == signal.SIGKILL:
        return False
    if status:
        raise SystemExit(f"a life ended with status {status}:\n{Path('output.txt').read_text(encoding='utf-8')[-8000:]}")
    return True


def redirect_output() -> None:
    """What lives print goes to a file; a failed one's is shown."""
    out = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a case, from its first life to its end."""

    folder: Path
    """What all runs share."""
    case: Case
    rng: random.Random
    name: str
    num_kills: int = 0

    @property
    def told(self) -> Path:
        return self.folder / f"{self.name}.told.jsonl"

    @property
    def home(self) -> Path | None:
        """Its newest folder that can be resumed."""
        found = [path.parent for path in (self.folder / "runs").glob(f"{self.name}*/start.json")]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def life(self, *, death: Death | None = None, killed_after_s: float | None = None) -> bool:
        """Begin, or go on; True when the run has ended."""
        overrides = [*self.case.overrides, f"trainer.experiment_name={self.name}", f"trainer.total_training_steps={STEPS}"]
        overrides += [f"trainer.seed={SEED}"]
        resume, seed = self.home is not None, self.rng.getrandbits(32)
        assert resume or not read_told(self.told), "a run trained before it could be resumed"

        def work() -> None:
            passes = live(self.folder, overrides, resume=resume, death=death, told=self.told, seed=seed)
            (self.folder / f"{self.name}.passes.json").write_text(json.dumps(passes), encoding="utf-8")

        has_ended = forked(work, killed_after_s=killed_after_s)
        self.num_kills += not has_ended
        return has_ended

    def damage(self) -> bool:
        """Cut a file of the newest checkpoint short, where an older one is left."""
        whole = [] if self.home is None else [path.parent for path in (self.home / "checkpoints").glob("global_step_*/DONE")]
        if len(whole) < 2:
            return False
        newest = max(whole, key=lambda path: int(path.name.rpartition("_")[2]))
        os.truncate(newest / "model" / "model.safetensors", 100)
        return True

    def passes(self) -> dict[str, int]:
        """Point -> passes in the last life."""
        found: dict[str, int] = json.loads((self.folder / f"{self.name}.passes.json").read_text(encoding="utf-8"))
        return found

    def weights(self) -> bytes:
        assert self.home is not None
        return (self.home / "hf" / "model.safetensors").read_bytes()

    def check(self) -> None:
        """Raises SystemExit with what is wrong."""
        home, told = self.home, read_told(self.told)
        assert home is not None

        def work() -> None:
            found = problems(home, told, total_steps=STEPS, max_staleness=self.case.max_staleness, seed=SEED)
            if text := "\n".join(found):
                raise AssertionError(f"{self.name} (in {home}):\n{text}")

        forked(work)


@dataclass(slots=True, kw_only=True)
class Reference:
    """A run of a case that nobody killed: how long it takes, what it passes, and what its weights are."""

    seconds: float
    passes: dict[str, int]
    weights: bytes


def refer(folder: Path, name: str, case: Case, rng: random.Random) -> Reference:
    run, start = Run(folder=folder, case=case, rng=rng, name=f"{name}-whole"), time.monotonic()
    assert run.life()
    seconds = time.monotonic() - start
    run.check()
    return Reference(seconds=seconds, passes=run.passes(), weights=run.weights())


# --- runs -----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has been done so far."""

    counts: Counter[str] = field(default_factory=Counter)
    points: set[str] = field(default_factory=set)

    def add(self, run: Run, reference: Reference) -> None:
        """Check a run that has ended. Raises SystemExit."""
        run.check()
        self.counts["runs"] += 1
        self.counts["kills"] += run.num_kills
        self.counts["steps_repeated"] += _num_repeated(run)
        if run.case.is_exact:
            if run.weights() != reference.weights:
                raise SystemExit(f"{run.name}: other weights than those of the run that nobody killed, in {run.home}")
            self.counts["weights_compared"] += 1


def _num_repeated(run: Run) -> int:
    """Steps that began their first stage more than once."""
    lines = read_told(run.told)
    return sum(count - 1 for count in Counter(line["step"] for line in lines if line["stage"] == lines[0]["stage"]).values())


def kill_at_random(run: Run, reference: Reference, tally: Tally, most: int) -> None:
    """Lives that die at random times and at random points, `most` of them, then one that is left alone."""
    while run.num_kills < most:
        if run.rng.random() < 0.5:
            has_ended = run.life(killed_after_s=run.rng.uniform(0, reference.seconds))
        else:
            points = sorted(reference.passes)
            [point] = run.rng.choices(points, [min(reference.passes[point], 4) for point in points])  # less often at the start
            death = Death(point=point, number=run.rng.randint(1, reference.passes[point]))
            has_ended = run.life(death=death)
            tally.points.update([] if has_ended else [point])
        if has_ended:
            return
        tally.counts["damaged"] += run.rng.random() < 0.3 and run.damage()
    assert run.life(), "it was left alone"


def kill_once(run: Run, point: str, number: int, tally: Tally) -> None:
    """One life that dies at the point, and one that goes on."""
    if not run.life(death=Death(point=point, number=number)):
        tally.points.add(point)
        assert run.life(), "it was left alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="at least so many, over all cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", choices=list(CASES), action="append", help="only these")
    parser.add_argument("--borders", action="store_true", help="kill once at each point that a run passes, instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng, tally, start = random.Random(args.seed), Tally(), time.monotonic()
    cases = {name: CASES[name] for name in args.case or CASES}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.chdir(folder)
        gc.freeze()  # a collection in a life would copy every page of the parent
        forked(lambda: prepare(folder))
        references = {name: refer(folder, f"case{number}", case, rng) for number, (name, case) in enumerate(cases.items())}
        (_kill_at_borders if args.borders else _kill_at_random)(folder, cases, references, tally, rng, args.kills)
        os.chdir("/")
    took = time.monotonic() - start
    told = {"seconds": round(took, 1), "points": len(tally.points), **tally.counts, "cases": list(cases)}
    sys.stdout.write(json.dumps(told) + "\n")


def _kill_at_borders(
    folder: Path, cases: dict[str, Case], references: dict[str, Reference], tally: Tally, rng: random.Random, kills: int
) -> None:
    """A run for each point of each case, or for `kills` of them, chosen at random."""
    chosen = [(name, point) for name, reference in references.items() for point in sorted(reference.passes)]
    rng.shuffle(chosen)
    for number, (name, point) in enumerate(chosen[: kills or None]):
        run = Run(folder=folder, case=cases[name], rng=rng, name=f"border{number}")
        at = rng.randint(1, references[name].passes[point])
        sys.stdout.write(f"{name}: killed at pass {at} of {references[name].passes[point]} of {point!r}\n")
        kill_once(run, point, at, tally)
        tally.add(run, references[name])


def _kill_at_random(
    folder: Path, cases: dict[str, Case], references: dict[str, Reference], tally: Tally, rng: random.Random, kills: int
) -> None:
    number = 0
    while tally.counts["kills"] < kills:
        name = list(cases)[number % len(cases)]
        run = Run(folder=folder, case=cases[name], rng=rng, name=f"run{number}")
        kill_at_random(run, references[name], tally, rng.randint(1, MOST_LIVES))
        sys.stdout.write(f"{name}: {run.num_kills} kills\n")
        tally.add(run, references[name])
        number += 1


if __name__ == "__main__":
    main()
