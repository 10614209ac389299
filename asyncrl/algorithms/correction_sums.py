"""The pass over the tokens of a batch that off-policy correction makes: blocks of rows, and what a block adds up for each row.

Place: `correction.py` drives it; `correction_metrics.py` makes numbers of the sums. All arithmetic on tokens is here, because what
it costs is memory: a block's tensors stay in the processor's cache, are written over in place, and are reduced to a number a row.
Sums of a row are of the inputs' dtype; sums of rows, in float64, are the metrics' part.

B rows, b rows of a block, R response tokens. Every tensor of a block is 0 outside the mask, so sums need no mask.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from asyncrl.algorithms.blocks import row_blocks

Level = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are clamped to +- this before an exponential: e^20 is 5e8, and its square still far from float32's end."""

MAX_K3_LOG_RATIO = 80.0
"""The same for the metric k3_kl, which verl does not clamp: e^80 times the tokens of a row is still a float32."""

BLOCK_TOKENS = 64 * 2048
"""Of all rows of a block; 512 KiB a float32 tensor. Fewer spend more in Python, more fall out of the cache."""

OUTSIDE = 1e38
"""Added outside the mask where a minimum is sought; finite, since 0 times infinity is no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bounds of a weight. Above `high` it becomes `high`; if `is_strict`, it becomes 0 outside low <= w <= high."""

    low: float
    high: float
    is_strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One option of `rollout_rs`: kept where low <= value <= high. `low` is -infinity where there is no lower bound."""

    name: str
    level: Level
    estimator: Estimator
    low: float
    high: float


Sums = dict[str, torch.Tensor]
"""Name of a sum -> one number a row."""


@dataclass(slots=True, kw_only=True)
class Block:
    """Some rows of a batch, their log-ratios, and the sums made of them so far.

    old, inside, log_ratio, excess, and two tensors to write over: [b, R] of the inputs' dtype.
    """

    old: torch.Tensor
    inside: torch.Tensor
    """1 inside the mask, 0 outside."""
    log_ratio: torch.Tensor
    """l, clamped to MAX_LOG_RATIO."""
    excess: torch.Tensor
    """e^l - 1 of that: the importance weight less 1."""
    spare: torch.Tensor
    other: torch.Tensor
    sums: Sums = field(default_factory=dict)

    def add_policy_sums(self) -> None:
        """What the metrics of the two policies need."""
        self.sums["old"] = self._sum_of_product(self.old, self.inside)
        self.sums["excess"] = self.excess.sum(1)
        self.sums["excess_square"] = self._sum_of_product(self.excess, self.excess)

    def weigh_tokens(self, out_bR: torch.Tensor, band: Band, *, with_stats: bool) -> None:
        """Write the tokens' weights. In float32 one is off by 6e-8, as at 1, also far below 1."""
        torch.add(self.excess, self.inside, out=out_bR)
        if band.is_strict:
            out_bR.mul_(torch.ge(out_bR, band.low, out=self.spare)).mul_(torch.le(out_bR, band.high, out=self.other))
        else:
            out_bR.clamp_(max=band.high)
        limited = torch.sub(out_bR, self.inside, out=self.spare)
        self.sums["is/total"] = limited.sum(1)
        if with_stats:
            self.sums["is/square"] = torch.mul(limited, limited, out=self.other).sum(1)
            self._add_extremes("is", limited)
            self._add_counts("is", self.excess, band.low - 1, band.high - 1)

    def weigh_rows(self, out_bR: torch.Tensor, band: Band) -> None:
        """Write the rows' weights on each of their tokens."""
        weights_b = self.sums["log_ratio"].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        self.sums["is/raw"] = weights_b
        if band.is_strict:
            weights_b = weights_b.where((weights_b >= band.low) & (weights_b <= band.high), 0)
        else:
            weights_b = weights_b.clamp(max=band.high)
        self.sums["is/limited"] = weights_b
        torch.mul(self.inside, weights_b[:, None], out=out_bR)

    def reject(self, accepted_bR: torch.Tensor, option: Rejection, *, with_stats: bool) -> None:
        """Take from `accepted_bR` what one option rejects."""
        values = self._values(option.estimator)
        if option.level == "token":
            accepted_bR.logical_and_(values >= option.low).logical_and_(values <= option.high)
            if with_stats:
                self._add_token_stats(option, values)
            return
        values_b = values.amax(1) if option.level == "seq_max" else values.sum(1)
        if option.level == "seq_mean":
            values_b /= self.sums["tokens"]  # no number for a row without tokens, which has none to accept
        kept_b = (values_b >= option.low) & (values_b <= option.high)
        accepted_bR.logical_and_(kept_b[:, None])
        self.sums |= {f"{option.name}/value": values_b, f"{option.name}/kept": kept_b}

    def count(self, chosen_bR: torch.Tensor) -> torch.Tensor:
        """How many are True in each row."""
        return self.spare.copy_(chosen_bR.view(torch.uint8)).sum(1)

    def _values(self, estimator: Estimator) -> torch.Tensor:
        match estimator:
            case "k1":
                return torch.neg(self.log_ratio, out=self.spare)
            case "k2":
                return torch.mul(self.log_ratio, self.log_ratio, out=self.spare).mul_(0.5)
            case "k3":
                return torch.sub(self.excess, self.log_ratio, out=self.spare)

    def _add_token_stats(self, option: Rejection, values: torch.Tensor) -> None:
        self.sums[f"{option.name}/total"] = values.sum(1)
        limited = torch.clamp(values, option.low, option.high, out=self.other).mul_(self.inside)
        self.sums[f"{option.name}/limited"] = limited.sum(1)
        self.sums[f"{option.name}/square"] = limited.mul_(limited).sum(1)
        self._add_extremes(option.name, values)
        self._add_counts(option.name, values, option.low, option.high)

    def _add_extremes(self, name: str, values: torch.Tensor) -> None:
        """Right for the block, which is all that its metrics ask for. Usually the 0 outside the mask is neither end of it."""
        low_b, high_b = values.amin(1), values.amax(1)
        if not low_b.min() < 0 < high_b.max():
            outside = torch.mul(self.inside, -OUTSIDE, out=self.other).add_(OUTSIDE)
            low_b = outside.add_(values).amin(1)
            outside = torch.mul(self.inside, OUTSIDE, out=self.other).sub_(OUTSIDE)
            high_b = outside.add_(values).amax(1)
        self.sums |= {f"{name}/min": low_b, f"{name}/max": high_b}

    def _add_counts(self, name: str, values: torch.Tensor, low: float, high: float) -> None:
        above = torch.gt(values, high, out=self.other)
        self.sums[f"{name}/above"] = (above if high >= 0 else above.mul_(self.inside)).sum(1)
        below = torch.lt(values, low, out=self.other)
        self.sums[f"{name}/below"] = (below if low <= 0 else below.mul_(self.inside)).sum(1)

    def _sum_of_product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.mul(left, right, out=self.spare).sum(1)


def blocks_of(old_BR: torch.Tensor, rollout_BR: torch.Tensor, mask_BR: torch.Tensor) -> Iterator[tuple[slice, Block]]:
    """The batch's blocks, one at a time: each is written over by the next. Other devices than a processor take all rows at once."""
    if not old_BR.numel():
        return
    blocks = row_blocks(old_BR, BLOCK_TOKENS)
    scratch = [torch.empty_like(old_BR[blocks[0]], memory_format=torch.contiguous_format) for _ in range(5)]
    for rows in blocks:
        tensors = [tensor[: rows.stop - rows.start] for tensor in scratch]
        yield rows, _block(old_BR[rows], rollout_BR[rows], mask_BR[rows], *tensors)


def _block(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, *scratch: torch.Tensor) -> Block:
    inside, log_ratio, excess, spare, other = scratch
    inside.copy_(mask.view(torch.uint8))  # as bytes: the copy from bool takes seven times as long
    log_ratios_b = torch.sub(old, rollout, out=log_ratio).mul_(inside).sum(1)
    if not log_ratios_b.isfinite().all():  # 0 times what lies outside is not 0; rare, so paid for only here
        old = old.where(mask, 0)
        log_ratios_b = torch.sub(old, rollout.where(mask, 0), out=log_ratio).sum(1)
    torch.expm1(log_ratio.clamp_(-MAX_K3_LOG_RATIO, MAX_K3_LOG_RATIO), out=excess)
    sums = {"tokens": inside.sum(1), "log_ratio": log_ratios_b, "k3": torch.sub(excess, log_ratio, out=spare).sum(1)}
    log_ratio.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess.clamp_(math.expm1(-MAX_LOG_RATIO), math.expm1(MAX_LOG_RATIO))
    return Block(old=old, inside=inside, log_ratio=log_ratio, excess=excess, spare=spare, other=other, sums=sums)


def joined(blocks: Sequence[Sums]) -> Sums:
    """The sums of all blocks in float64 in main memory, of the rows with a policy token alone; empty where there is no such row."""
    sums = {name: torch.cat([block[name] for block in blocks]).to("cpu", torch.float64) for name in (blocks[0] if blocks else ())}
    if not sums or not sums["tokens"].any():
        return {}
    return {name: values[sums["tokens"] > 0] for name, values in sums.items()}
