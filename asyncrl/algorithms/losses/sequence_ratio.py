"""Losses whose ratio belongs to a sequence: GSPO clips it whole, GMPO (geo_mean) clips its tokens first.

A sequence is a row, or a session of several rows when `LossInputs.rows_n` numbers sessions.
"""

import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss, weighted
from asyncrl.algorithms.losses.ratios import bounded_log_ratio, sequence_mean

_LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper bound of the log of a sequence's ratio, as in verl."""


def gspo(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> PolicyLoss:
    """`max(-A s, -A clip(s, 1 - low, 1 + high))`, s the geometric mean of the token ratios of the sequence.

    log s_t = log_prob_t - sg[log_prob_t] + sg[mean over the sequence of (log_prob - old_log_prob)], at most 10: every token has
    the sequence's value, and the gradient s * d log_prob_t of its own log-prob. With advantages that are equal within a sequence
    and seq-mean-token-mean this is the sequence objective itself. The paper's clips are narrow: 3e-4 and 4e-4.

    Source: GSPO, arXiv 2507.18071 eq. 5 and 7 (ratio), 13 and 14 (GSPO-token).
    Where we differ from verl 0.9.1: 1. token log ratios are kept within +-20 before their mean.
    Facts: pg_clipfrac, ppo_kl (-token log ratio), pg_clipfrac_lower (0: there is no dual clip).
    """
    log_ratio_n = bounded_log_ratio(inputs).detach()
    own_n = inputs.log_prob_n - inputs.log_prob_n.detach()
    ratio_n = (own_n + sequence_mean(log_ratio_n, inputs.rows_n)).clamp(max=_LOG_SEQUENCE_RATIO_BOUND).exp()
    plain_n = -inputs.advantages_n * ratio_n
    clipped_n = -inputs.advantages_n * ratio_n.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss_n = torch.maximum(plain_n, clipped_n)
    facts = {
        "pg_clipfrac": (clipped_n > plain_n).to(loss_n.dtype),
        "ppo_kl": -log_ratio_n,
        "pg_clipfrac_lower": torch.zeros_like(log_ratio_n),
    }
    return PolicyLoss(loss_n=weighted(loss_n, inputs), facts=facts)


def geo_mean(inputs: LossInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> PolicyLoss:
    """`-mean(A) exp(mean of d)` over the sequence, on each of its tokens; d the log ratio, clipped on its harmful side only.

    d = sgn(A) min(sgn(A) x, sgn(A) clip(x, -low, high)), x the log ratio: the bounds are of the log (the paper: 0.4 and 0.4).
    The gradient of a token comes through the mean, so the whole sequence must be in one micro-batch. The aggregation is
    seq-mean-token-mean, which averages the copies back to one value a sequence. Importance weights enter by their geometric mean.

    Source: GMPO, arXiv 2507.20673, the objective with its token-level clip.
    Where we differ from verl 0.9.1:
    1. The mean is over the mini-batch's sequences with a policy token; verl takes a plain mean over the rows of a micro-batch,
       padding included, so its loss depends on the split.
    2. Token log ratios are kept within +-20.
    3. A weight of 0 makes the geometric mean of its sequence 0 (verl adds 1e-10 to every weight).
    Facts: pg_clipfrac and pg_clipfrac_lower (outside the bounds with A > 0, A < 0), ppo_kl (-log ratio).
    """
    log_ratio_n = bounded_log_ratio(inputs)
    sign_n = inputs.advantages_n.sign()
    inside_n = log_ratio_n.clamp(-clip_ratio_low, clip_ratio_high)
    harmless_n = sign_n * torch.minimum(sign_n * log_ratio_n, sign_n * inside_n)
    loss_n = -sequence_mean(inputs.advantages_n, inputs.rows_n) * sequence_mean(harmless_n, inputs.rows_n).exp()
    if inputs.is_weights_n is not None:
        loss_n = loss_n * sequence_mean(inputs.is_weights_n.log(), inputs.rows_n).exp()
    is_outside_n = log_ratio_n != inside_n
    facts = {
        "pg_clipfrac": (is_outside_n & (sign_n > 0)).to(loss_n.dtype),
        "ppo_kl": -log_ratio_n.detach(),
        "pg_clipfrac_lower": (is_outside_n & (sign_n < 0)).to(loss_n.dtype),
    }
    return PolicyLoss(loss_n=loss_n, facts=facts)
