"""`python -m asyncrl.algorithms.check DIR`: compute the cases of a folder of stored numbers with our functions and compare.

Place: a tool for people and tests, outside the way. It knows files, cases and lines; what a case means is known to `check_*.py`,
one for each kind of algorithm. A file is `NAME.json` with `cases`, each with `id`, `inputs` (or the name of an entry in the file's
table `inputs`), `outputs`, and where it has them `kind` and `params`. Files that are absent are said and skipped, other files are
not looked at. A case that cannot be read, or is of an unknown kind, is said, and the others of its file are computed.
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from asyncrl.algorithms import check_advantages, check_balancing, check_correction, check_losses
from asyncrl.algorithms.checking import Case, Check, Compared, Json

CHECKS: Mapping[str, Check] = {
    **check_advantages.CHECKS,
    **check_losses.CHECKS,
    **check_correction.CHECKS,
    **check_balancing.CHECKS,
}
"""File, or file/kind -> what computes and compares such a case."""

NAMES = tuple(dict.fromkeys(key.partition("/")[0] for key in CHECKS))
"""The files, in the order in which they are printed."""

SHOWN_CASES, SHOWN_DIFFERENCES = 30, 3
"""Lines of a file that failed: so many cases, so many differences of each."""

PASSED, FAILED, BAD_INPUT = 0, 1, 2
_RAISED_BY_A_CASE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What our functions raise where a case lacks a part, or has an option or a name that they do not know."""


class BadInput(Exception):
    """What is no file of stored cases; the message is one line that names file and case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """What came of one case: the differences, none where it passed, and its worst comparison, as in `Compared`."""

    id: str
    differences: tuple[str, ...]
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What came of one file."""

    name: str
    cases: tuple[CaseReport, ...]
    unreadable: tuple[str, ...] = ()
    """A line for each case that was not computed."""

    @property
    def exit_code(self) -> int:
        return FAILED if self.failed else BAD_INPUT if self.unreadable else PASSED

    @property
    def failed(self) -> tuple[CaseReport, ...]:
        return tuple(case for case in self.cases if case.differences)

    def lines(self) -> Iterator[str]:
        """One line for the file, then its failed cases, the first of them with what differs."""
        worst = max((case.worst for case in self.cases), default=0.0)
        passed = len(self.cases) - len(self.failed)
        yield f"{self.name}: {len(self.cases)} cases, {passed} passed, worst error {worst:.2g} of its tolerance"
        for case in self.failed[:SHOWN_CASES]:
            shown = case.differences[:SHOWN_DIFFERENCES]
            more = f"; {len(case.differences) - len(shown)} more" if len(shown) < len(case.differences) else ""
            yield f"  case {case.id}: {'; '.join(shown)}{more}"
        if len(self.failed) > SHOWN_CASES:
            yield f"  and {len(self.failed) - SHOWN_CASES} more cases"
        yield from (f"error: {line}" for line in self.unreadable)


# --- a file ---------------------------------------------------------------------------------------------------------------------


def check_file(path: Path) -> FileReport:
    """Compute every case of one file. Raises BadInput where the file is no JSON of this layout."""
    header = _read(path)
    reports: list[CaseReport] = []
    unreadable: list[str] = []
    for number, stored in enumerate(header["cases"]):
        try:
            case = _case(path, number, stored, header)
            check = _check_of(path, case)
        except BadInput as error:
            unreadable.append(str(error))
        else:
            reports.append(check_case(case, check))
    return FileReport(name=path.name, cases=tuple(reports), unreadable=tuple(unreadable))


def check_case(case: Case, check: Check) -> CaseReport:
    """Compute one case. What it raises is a difference."""
    compared: list[Compared] = []
    raised: tuple[str, ...] = ()
    try:
        compared.extend(check(case))
    except _RAISED_BY_A_CASE as error:
        raised = (f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",)
    if not compared and not raised:
        raised = ("nothing was compared",)
    differences = (*raised, *(comparison.what for comparison in compared if not comparison.passed))
    worst = math.inf if raised else max(comparison.worst for comparison in compared)
    return CaseReport(id=case.id, differences=differences, worst=worst)


def _read(path: Path) -> Json:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path.name}: cannot be read as JSON: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("cases"), list):
        raise BadInput(f"{path.name}: has no list of cases")
    return header


def _case(path: Path, number: int, case: Json, header: Json) -> Case:
    if not isinstance(case, dict):
        raise BadInput(f"{path.name}: case number {number} is no object")
    name = str(case.get("id", f"number {number}"))
    inputs = case.get("inputs")
    if isinstance(inputs, str):
        table = header.get("inputs")
        inputs = table.get(inputs) if isinstance(table, dict) else None
    parts: dict[str, Json] = {"inputs": inputs, "outputs": case.get("outputs"), "params": case.get("params") or {}}
    for part, value in parts.items():
        if not isinstance(value, dict):
            raise BadInput(f"{path.name}: case {name}: its {part} are no object, nor named in the table of the file")
    return Case(id=name, kind=case.get("kind") or "", raw=case, **parts)


def _check_of(path: Path, case: Case) -> Check:
    key = f"{path.stem}/{case.kind}" if case.kind else path.stem
    if key not in CHECKS:
        known = [other.partition("/")[2] or "none" for other in CHECKS if other.partition("/")[0] == path.stem]
        raise BadInput(f"{path.name}: case {case.id}: unknown kind {case.kind!r}; known are {', '.join(known)}")
    return CHECKS[key]


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Print a line a file. Returns 0 when all cases passed, 1 when one failed, else 2 when something could not be read."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.algorithms.check",
        description="Check advantages, losses, KL, correction and balancing on stored numbers.",
    )
    parser.add_argument("folder", type=Path, help=f"folder with any of {', '.join(f'{name}.json' for name in NAMES)}")
    folder: Path = parser.parse_args(arguments).folder
    if not any((folder / f"{name}.json").exists() for name in NAMES):
        print(f"error: {folder} has none of {', '.join(f'{name}.json' for name in NAMES)}", file=out)
        return BAD_INPUT
    codes = {_print_file(folder / f"{name}.json", out) for name in NAMES}
    return next(code for code in (FAILED, BAD_INPUT, PASSED) if code in codes)


def _print_file(path: Path, out: TextIO) -> int:
    if not path.exists():
        print(f"{path.name}: absent, skipped", file=out, flush=True)
        return PASSED
    try:
        report = check_file(path)
    except BadInput as error:
        print(f"error: {error}", file=out, flush=True)
        return BAD_INPUT
    print(*report.lines(), sep="\n", file=out, flush=True)
    return report.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may stop early, as `head` does
    sys.exit(main())
