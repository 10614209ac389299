"""Searches every case of both models, walks through those that are too large, and looks whether each wrong variant is caught.

    python -m tests.models.run                     some minutes
    python -m tests.models.run --full              every case up to three million states; an hour, and 2 GB a process
    python -m tests.models.run --trace PART        the shortest ways into the failures of the variants whose name has this part

One line a case. The last line says what was searched; exit code 1 when a promise was broken, or a variant was not caught.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.models.admission import cases as admission_cases
from tests.models.admission import policies
from tests.models.admission.model import AdmissionModel
from tests.models.admission.model import Case as AdmissionCase
from tests.models.admission.policies import FEASIBLE, RIGHT, Policy
from tests.models.recovery import cases as recovery_cases
from tests.models.recovery import variants
from tests.models.recovery.model import RecoveryModel
from tests.models.recovery.state import Case as RecoveryCase
from tests.models.recovery.walks import random_history
from tests.models.search import Found, explore

FULL_LIMIT = 3_000_000
VARIANT_LIMIT = 400_000
WALK_LENGTH = 3_000
ADMISSION, RECOVERY = "admission: ", "recovery: "
VARIANTS = [*(ADMISSION + name for name in policies.WRONG), *(RECOVERY + name for name in variants.WRONG)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one search says. `is_good`: no promise broken, or, of a variant, the right one."""

    text: str
    is_good: bool
    num_states: int = 0
    num_moves: int = 0
    is_variant: bool = False


def main() -> None:
    args = arguments()
    if args.trace:
        _write_ways(args.trace)
        return
    started, lines = time.perf_counter(), list[Line]()
    with ProcessPoolExecutor(args.jobs) as pool:
        for line in pool.map(_call, _searches(is_full=args.full)):
            lines.append(line)
            sys.stdout.write(f"{'ok    ' if line.is_good else 'WRONG '} {line.text}\n")
            sys.stdout.flush()
    sys.stdout.write(_sum(lines, time.perf_counter() - started))
    sys.exit(not all(line.is_good for line in lines))


def _call(search: Callable[[], Line]) -> Line:
    return search()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line, or `words`."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.run")
    parser.add_argument("--full", action="store_true", help="every case, up to three million states each")
    parser.add_argument("--trace", metavar="PART", help="show the ways into the failures of these variants")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes")
    return parser.parse_args(words)


def _sum(lines: list[Line], seconds: float) -> str:
    variants_ = [line for line in lines if line.is_variant]
    violations = sum(not line.is_good for line in lines if not line.is_variant)
    states, moves = sum(line.num_states for line in lines), sum(line.num_moves for line in lines)
    caught = f"{sum(line.is_good for line in variants_)} of {len(variants_)} wrong variants caught"
    return f"{states:,} states, {moves:,} random moves, {violations} violations, {caught}, {seconds:.0f} s\n"


# --- searches, each in a process of the pool


def _searches(*, is_full: bool) -> Iterator[Callable[[], Line]]:
    for case in admission_cases.HUGE if is_full else admission_cases.LARGE:
        for name, policy in (("first of the queue", RIGHT), ("feasible", FEASIBLE)):
            yield partial(_search_admission, name, case, policy)
    sizes = recovery_cases.SIZES if is_full else recovery_cases.SMALL_SIZES
    for recovery_case in (*sizes, *recovery_cases.OPTIONS):
        yield partial(_search_recovery, recovery_case)
    for walk in recovery_cases.WALKS:
        yield partial(_walk, walk, 100 if is_full else 10)
    yield from (partial(_catch, name) for name in VARIANTS)


def _search_admission(name: str, case: AdmissionCase, policy: Policy) -> Line:
    return _line(explore(AdmissionModel(case=case, policy=policy), FULL_LIMIT), f"{ADMISSION}{name}, {case}")


def _search_recovery(case: RecoveryCase) -> Line:
    return _line(explore(RecoveryModel(case=case), FULL_LIMIT), f"{RECOVERY}{case}")


def _line(found: Found, what: str) -> Line:
    how = found.broken or ("all states" if found.is_whole else "so far")
    return Line(text=f"{found.num_states:>9,} {how:<11} {what}", is_good=not found.broken, num_states=found.num_states)


def _walk(case: RecoveryCase, num_walks: int) -> Line:
    broken = next(filter(None, (random_history(case, seed, length=WALK_LENGTH) for seed in range(num_walks))), "")
    moves = num_walks * WALK_LENGTH
    return Line(text=f"{moves:>9,} {broken or 'moves':<11} {RECOVERY}{case}", is_good=not broken, num_moves=moves)


def _catch(name: str) -> Line:
    found, breaks = _search_variant(name)
    text = f"{found.num_states:>9,} {'caught' if found.broken else 'MISSED':<11} {name}: {found.broken}"
    return Line(text=text, is_good=found.broken == breaks, is_variant=True)


def _search_variant(name: str) -> tuple[Found, str]:
    """With the promise that must break."""
    if name.startswith(ADMISSION):
        wrong = policies.WRONG[name.removeprefix(ADMISSION)]
        return explore(AdmissionModel(case=wrong.case, policy=wrong.policy), VARIANT_LIMIT), wrong.breaks
    variant = variants.WRONG[name.removeprefix(RECOVERY)]
    return explore(RecoveryModel(case=variant.case), VARIANT_LIMIT), variant.breaks


def _write_ways(part: str) -> None:
    for name in VARIANTS:
        if part in name:
            found, _ = _search_variant(name)
            sys.stdout.write("\n    ".join([name, *map(str, found.way), f"-> {found.broken}"]) + "\n")


if __name__ == "__main__":
    main()
