"""Comparison of what our functions return with stored numbers, and the cases of a file of such numbers.

Place: `check.py` reads the files and prints; each `check_*.py` turns a case into comparisons; this file is what they share. A check
is a function `(Case) -> Iterable[Compared]`, and its module has them in one table, `CHECKS: Mapping[str, Check]`, under the name of
the file without `.json`, and `/KIND` after it where the cases of the file have a `kind`: "advantages", "corrected/advantage".
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Json = Any
"""What a JSON file holds."""

Numbers = torch.Tensor | float | Sequence[Any]
"""A tensor, a number, or nested lists of numbers."""

RTOL, ATOL = 1e-5, 1e-6
"""What stored float32 numbers are worth: both sides round, in another order."""

STD_RTOL, STD_ATOL = 1e-3, 1e-4
"""For a metric that ends in `_std`: stored ones come from the difference of two float32 means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What came of one comparison.

    worst: the largest error as a share of what is allowed at its place, so 1 is the limit; infinite where nothing may differ and
    something does, where the shapes differ, or where a number is no number. what: the place of the worst error with both values.
    """

    passed: bool
    worst: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of a file. `inputs` is filled in where the case only names an entry of the file's table of inputs."""

    id: str
    kind: str
    """Empty where the file's cases have no kind."""
    params: Mapping[str, Json]
    """Keys that are null are kept; a case without parameters has none."""
    inputs: Mapping[str, Json]
    outputs: Mapping[str, Json]
    raw: Mapping[str, Json]
    """The whole case, for keys beside these: `estimator`, `loss_mode`, `global`, `tags`, `why`."""

    def floats(self, name: str) -> torch.Tensor:
        """An input as float32, which restores stored values bit for bit. Raises KeyError where the case lacks it."""
        return torch.tensor(self.inputs[name], dtype=torch.float32)

    def mask(self, name: str = "response_mask") -> torch.Tensor:
        """An input of 0 and 1 as bool."""
        return torch.tensor(self.inputs[name]) != 0

    def param(self, name: str, default: Json) -> Json:
        """A parameter; the default where it is absent or null."""
        value = self.params.get(name)
        return default if value is None else value


Check = Callable[[Case], Iterable[Compared]]


def compare(
    got: Numbers, want: Numbers, *, rtol: float = RTOL, atol: float = ATOL, mask: torch.Tensor | None = None, name: str = ""
) -> Compared:
    """Whether |got - want| <= atol + rtol |want| everywhere (under the mask), computed in float64.

    got, want: of one shape. mask: of that shape; other places are not read. name: what is compared, the beginning of `what`.
    Use rtol = atol = 0 (or `compare_exact`) for masks, counts and flags.
    """
    ours, stored = _float64(got), _float64(want)
    if ours.shape != stored.shape:
        return Compared(passed=False, worst=math.inf, what=f"{name}: shape {list(ours.shape)}, expected {list(stored.shape)}")
    if mask is not None:
        ours, stored = ours.where(mask, 0), stored.where(mask, 0)
    if not ours.numel():
        return Compared(passed=True, worst=0.0, what=f"{name}: nothing to compare")
    error, allowed = (ours - stored).abs(), atol + rtol * stored.abs()
    share = (error / allowed).where(error != 0, 0.0).where(error.isfinite() | (ours == stored), math.inf)
    place = int(share.flatten().argmax())
    worst = float(share.flatten()[place])
    return Compared(passed=worst <= 1, worst=worst, what=f"{name}{_at(place, ours.shape)}: {_both(ours, stored, allowed, place)}")


def compare_exact(got: Numbers, want: Numbers, *, mask: torch.Tensor | None = None, name: str = "") -> Compared:
    """`compare` where nothing may differ."""
    return compare(got, want, rtol=0, atol=0, mask=mask, name=name)


def compare_metrics(got: Mapping[str, float], want: Mapping[str, float]) -> Iterator[Compared]:
    """One comparison for each stored metric; ours may have more. Those that end in `_std` have their own tolerance."""
    for name, value in want.items():
        if name not in got:
            yield Compared(passed=False, worst=math.inf, what=f"metric {name}: absent, expected {value!r}")
            continue
        rtol, atol = (STD_RTOL, STD_ATOL) if name.endswith("_std") else (RTOL, ATOL)
        yield compare(got[name], value, rtol=rtol, atol=atol, name=f"metric {name}")


def _float64(numbers: Numbers) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64).detach()


def _at(place: int, shape: torch.Size) -> str:
    if not shape:
        return ""
    return f"{[int(index) for index in torch.unravel_index(torch.tensor(place), shape)]}"


def _both(ours: torch.Tensor, stored: torch.Tensor, allowed: torch.Tensor, place: int) -> str:
    got, want, limit = (float(tensor.flatten()[place]) for tensor in (ours, stored, allowed))
    return f"{got:.9g}, expected {want:.9g}, off by {abs(got - want):.2g} where {limit:.2g} is allowed"
