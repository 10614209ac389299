"""Sampling as pure tensor functions: logits and one uniform number a row -> token ids and log-probs. Used by the `torch` engine.

Invariants: 1 a token of probability zero is never drawn; 2 every log-prob is finite and is that of the distribution drawn from,
after temperature, top-k and top-p; 3 a row's result is a function of its own logits, parameters and uniform number alone.
Why not `torch.multinomial`: it draws from one global stream, so a row would depend on its neighbours, and on CPU it costs as much
as all matrix products of a small model's step.

Shapes: `B` rows, `V` vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 64
"""Tokens a block of the two-level inverse CDF: a cumulative sum is serial, so only block sums and one block a row get one."""

FIRST_CANDIDATES = 256
"""Likeliest tokens looked at first by top-k and top-p, 8 times as many when they do not suffice: a full sort of 64 x 151,669 logits
takes a second."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.uint64]) -> torch.Tensor:
    """One float64 in [0, 1) a row, a pure function of (seed, position).

    The counter-based form of SplitMix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195), with the seed mixed first so that
    neighbouring seeds do not give shifted copies of one stream.
    """
    bits_B = _mix(_mix(seeds_B) + (positions_B + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((bits_B >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters of B rows. temperature_B1: float32, 0 = greedy; top_k_B1: int64, 0 = off; top_p_B1: float32, 1 = off.

    `greedy` and `filtered` say whether any row needs that work, so that a step without them pays nothing.
    """

    temperature_B1: torch.Tensor
    top_k_B1: torch.Tensor
    top_p_B1: torch.Tensor
    greedy: bool
    filtered: bool

    @classmethod
    def stack(cls, temperature: list[float], top_k: list[int], top_p: list[float]) -> "RowParams":
        """Parameters of rows given as plain lists."""
        return cls(
            temperature_B1=torch.tensor(temperature, dtype=torch.float32)[:, None],
            top_k_B1=torch.tensor(top_k, dtype=torch.int64)[:, None],
            top_p_B1=torch.tensor(top_p, dtype=torch.float32)[:, None],
            greedy=any(value == 0 for value in temperature),
            filtered=any(value > 0 for value in top_k) or any(value < 1 for value in top_p),
        )


def sample(logits_BV: torch.Tensor, params: RowParams, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row. Overwrites `logits_BV` (float32, finite).

    Returns ids_B int64 and log_probs_B float32. A greedy row takes the likeliest token, the first among equals, and its log-prob is
    that of the unfiltered softmax at temperature 1: a distribution with one point would say 0 and carry no information.
    """
    temperature_B1 = params.temperature_B1
    if params.greedy:
        is_greedy_B1 = temperature_B1 == 0
        temperature_B1 = torch.where(is_greedy_B1, torch.ones_like(temperature_B1), temperature_B1)
    scaled_BV = logits_BV.div_(temperature_B1)
    if params.filtered:
        scaled_BV = filter_logits(scaled_BV, params)
    probs_BV = scaled_BV.softmax(-1)
    ids_B1 = invert_cdf(probs_BV, uniforms_B[:, None])
    if params.greedy:
        ids_B1 = torch.where(is_greedy_B1, scaled_BV.argmax(-1, keepdim=True), ids_B1)
    # float32 `log` rounds differently in the vector body and in the tail, so a row's bits would depend on the number of rows.
    return ids_B1[:, 0], probs_BV.gather(-1, ids_B1)[:, 0].double().log().float()


def invert_cdf(weights_BV: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative sum holds `uniform * total`.

    weights_BV: float32, not negative, at least one positive a row; uniforms_B1: float64 in [0, 1).
    Returns ids_B1 int64. An interval is [c[i-1], c[i]): open on the right, so a weight of zero has none.
    """
    blocks_BNK = _in_blocks(weights_BV)
    block_ends_BN = blocks_BNK.sum(-1).cumsum(-1, dtype=torch.float64)
    block_B1, rest_B1 = _locate(block_ends_BN, uniforms_B1 * block_ends_BN[:, -1:])
    index_B1K = block_B1[:, :, None].expand(-1, -1, BLOCK)
    token_ends_BK = blocks_BNK.gather(1, index_B1K)[:, 0].cumsum(-1, dtype=torch.float64)
    offset_B1, _ = _locate(token_ends_BK, rest_B1)
    return (block_B1 * BLOCK + offset_B1).clamp_max(weights_BV.shape[-1] - 1)


def _in_blocks(weights_BV: torch.Tensor) -> torch.Tensor:
    padding = -weights_BV.shape[-1] % BLOCK
    if padding:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, padding))
    return weights_BV.view(weights_BV.shape[0], -1, BLOCK)


def _locate(ends_BN: torch.Tensor, targets_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose end is above the target, and how far the target lies beyond that interval's start.

    A target that rounding has pushed to the total or beyond is drawn back below it, so the index always has a positive width.
    """
    total_B1 = ends_BN[:, -1:]
    targets_B1 = torch.minimum(targets_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    # The clamp is for rows of NaN alone: their log-prob is NaN, which the scheduler answers, and an index beyond the end would
    # take the rows of the others with it.
    index_B1 = torch.searchsorted(ends_BN, targets_B1, right=True).clamp_max(ends_BN.shape[-1] - 1)
    start_B1 = torch.where(index_B1 > 0, ends_BN.gather(-1, (index_B1 - 1).clamp_min(0)), torch.zeros_like(total_B1))
    return index_B1, targets_B1 - start_B1


def filter_logits(scaled_BV: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Logits (already divided by the temperature) with those outside top-k, then top-p, at -inf, in place.

    Top-p keeps the smallest set whose mass reaches p, of the distribution renormalised after top-k; at least one token stays.
    Tokens equal to the last one kept stay too. Greedy rows are left whole.
    """
    size = scaled_BV.shape[-1]
    k_B1 = torch.where(params.top_k_B1 > 0, params.top_k_B1.clamp_max(size), size)
    log_total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    width = min(size, FIRST_CANDIDATES)
    while True:
        best_BW = scaled_BV.topk(width, -1).values
        num_kept_B1, reaches_B1 = _count_kept(best_BW, k_B1, params.top_p_B1, log_total_B1)
        # The goal of top-p is a share of what top-k leaves: it is known when the k-th is among the candidates, or when k is off.
        is_settled_B1 = (k_B1 <= width) | ((k_B1 == size) & reaches_B1)
        is_whole_B1 = (params.temperature_B1 == 0) | ((k_B1 == size) & (params.top_p_B1 >= 1))
        if width == size or bool((is_settled_B1 | is_whole_B1).all()):
            break
        width = min(size, width * 8)
    threshold_B1 = best_BW.gather(-1, num_kept_B1 - 1).masked_fill(is_whole_B1, -torch.inf)
    return scaled_BV.masked_fill_(scaled_BV < threshold_B1, -torch.inf)


def _count_kept(
    best_BW: torch.Tensor, k_B1: torch.Tensor, top_p_B1: torch.Tensor, log_total_B1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the W likeliest tokens pass both filters, and whether their mass reaches the goal of top-p.

    Beyond the candidates k counts as off, so the answer is final only for k <= W and, where the goal is reached, for k off.
    """
    width = best_BW.shape[-1]
    mass_BW = (best_BW - log_total_B1).double().exp()
    ends_BW = mass_BW.cumsum(-1)
    has_k_B1 = k_B1 <= width
    total_B1 = torch.where(
        has_k_B1, ends_BW.gather(-1, (k_B1 - 1).clamp_max(width - 1)), torch.ones_like(top_p_B1, dtype=torch.float64)
    )
    goal_B1 = torch.where(top_p_B1 < 1, top_p_B1 * total_B1, torch.inf)
    keep_BW = (ends_BW - mass_BW < goal_B1) & (torch.arange(width) < k_B1)
    return keep_BW.sum(-1, keepdim=True).clamp_min(1), ends_BW[:, -1:] >= goal_B1
