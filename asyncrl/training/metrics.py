"""Numbers of an optimizer step, added up piece by piece, each with the reduction it was added with; and their merging.

micro-batches -> [metrics of a rank] -> merged over the ranks -> one number a name -> over the optimizer steps of an update

Invariant: a number does not depend on how its values were spread over micro-batches and ranks, but for the rounding of float64. Its
name says nothing of how it is merged.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Reduction(StrEnum):
    """How the values of one number become one."""

    SUM = "sum"
    MEAN = "mean"
    WEIGHTED_MEAN = "weighted mean"
    MAX = "max"
    STD = "std"


@dataclass(frozen=True, slots=True)
class _Number:
    """Values so far. amount: their sum (SUM), largest (MAX) or mean; weight: of all of them; spread: sum of weight x distance from
    the mean squared, where it is asked for."""

    reduction: Reduction
    amount: float
    weight: float = 0.0
    spread: float = 0.0

    def joined(self, other: "_Number") -> "_Number":
        """Source of the means and spreads of two parts: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
        computing sample variances", 1979."""
        if self.reduction is Reduction.SUM:
            return _Number(self.reduction, self.amount + other.amount)
        if self.reduction is Reduction.MAX:
            return _Number(self.reduction, _larger(self.amount, other.amount))
        weight = self.weight + other.weight
        if not weight:
            return self
        gap, share = other.amount - self.amount, other.weight / weight
        return _Number(
            self.reduction,
            self.amount + gap * share,
            weight,
            self.spread + other.spread + gap * gap * self.weight * share,
        )

    @property
    def value(self) -> float | None:
        """None: a mean of nothing."""
        if self.reduction in (Reduction.SUM, Reduction.MAX):
            return self.amount
        if not self.weight:
            return None
        return math.sqrt(self.spread / self.weight) if self.reduction is Reduction.STD else self.amount


def _larger(first: float, second: float) -> float:
    """NaN where one of them is: max() would drop it or not, by their order."""
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


class Metrics:
    """Numbers by name. Raises ValueError where one name is added with two reductions."""

    def __init__(self) -> None:
        self._numbers: dict[str, _Number] = {}

    def add_sum(self, name: str, value: torch.Tensor | float) -> None:
        """A share of a number that is a sum over the optimizer step, such as a loss whose weights come from the counts of all."""
        self._add(name, _Number(Reduction.SUM, float(value)))

    def add_mean(self, name: str, values_n: torch.Tensor) -> None:
        """Values of which each counts the same; nothing when there are none."""
        self._add(name, _of(Reduction.MEAN, values_n))

    def add_weighted_mean(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        """A value that counts `weight` times."""
        self._add(name, _Number(Reduction.WEIGHTED_MEAN, float(value), weight))

    def add_max(self, name: str, values_n: torch.Tensor) -> None:
        """Values of which the largest is told; nothing when there are none."""
        if len(values_n):
            self._add(name, _Number(Reduction.MAX, float(values_n.max())))

    def add_std(self, name: str, values_n: torch.Tensor) -> None:
        """Values whose standard deviation is told, with n below."""
        self._add(name, _of(Reduction.STD, values_n))

    def _add(self, name: str, number: _Number) -> None:
        found = self._numbers.get(name)
        if found is not None and found.reduction is not number.reduction:
            raise ValueError(f"{name} was added as a {found.reduction} and as a {number.reduction}")
        self._numbers[name] = number if found is None else found.joined(number)

    def numbers(self) -> dict[str, float]:
        """Each number by its name. A mean of nothing is left out."""
        return {name: value for name, number in self._numbers.items() if (value := number.value) is not None}

    def join(self, other: "Metrics") -> None:
        """Take in what another part of the same optimizer step has added."""
        for name, number in other._numbers.items():
            self._add(name, number)

    @staticmethod
    def over_steps(steps: Sequence["Metrics"]) -> dict[str, float]:
        """Of each number the largest over the optimizer steps, where it is a maximum, else the mean over those that have it: a step
        without policy tokens has no loss."""
        found: dict[str, tuple[Reduction, list[float]]] = {}
        for step in steps:
            for name, value in step.numbers().items():
                found.setdefault(name, (step._numbers[name].reduction, []))[1].append(value)
        return {name: _over(reduction, values) for name, (reduction, values) in found.items()}


def _over(reduction: Reduction, values: Sequence[float]) -> float:
    if reduction is Reduction.MAX:
        return math.nan if any(map(math.isnan, values)) else max(values)
    return sum(values) / len(values)


def _of(reduction: Reduction, values_n: torch.Tensor) -> _Number:
    if not len(values_n):
        return _Number(reduction, 0.0)
    mean = float(values_n.double().mean())
    spread = float((values_n.double() - mean).square().sum()) if reduction is Reduction.STD else 0.0
    return _Number(reduction, mean, float(len(values_n)), spread)


def merged(parts: Iterable[Metrics]) -> Metrics:
    """The parts of one optimizer step, in their order, as if one had added it all."""
    whole = Metrics()
    for part in parts:
        whole.join(part)
    return whole
