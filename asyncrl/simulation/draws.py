"""Random numbers by name: what a draw gives depends on the seed and on what it is for, never on when it is made.

So the same session has the same turns and lengths whatever order the seed runs tasks in, and a retry meets the same world.
"""

from functools import lru_cache
from math import exp, log, log1p
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from asyncrl.config.distribution import Distribution, numbers_in

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()


def mix(number: int, salt: int = 0) -> int:
    """64 bits that look random, of two numbers. Source: the finaliser of SplitMix64, Steele et al., OOPSLA 2014."""
    x = (number + (salt + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def unit(number: int, salt: int = 0) -> float:
    """In [0, 1)."""
    return mix(number, salt) / 2**64


class Draw(Protocol):
    """From a number in [0, 1) to one of a distribution: its inverse CDF."""

    def __call__(self, u: float, /) -> float: ...


@lru_cache(maxsize=256)
def draw_of(distribution: Distribution) -> Draw:
    """Raises ConfigError when the file of an empirical one cannot be read any more."""
    d = distribution
    match d.kind:
        case "constant":
            return lambda u: d.value
        case "uniform":
            return lambda u: d.low + u * (d.high - d.low)
        case "exponential":
            return lambda u: -d.mean * log1p(-u)
        case "lognormal":
            return _lognormal(d.mean, d.cv)
        case "empirical":
            values = d.values or numbers_in(Path(d.file))
            return lambda u: values[int(u * len(values))]


def draw_count(distribution: Distribution, u: float) -> int:
    """A whole number, at least 1. `uniform` has both ends."""
    if distribution.kind == "uniform":
        return max(1, int(distribution.low) + int(u * (int(distribution.high) - int(distribution.low) + 1)))
    return max(1, round(draw_of(distribution)(u)))


def _lognormal(mean: float, cv: float) -> Draw:
    if mean == 0:
        return lambda u: 0.0
    variance = log(1 + cv * cv)
    center, spread = log(mean) - variance / 2, variance**0.5
    return lambda u: exp(center + spread * _NORMAL.inv_cdf(min(max(u, 1e-12), 1 - 1e-12)))
