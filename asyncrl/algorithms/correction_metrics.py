"""The metrics of off-policy correction, from the sums that `correction_sums.py` made of each row.

Place: `correction.py` asks for them at the end. Names are verl's, without its prefix `rollout_corr/`. All are means, extremes or
shares over the batch's policy tokens or over its rows with a policy token; padding counts nowhere.

The two policies (l = log(trainer / rollout) of a token):
  kl                 mean of -l: KL(rollout || trainer), estimator k1; the mismatch
  k3_kl              mean of e^l - 1 - l, l clamped to +-80: the same, never negative, less noisy
  training_ppl, rollout_ppl, training_log_ppl, rollout_log_ppl   means over rows of exp(-mean log-prob) and of its logarithm
  log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min   mean, mean size and extremes of training_log_ppl -
                     rollout_log_ppl of a row, which is the row's mean of -l
  ppl_ratio          mean over rows of training_ppl / rollout_ppl of a row
  chi2_token, chi2_seq   mean of w^2 - 1 over tokens, and over rows with the row's product of ratios
Weights (prefix rollout_is_), after the threshold and before normalisation:
  mean std max min   over tokens; for sequence weights max and min are of the rows' weights before the threshold
  eff_sample_size    mean(w)^2 / mean(w^2): a share of the tokens, 1 where all weights are equal
  p01 p50 p99        quantiles: the weight at rank ceil(q n) of the n tokens. Exact up to 32,767 tokens; of more, every k-th place
                     of the batch is looked at, k = tokens / 16,384: then the rank is right to about 0.5% of the tokens (p01: 0.1%)
  ratio_fraction_high, _low   share of tokens (sequence: rows) whose weight before the threshold is above u, below l (1 / u)
  oob_ratio          with a band: share of tokens outside it, or in rows outside it
  batch_norm_factor  what the weights were divided by; 1 where that was not done for want of a mean above 1e-8
  seq_mean std max min max_deviation fraction_high fraction_low   of the rows' mean weights; std with n - 1, deviation from 1; the
                     fractions before the threshold
Rejections (prefix rollout_rs_OPTION_), of the values compared:
  mean std           over tokens, a row's value counted for each of its tokens; std of the values clamped to their thresholds
  max min fraction_high fraction_low   over tokens (seq_*: rows); fractions above and below the thresholds
  seq_mean seq_std seq_max seq_min seq_max_deviation seq_fraction_high, and for k1 seq_fraction_low   of the rows' mean values;
                     deviation from 0
  masked_fraction, seq_masked_fraction   share of tokens rejected, of rows that lost a token; without OPTION: by all together
"""

import math

import torch

from asyncrl.algorithms.correction_sums import MAX_LOG_RATIO, Band, Rejection, Sums

Metrics = dict[str, float]

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
QUANTILE_TOKENS = 16_384
"""So many tokens are looked at, or up to twice as many; half a millisecond for all quantiles."""


# --- the two policies -----------------------------------------------------------------------------------------------------------


def policy_metrics(sums: Sums) -> Metrics:
    """How far apart the two policies are. sums: of `Block.add_policy_sums`, float64, rows with a token; at least one."""
    tokens, log_ratio = sums["tokens"], sums["log_ratio"]
    training = -sums["old"] / tokens
    difference = -log_ratio / tokens
    rollout = training - difference
    return {
        "training_ppl": _mean(training.exp()),
        "training_log_ppl": _mean(training),
        "kl": _share(-log_ratio, tokens),
        "k3_kl": _share(sums["k3"], tokens),
        "rollout_ppl": _mean(rollout.exp()),
        "rollout_log_ppl": _mean(rollout),
        "log_ppl_diff": _mean(difference),
        "log_ppl_abs_diff": _mean(difference.abs()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": _mean(difference.exp()),
        "chi2_token": _share(sums["excess_square"] + 2 * sums["excess"], tokens),
        "chi2_seq": _mean((2 * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1()),
    }


# --- weights --------------------------------------------------------------------------------------------------------------------


def token_weight_metrics(sums: Sums, band: Band) -> Metrics:
    """Of weights that each token has for itself. sums: of `Block.weigh_tokens` (of weights less 1), and of the policies."""
    tokens, above, below = (sums[name] for name in ("tokens", "is/above", "is/below"))
    metrics = {
        **_moments(tokens, sums["is/total"], sums["is/square"]),
        "max": 1 + float(sums["is/max"].max()),
        "min": 1 + float(sums["is/min"].min()),
        "ratio_fraction_high": _share(above, tokens),
        "ratio_fraction_low": _share(below, tokens),
        **_row_weight_metrics(1 + sums["excess"] / tokens, 1 + sums["is/total"] / tokens, band),
    }
    return _weight_metrics(metrics, _share(above + below, tokens), band)


def row_weight_metrics(sums: Sums, band: Band) -> Metrics:
    """Of weights that all tokens of a row have in common. sums: of `Block.weigh_rows`."""
    tokens, raw, limited = (sums[name] for name in ("tokens", "is/raw", "is/limited"))
    is_outside = (raw > band.high) | (raw < band.low)
    metrics = {
        **_moments(tokens, tokens * (limited - 1), tokens * (limited - 1).square()),
        "max": float(raw.max()),
        "min": float(raw.min()),
        "ratio_fraction_high": _mean(raw > band.high),
        "ratio_fraction_low": _mean(raw < band.low),
        **_row_weight_metrics(raw, limited, band),
    }
    return _weight_metrics(metrics, _share(tokens * is_outside, tokens), band)


def weight_quantiles(weights_BR: torch.Tensor, mask_BR: torch.Tensor, num_tokens: int) -> Metrics:
    """Quantiles of the weights of policy tokens, which are num_tokens: of all, or of a fixed choice of places."""
    step = max(num_tokens // QUANTILE_TOKENS, 1)
    while math.gcd(step, weights_BR.shape[1]) > 1:  # so that all columns have their turn
        step += 1
    weights = weights_BR.flatten()[::step][mask_BR.flatten()[::step]]
    if not len(weights):
        return {}
    ranks = {name: math.ceil(share * len(weights)) for name, share in QUANTILES.items()}
    return {f"rollout_is_{name}": float(weights.kthvalue(rank).values) for name, rank in ranks.items()}


def _weight_metrics(metrics: Metrics, outside: float, band: Band) -> Metrics:
    named = {f"rollout_is_{name}": value for name, value in metrics.items()}
    return {**named, "rollout_is_oob_ratio": outside} if band.is_strict else named


def _moments(tokens: torch.Tensor, total: torch.Tensor, square: torch.Tensor) -> Metrics:
    """Mean, deviation and effective sample size of weights, from the sums of what they have above 1 and of its square."""
    excess, excess_square = _share(total, tokens), _share(square, tokens)
    mean_square = 1 + 2 * excess + excess_square
    return {
        "mean": 1 + excess,
        "std": _deviation(excess, excess_square),
        "eff_sample_size": (1 + excess) ** 2 / mean_square if mean_square > 0 else 0.0,
    }


def _row_weight_metrics(raw: torch.Tensor, limited: torch.Tensor, band: Band) -> Metrics:
    return {
        **_row_metrics(limited, 1.0),
        "seq_fraction_high": _mean(raw > band.high),
        "seq_fraction_low": _mean(raw < band.low),
    }


# --- rejection ------------------------------------------------------------------------------------------------------------------


def rejection_metrics(sums: Sums, option: Rejection) -> Metrics:
    """Of one option of `rollout_rs`. sums: of `Block.reject`."""
    metrics = _token_rejection(sums, option) if option.level == "token" else _row_rejection(sums, option)
    return {f"rollout_rs_{option.name}_{name}": value for name, value in metrics.items()}


def all_rejections_metrics(sums: Sums) -> Metrics:
    """What all options rejected together."""
    return {f"rollout_rs_{name}": value for name, value in _rejected(sums["tokens"], sums["tokens"] - sums["accepted"]).items()}


def _token_rejection(sums: Sums, option: Rejection) -> Metrics:
    tokens = sums["tokens"]
    total, limited, square, low, high, above, below = (
        sums[f"{option.name}/{name}"] for name in ("total", "limited", "square", "min", "max", "above", "below")
    )
    return {
        "mean": _share(total, tokens),
        "std": _deviation(_share(limited, tokens), _share(square, tokens)),
        "max": float(high.max()),
        "min": float(low.min()),
        "fraction_high": _share(above, tokens),
        "fraction_low": _share(below, tokens),
        **_value_metrics(total / tokens, option),
        **_rejected(tokens, above + below),
    }


def _row_rejection(sums: Sums, option: Rejection) -> Metrics:
    tokens, values = sums["tokens"], sums[f"{option.name}/value"]
    limited = values.clamp(option.low, option.high)
    return {
        "mean": _share(tokens * values, tokens),
        "std": math.sqrt(_share(tokens * (limited - _share(tokens * limited, tokens)).square(), tokens)),
        "max": float(values.max()),
        "min": float(values.min()),
        "fraction_high": _mean(values > option.high),
        "fraction_low": _mean(values < option.low),
        **_value_metrics(values, option),
        **_rejected(tokens, tokens * (1 - sums[f"{option.name}/kept"])),
    }


def _value_metrics(rows: torch.Tensor, option: Rejection) -> Metrics:
    low = {"seq_fraction_low": _mean(rows < option.low)} if option.estimator == "k1" else {}
    return {**_row_metrics(rows, 0.0), "seq_fraction_high": _mean(rows > option.high), **low}


def _rejected(tokens: torch.Tensor, rejected: torch.Tensor) -> Metrics:
    return {"masked_fraction": _share(rejected, tokens), "seq_masked_fraction": _mean(rejected > 0)}


# --- arithmetic -----------------------------------------------------------------------------------------------------------------


def _row_metrics(rows: torch.Tensor, origin: float) -> Metrics:
    return {
        "seq_mean": _mean(rows),
        "seq_std": float(rows.std()) if len(rows) > 1 else 0.0,
        "seq_max": float(rows.max()),
        "seq_min": float(rows.min()),
        "seq_max_deviation": float((rows - origin).abs().max()),
    }


def _mean(rows: torch.Tensor) -> float:
    return float(rows.to(torch.float64).mean())


def _share(part: torch.Tensor, tokens: torch.Tensor) -> float:
    """The sum of a number a row, over the tokens of all rows."""
    return float(part.sum() / tokens.sum())


def _deviation(mean: float, mean_square: float) -> float:
    return math.sqrt(max(mean_square - mean * mean, 0.0))
