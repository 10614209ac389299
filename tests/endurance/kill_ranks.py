"""Real trainers on two ranks, of which one is killed (SIGKILL) or stopped (SIGSTOP) at any moment, and which are resumed until
their run ends.

    python tests/endurance/kill_ranks.py [--kills 20] [--seed 1] [--case sync]

As `kill_training.py`, whose runs, checks and forked lives these are, except for who dies: a rank, at a random time or at a random
pass of a random point. Each life must then end by itself, with exit code 3, an error that names what has happened, and no rank
left; the next one resumes. At the end nothing may be lost, the steps repeated as they were recorded, and where the setting is
deterministic the weights must be, byte for byte, those of a run that lost no rank.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from asyncrl.cluster import ForkServer
from asyncrl.errors import AsyncRLError
from asyncrl.training.rank import TARGET
from asyncrl.wording import first_of

if TYPE_CHECKING:
    from tests.endurance.kill_training import HANG_TIMEOUT_S, SEED, Case, forked, redirect_output
    from tests.endurance.training_checks import problems, read_told
    from tests.endurance.training_life import Death, live, prepare
else:
    sys.path.insert(0, str(Path(__file__).parent))  # a script's own folder is not on the path with PYTHONSAFEPATH
    from kill_training import HANG_TIMEOUT_S, SEED, Case, forked, redirect_output
    from training_checks import problems, read_told
    from training_life import Death, live, prepare

NUM_RANKS, STEPS = 2, 6
MOST_LOSSES = 6
"""Of a run; after them it is left alone."""
RANK_TIMEOUT_S = 6
"""Long beside any work of this model, on a busy machine as well: a rank that was not stopped must not look so."""
RANKS = ("cluster.kind=local", f"cluster.num_ranks={NUM_RANKS}", f"cluster.rank_timeout_s={RANK_TIMEOUT_S}")
EXACT = ("trainer.mode=sync", "rollout.deterministic=true")
CASES = {
    "sync": Case(overrides=(*RANKS, *EXACT), is_exact=True),
    "bound 2": Case(overrides=(*RANKS, "trainer.mode=async", "trainer.max_staleness=2"), max_staleness=2),
    "sync, a critic": Case(overrides=(*RANKS, *EXACT, "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"), is_exact=True),
}


class Loss(NamedTuple):
    """What becomes of a rank in a life: at the number-th pass of a point, or, without one, `at_s` after it was asked to start."""

    rank: int
    signal: signal.Signals
    point: str = ""
    number: int = 0
    at_s: float = 0.0


class End(NamedTuple):
    """Of a life. error: the name of its error's class, or ""; text: its words; was_hit: whether the loss came to pass; ranks_s: for
    how long there were ranks."""

    error: str
    text: str
    was_hit: bool
    ranks_s: float


def children_of(pid: int) -> list[int]:
    """In the order in which they were made."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


class Fate:
    """Of the ranks of a life, in its process: sees to it that the loss happens, at most once."""

    def __init__(self, loss: Loss | None, server: ForkServer) -> None:
        self._loss, self._server = loss, server
        self._is_open, self._is_due = False, False
        self.began = time.monotonic()
        self.was_hit = False

    def death(self) -> Death | None:
        if self._loss is None or not self._loss.point:
            return None
        return Death(point=self._loss.point, number=self._loss.number, of=self._lose)

    def watch(self, point: str) -> None:
        if point == "before start":
            self.began = time.monotonic()
            if self._loss is not None and not self._loss.point:
                timer = threading.Timer(self._loss.at_s, self._lose)
                timer.daemon = True
                timer.start()
        self._is_open = self._is_open or point == "after open"
        if self._is_due:
            self._lose()

    def _lose(self) -> None:
        """At the next point where it can be: there must be ranks, and while they start none is stopped, as a start has two minutes
        (imports may take long)."""
        assert self._loss is not None
        ranks = children_of(self._server.pid)
        self._is_due = len(ranks) < NUM_RANKS or (self._loss.signal == signal.SIGSTOP and not self._is_open)
        if not self._is_due:
            self.was_hit = True
            os.kill(ranks[self._loss.rank], self._loss.signal)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a case, from its first life to its end."""

    folder: Path
    case: Case
    rng: random.Random
    name: str
    server: ForkServer
    losses: Counter[str]
    ranks_s: float = 0.0
    """For how long the last life had ranks."""

    @property
    def told(self) -> Path:
        return self.folder / f"{self.name}.told.jsonl"

    @property
    def home(self) -> Path | None:
        """Its newest folder that can be resumed."""
        found = [path.parent for path in (self.folder / "runs").glob(f"{self.name}*/start.json")]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def life(self, loss: Loss | None = None) -> bool:
        """Begin, or go on; True when the run has ended. Raises SystemExit when a life ends otherwise than it should."""
        seed, resume = self.rng.getrandbits(32), self.home is not None
        assert threading.active_count() == 1, "a forked process has one thread"
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            self._live(seed, loss, resume=resume)
        code = _wait(pid)
        end = End(*json.loads((self.folder / "end.json").read_text(encoding="utf-8")))
        self._check(code, end, loss)
        _wait_for_ranks(self.server)
        if code:
            assert loss is not None
            self.losses[loss.signal.name] += 1
        self.ranks_s = end.ranks_s
        if not code and end.was_hit:
            self.losses["too late to matter"] += 1
        return code == 0

    def _live(self, seed: int, loss: Loss | None, *, resume: bool) -> NoReturn:
        """The life, in its own process."""
        (self.folder / "end.json").unlink(missing_ok=True)
        fate = Fate(loss, self.server)
        code, error, text = 1, "", ""
        try:
            redirect_output()
            overrides = [*self.case.overrides, f"trainer.experiment_name={self.name}"]
            overrides += [f"trainer.total_training_steps={STEPS}", f"trainer.seed={SEED}"]
            passes = live(
                self.folder,
                overrides,
                resume=resume,
                death=fate.death(),
                told=self.told,
                seed=seed,
                fork_server=self.server,
                watch=fate.watch,
            )
            (self.folder / f"{self.name}.passes.json").write_text(json.dumps(passes), encoding="utf-8")
            code = 0
        except BaseException as raised:  # as the command line does: the first cause, in a line, and its exit code
            first = first_of(raised) if isinstance(raised, BaseExceptionGroup) else raised
            if isinstance(first, AsyncRLError):
                code, error, text = first.exit_code, type(first).__name__, str(first)
            else:
                traceback.print_exc()
        finally:
            end = End(error=error, text=text, was_hit=fate.was_hit, ranks_s=time.monotonic() - fate.began)
            (self.folder / "end.json").write_text(json.dumps(end), encoding="utf-8")
            os._exit(code)

    def _check(self, code: int, end: End, loss: Loss | None) -> None:
        expected = {signal.SIGKILL: "RankDiedError", signal.SIGSTOP: "RankHungError"}
        if code == 0:
            return
        output = Path("output.txt").read_text(encoding="utf-8", errors="replace")[-6000:]
        if code != 3 or loss is None or not end.was_hit or end.error != expected[loss.signal]:
            raise SystemExit(f"{self.name}: a life ended with {code}, {end}, and had {loss}:\n{output}")
        if f"rank {loss.rank}" not in end.text or "--resume" not in end.text:
            raise SystemExit(f"{self.name}: the error of {loss} does not name the rank, or what to do: {end.text}")

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


def _wait(pid: int) -> int:
    """For the end of a life: its exit code. Raises SystemExit when it does not come."""
    watch = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([watch], [], [], HANG_TIMEOUT_S)
        if not ended:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(watch)
        _, status = os.waitpid(pid, 0)
    if not ended:
        output = Path("output.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
        raise SystemExit(f"a life did not end within {HANG_TIMEOUT_S} s:\n{output}")
    return os.waitstatus_to_exitcode(status)


def _wait_for_ranks(server: ForkServer) -> None:
    """Raises SystemExit when a rank outlives its life; the server needs a moment to reap them."""
    for pid in children_of(server.pid):
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone, _, _ = select.select([watch], [], [], 10)
        finally:
            os.close(watch)
        if not gone:
            raise SystemExit(f"rank process {pid} outlived its run")


def choose(rng: random.Random, passes: dict[str, int], seconds: float) -> Loss:
    """A loss at a random time of a life, or at a random pass of a random point."""
    rank, how = rng.randrange(NUM_RANKS), rng.choice([signal.SIGKILL, signal.SIGSTOP])
    if rng.random() < 0.5:
        return Loss(rank=rank, signal=how, at_s=rng.uniform(0, seconds))
    points = sorted(passes)
    [point] = rng.choices(points, [min(passes[point], 4) for point in points])  # less often at the start
    return Loss(rank=rank, signal=how, point=point, number=rng.randint(1, passes[point]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="at least so many, over all cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", choices=list(CASES), action="append", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        server = _start_server()
        try:
            told = lose_ranks(Path(place), server, args.kills, random.Random(args.seed), args.case or list(CASES))
        finally:
            server.close()
            os.chdir("/")
    sys.stdout.write(json.dumps(told) + "\n")


def _start_server() -> ForkServer:
    """What ranks print, such as the stacks of those that wait in vain, goes to a file."""
    kept, out = os.dup(2), os.open("ranks.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 2)
    try:
        return ForkServer([TARGET.partition(":")[0]])
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(out)


def lose_ranks(folder: Path, server: ForkServer, kills: int, rng: random.Random, names: list[str]) -> dict[str, object]:
    """Runs of the cases by turns, until so many ranks were lost; the counts."""
    start, counts = time.monotonic(), Counter[str]()
    gc.freeze()  # a collection in a life would copy every page of the parent
    forked(lambda: prepare(folder))
    whole: dict[str, Run] = {}
    number = 0
    while counts["SIGKILL"] + counts["SIGSTOP"] < kills:
        name = names[number % len(names)]
        if name not in whole:
            reference = Run(folder=folder, case=CASES[name], rng=rng, name=f"whole{number}", server=server, losses=Counter())
            assert reference.life()
            reference.check()
            whole[name] = reference
        reference = whole[name]
        run = Run(folder=folder, case=CASES[name], rng=rng, name=f"run{number}", server=server, losses=Counter())
        most = min(rng.randint(2, MOST_LOSSES), kills - counts["SIGKILL"] - counts["SIGSTOP"])
        has_ended = False
        while not has_ended and run.losses["SIGKILL"] + run.losses["SIGSTOP"] < most:
            has_ended = run.life(choose(rng, reference.passes(), reference.ranks_s))
        assert has_ended or run.life(), "it was left alone"
        run.check()
        if run.case.is_exact and run.weights() != reference.weights():
            raise SystemExit(f"{run.name}: other weights than those of the run that lost no rank, in {run.home}")
        counts += run.losses + Counter(runs=1, weights_compared=int(run.case.is_exact), steps_repeated=_num_repeated(run))
        sys.stdout.write(f"{name}: {dict(run.losses)}\n")
        number += 1
    took = round(time.monotonic() - start, 1)
    return {"seconds": took, "kills": counts["SIGKILL"] + counts["SIGSTOP"], **counts, "cases": names}


def _num_repeated(run: Run) -> int:
    """Steps that began their first stage more than once."""
    lines = read_told(run.told)
    return sum(count - 1 for count in Counter(line["step"] for line in lines if line["stage"] == lines[0]["stage"]).values())


if __name__ == "__main__":
    main()
