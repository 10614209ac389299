"""Importance weights and rejection: closed forms, a plain float64 computation of every option, and what must not matter.

The plain computation is written with whole tensors and boolean indexing, none of the blocks' tricks.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.correction import REJECTIONS, CorrectionOptions, correct

LOG2, LOG3 = math.log(2), math.log(3)
ROLLOUT = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]], dtype=torch.float64)
OLD = ROLLOUT + torch.tensor([[LOG2, 0.0, -LOG2], [LOG3, LOG3, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
"""Ratios 2, 1, 1/2; and 3, 3 with a number outside the mask."""

SEEDS = st.integers(0, 2**32 - 1)


def batch_of(seed: int, rows: int = 7, width: int = 9, spread: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of both policies and a mask with gaps, each row with a token."""
    random = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand((rows, width), generator=random, dtype=torch.float64)
    rollout = old - spread * torch.randn((rows, width), generator=random, dtype=torch.float64)
    mask = torch.rand((rows, width), generator=random) < 0.7
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=random)] = True
    return old, rollout, mask


def weights_of(
    options: CorrectionOptions, old: torch.Tensor = OLD, rollout: torch.Tensor = ROLLOUT, mask: torch.Tensor = MASK
) -> Any:
    weights = correct(old, rollout, mask, options).weights_BR
    assert weights is not None
    return weights


def _rejected(name: str, threshold: str | float) -> list[list[int]]:
    """Of the small batch, the tokens that are not accepted."""
    found = correct(OLD, ROLLOUT, MASK, CorrectionOptions(rollout_rs=name, rollout_rs_threshold=threshold))
    return (MASK & ~found.accepted_BR).nonzero().tolist()


# --- closed forms ---------------------------------------------------------------------------------------------------------------


def _close(got: torch.Tensor, want: list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-14, atol=1e-14)


def test_token_weights_are_ratios_cut_at_the_threshold_and_zero_outside_the_mask() -> None:
    _close(weights_of(CorrectionOptions(rollout_is="token", rollout_is_threshold=2.5)), [[2, 1, 0.5], [2.5, 2.5, 0]])


def test_a_band_keeps_what_lies_within_and_makes_the_others_zero() -> None:
    _close(weights_of(CorrectionOptions(rollout_is="token", rollout_is_threshold="0.6_2.5")), [[2, 1, 0], [0, 0, 0]])


def test_a_sequence_weight_is_the_product_of_its_ratios_on_each_token() -> None:
    _close(weights_of(CorrectionOptions(rollout_is="sequence", rollout_is_threshold=10)), [[1, 1, 1], [9, 9, 0]])
    _close(weights_of(CorrectionOptions(rollout_is="sequence", rollout_is_threshold=4)), [[1, 1, 1], [4, 4, 0]])
    _close(weights_of(CorrectionOptions(rollout_is="sequence", rollout_is_threshold="0.5_4")), [[1, 1, 1], [0, 0, 0]])


def test_normalised_weights_have_mean_one_over_tokens_or_over_rows() -> None:
    token = CorrectionOptions(rollout_is="token", rollout_is_threshold=10, rollout_is_batch_normalize=True)
    _close(weights_of(token), [[20 / 19, 10 / 19, 5 / 19], [30 / 19, 30 / 19, 0]])
    sequence = CorrectionOptions(rollout_is="sequence", rollout_is_threshold=10, rollout_is_batch_normalize=True)
    _close(weights_of(sequence), [[0.2, 0.2, 0.2], [1.8, 1.8, 0]])
    assert correct(OLD, ROLLOUT, MASK, sequence).metrics["rollout_is_batch_norm_factor"] == pytest.approx(5)


def test_weights_that_are_all_out_of_their_band_are_not_divided_by_zero() -> None:
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold="50_60", rollout_is_batch_normalize=True)
    found = correct(OLD, ROLLOUT, MASK, options)
    assert found.weights_BR is not None
    assert not found.weights_BR.any()
    assert found.metrics["rollout_is_batch_norm_factor"] == 1
    assert found.metrics["rollout_is_eff_sample_size"] == 0


@pytest.mark.parametrize(
    ("name", "threshold", "rejected"),
    [
        ("token_k1", "0.4_1.5", [[0, 2], [1, 0], [1, 1]]),  # rollout / trainer: 1/2, 1, 2; 1/3, 1/3
        ("token_k1", 2.1, [[1, 0], [1, 1]]),
        ("token_k2", 0.3, [[1, 0], [1, 1]]),  # 0.24, 0, 0.24; 0.60, 0.60
        ("token_k3", 0.25, [[0, 0], [1, 0], [1, 1]]),  # 0.307, 0, 0.193; 0.901, 0.901
        ("seq_sum_k1", "0.2_2", [[1, 0], [1, 1]]),  # product of rollout / trainer: 1; 1/9
        ("seq_sum_k1", "0.1_2", []),
        ("seq_mean_k1", 2.9, [[1, 0], [1, 1]]),  # geometric mean: 1; 1/3
        ("seq_mean_k1", 3.1, []),
        ("seq_sum_k2", 0.5, [[1, 0], [1, 1]]),  # 0.48; 1.21
        ("seq_mean_k2", 0.5, [[1, 0], [1, 1]]),  # 0.16; 0.60
        ("seq_mean_k3", 0.1, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]),  # 0.167; 0.901
        ("seq_max_k2", 0.3, [[1, 0], [1, 1]]),
        ("seq_max_k3", 0.3, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]),
        ("token_k2,seq_sum_k1", "0.1,0.1_2", [[0, 0], [0, 2], [1, 0], [1, 1]]),
    ],
)
def test_an_option_rejects(name: str, threshold: str | float, rejected: list[list[int]]) -> None:
    assert _rejected(name, threshold) == rejected


def test_k1_bounds_rollout_over_trainer_not_the_importance_weight() -> None:
    """Difference 1: the band "0.2_1.5" rejects trainer / rollout = 0.3 and keeps 1.8."""
    old = torch.tensor([[math.log(0.3), math.log(1.8)]])
    options = CorrectionOptions(rollout_rs="token_k1", rollout_rs_threshold="0.2_1.5")
    assert correct(old, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), options).accepted_BR.tolist() == [[False, True]]


def test_the_mask_stays_what_it_is_and_weights_come_from_all_of_it() -> None:
    mask = MASK.clone()
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold=10, rollout_rs="token_k2", rollout_rs_threshold=0.1)
    found = correct(OLD, ROLLOUT, mask, options)
    assert torch.equal(mask, MASK)
    assert found.accepted_BR.tolist() == [[False, True, False], [False, False, False]]
    assert found.weights_BR is not None
    _close(found.weights_BR, [[2, 1, 0.5], [3, 3, 0]])


def test_without_rejection_the_accepted_tokens_are_the_mask() -> None:
    found = correct(OLD, ROLLOUT, MASK, CorrectionOptions())
    assert found.accepted_BR is MASK
    assert found.weights_BR is None


def test_metrics_of_two_policies_in_closed_form() -> None:
    metrics = correct(OLD, ROLLOUT, MASK, CorrectionOptions()).metrics
    means = [1.0, 2 - LOG3]  # of -log p of the trainer's policy, by row
    expected = {
        "kl": -2 * LOG3 / 5,
        "k3_kl": (2 - 1 - LOG2 + 0.5 - 1 + LOG2 + 2 * (3 - 1 - LOG3)) / 5,
        "training_log_ppl": sum(means) / 2,
        "training_ppl": (math.exp(means[0]) + math.exp(means[1])) / 2,
        "rollout_log_ppl": 1.5,
        "rollout_ppl": (math.exp(1) + math.exp(2)) / 2,
        "log_ppl_diff": -LOG3 / 2,
        "log_ppl_abs_diff": LOG3 / 2,
        "log_ppl_diff_max": 0.0,
        "log_ppl_diff_min": -LOG3,
        "ppl_ratio": (1 + 1 / 3) / 2,
        "chi2_token": (4 + 1 + 0.25 + 9 + 9) / 5 - 1,
        "chi2_seq": (1 + 81) / 2 - 1,
    }
    assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_effective_sample_size_is_a_share() -> None:
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold=10)
    metrics = correct(OLD, ROLLOUT, MASK, options).metrics
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((9.5 / 5) ** 2 / (23.25 / 5), rel=1e-14)
    alike = correct(ROLLOUT, ROLLOUT, MASK, options).metrics
    assert alike["rollout_is_eff_sample_size"] == 1
    assert alike["kl"] == alike["k3_kl"] == alike["chi2_token"] == alike["chi2_seq"] == 0


def test_quantiles_are_the_weights_at_their_ranks() -> None:
    weights = torch.linspace(0.5, 1.5, 150, dtype=torch.float64)[torch.randperm(150)].reshape(15, 10)
    mask = torch.ones(15, 10, dtype=torch.bool)
    metrics = correct(weights.log(), torch.zeros_like(weights), mask, CorrectionOptions(rollout_is="token")).metrics
    ranked = sorted(weights.flatten().tolist())
    expected = {"rollout_is_p01": ranked[1], "rollout_is_p50": ranked[74], "rollout_is_p99": ranked[148]}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_quantiles_of_many_tokens_are_right_to_a_fraction_of_a_percent() -> None:
    width = 1024
    weights = torch.arange(1, 400 * width + 1, dtype=torch.float64).reshape(400, width) / (200 * width)  # rising: the worst order
    mask = torch.ones_like(weights, dtype=torch.bool)
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold=10)
    metrics = correct(weights.log(), torch.zeros_like(weights), mask, options).metrics
    shares = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
    assert {name: metrics[f"rollout_is_{name}"] / 2 for name in shares} == pytest.approx(shares, abs=0.002)


def test_quantiles_look_at_all_columns() -> None:
    """Every sixth place, 6 = 100 x 1024 // 16,384, would be in an even column."""
    weights = torch.where(torch.arange(1024) % 2 == 0, 1.0, 1.5).expand(100, 1024)
    mask = torch.ones_like(weights, dtype=torch.bool)
    metrics = correct(weights.log(), torch.zeros_like(weights), mask, CorrectionOptions(rollout_is="token")).metrics
    assert (metrics["rollout_is_p01"], metrics["rollout_is_p99"]) == pytest.approx((1, 1.5))


# --- against a plain computation ------------------------------------------------------------------------------------------------


def _plain_values(name: str, ratio_log: torch.Tensor) -> torch.Tensor:
    """The value of one row's tokens that an option compares: one a token, or one for the row."""
    level, _, estimator = name.rpartition("_")
    values = {"k1": -ratio_log, "k2": ratio_log.square() / 2, "k3": ratio_log.exp() - 1 - ratio_log}[estimator]
    return {"token": values, "seq_sum": values.sum(), "seq_mean": values.mean(), "seq_max": values.max()}[level]


@pytest.mark.parametrize("name", REJECTIONS)
@given(seed=SEEDS, band=st.sampled_from(["0.8_1.3", "1.1_1.6", "0.6_0.9"]))
@settings(max_examples=6)
def test_every_rejection_as_computed_row_by_row(name: str, seed: int, band: str) -> None:
    old, rollout, mask = batch_of(seed)
    is_ratio = name.endswith("k1")
    low, high = (math.log(float(bound)) for bound in band.split("_")) if is_ratio else (-math.inf, 0.1)
    found = correct(old, rollout, mask, CorrectionOptions(rollout_rs=name, rollout_rs_threshold=band if is_ratio else high))
    rows = [_plain_values(name, (old - rollout)[row][mask[row]]).expand(int(mask[row].sum())) for row in range(len(mask))]
    for row, values in enumerate(rows):
        assert torch.equal(found.accepted_BR[row][mask[row]], (values >= low) & (values <= high))
    assert not found.accepted_BR[~mask].any()
    values = torch.cat(rows)
    rejected = (values < low) | (values > high)
    lost = [bool(((row < low) | (row > high)).any()) for row in rows]
    means = torch.stack([row.mean() for row in rows])
    expected: dict[str, torch.Tensor | float] = {
        f"rollout_rs_{name}_mean": values.mean(),
        f"rollout_rs_{name}_std": values.clamp(low, high).std(correction=0),
        f"rollout_rs_{name}_max": values.max(),
        f"rollout_rs_{name}_min": values.min(),
        f"rollout_rs_{name}_seq_std": means.std(),
        f"rollout_rs_{name}_seq_fraction_high": (means > high).double().mean(),
        f"rollout_rs_{name}_masked_fraction": rejected.double().mean(),
        f"rollout_rs_{name}_seq_masked_fraction": sum(lost) / len(lost),
        "rollout_rs_masked_fraction": rejected.double().mean(),
        "rollout_rs_seq_masked_fraction": sum(lost) / len(lost),
    }
    assert {name: found.metrics[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-7)


@given(SEEDS, st.sampled_from(["token", "sequence"]), st.sampled_from([0.7, 1.3, 2.0, "0.8_1.3", "1.1_3"]))
@settings(max_examples=40)
def test_weights_and_their_metrics_as_computed_plainly(seed: int, kind: str, threshold: float | str) -> None:
    old, rollout, mask = batch_of(seed)
    ratio_log = (old - rollout).where(mask, 0)
    raw = (ratio_log.sum(1, keepdim=True).expand_as(old) if kind == "sequence" else ratio_log).exp()
    low, _, high = str(threshold).rpartition("_")
    band = (raw >= float(low or 0)) & (raw <= float(high))
    weights = (raw * band if low else raw.clamp(max=float(high))) * mask
    found = correct(old, rollout, mask, CorrectionOptions(rollout_is=kind, rollout_is_threshold=threshold))
    torch.testing.assert_close(found.weights_BR, weights, rtol=1e-12, atol=1e-14)
    tokens, rows = weights[mask], weights.sum(1) / mask.sum(1)
    expected = {
        "rollout_is_mean": tokens.mean(),
        "rollout_is_std": tokens.std(correction=0),
        "rollout_is_seq_mean": rows.mean(),
        "rollout_is_seq_std": rows.std(),
        "rollout_is_seq_max": rows.max(),
        "rollout_is_seq_max_deviation": (rows - 1).abs().max(),
    }
    if kind == "token":
        expected |= {"rollout_is_max": tokens.max(), "rollout_is_min": tokens.min()}
        expected |= {"rollout_is_ratio_fraction_high": (raw[mask] > float(high)).double().mean()}
    # A deviation is the root of a difference of sums, in which the last bit of equal weights becomes 1e-8.
    assert {name: found.metrics[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-7)


# --- edges ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_a_batch_without_policy_tokens_has_no_weights_and_no_metrics(shape: tuple[int, int]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    options = CorrectionOptions(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="seq_mean_k1,token_k2", rollout_rs_threshold=2
    )
    found = correct(torch.randn(shape), torch.randn(shape), mask, options)
    assert found.weights_BR is not None
    assert found.weights_BR.shape == shape
    assert not found.weights_BR.any()
    assert not found.accepted_BR.any()
    assert found.metrics == {}


def test_log_ratios_beyond_twenty_are_cut_and_metrics_stay_finite() -> None:
    old, rollout = torch.tensor([[-500.0, -0.1, -0.1]]), torch.tensor([[-0.1, -500.0, -30.1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold=1e9, rollout_rs="token_k1", rollout_rs_threshold=1e10)
    found = correct(old, rollout, mask, options)
    torch.testing.assert_close(found.weights_BR, torch.tensor([[0.0, math.exp(20), math.exp(20)]]), rtol=1e-6, atol=1e-8)
    assert found.accepted_BR.all()
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert found.metrics["kl"] == pytest.approx(-10.0, abs=1e-4)  # not clamped


def test_what_is_no_number_is_rejected() -> None:
    old = OLD.clone()
    old[0, 1] = math.nan
    for name, rejected in (("token_k2", [[0, 1]]), ("seq_mean_k3", [[0, 0], [0, 1], [0, 2]])):
        options = CorrectionOptions(rollout_rs=name, rollout_rs_threshold=100)
        assert (MASK & ~correct(old, ROLLOUT, MASK, options).accepted_BR).nonzero().tolist() == rejected


def test_weights_are_constants() -> None:
    weights = weights_of(CorrectionOptions(rollout_is="token"), OLD.clone().requires_grad_())
    assert not weights.requires_grad


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \[2, 3\], \[2, 2\], \[2, 3\]"):
        correct(OLD, ROLLOUT[:, :2], MASK, CorrectionOptions())
    with pytest.raises(ValueError, match=r"float32, torch\.float64, torch\.bool"):
        correct(OLD.float(), ROLLOUT, MASK, CorrectionOptions())
    with pytest.raises(ValueError, match="and bool"):
        correct(OLD, ROLLOUT, MASK.long(), CorrectionOptions())


# --- options --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rollout_is": "row"}, "rollout_is = 'row': allowed are 'token', 'sequence' and None"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold = 0: allowed is a number u > 0"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold = True: allowed is"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold = '2_1': allowed is .* 0 < l <= u"),
        ({"rollout_is": "token", "rollout_is_threshold": "0_1"}, "rollout_is_threshold = '0_1'"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "rollout_is_threshold = '1_2_3'"),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, "rollout_is_threshold = nan"),
        ({"rollout_is": "token", "rollout_is_threshold": math.inf}, "rollout_is_threshold = inf"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold = 'two'"),
        ({"rollout_is_threshold": 3.0}, "rollout_is_threshold = 3.0 has no effect"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize = True has no effect"),
        ({"rollout_rs_threshold": 2}, "rollout_rs_threshold = 2 has no effect"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "rollout_rs = 'token_k4': allowed is .* token_k1, "),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs = 'seq_max_k1'"),
        ({"rollout_rs": "", "rollout_rs_threshold": 2}, "rollout_rs = ''"),
        ({"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": 2}, "list of different ones"),
        ({"rollout_rs": "token_k2"}, "rollout_rs_threshold = None for 1 options of rollout_rs: allowed is one threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "'1,2' for 1 options of rollout_rs: allowed is one threshold"),
        (
            {"rollout_rs": "token_k2,token_k3,seq_sum_k1", "rollout_rs_threshold": "1,2"},
            "'1,2' for 3 options of rollout_rs: allowed is one threshold, or 3 in a comma list",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_2"}, "'0.1_2' for token_k2: allowed is for k2 one number u > 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "0.5 for token_k1: allowed is for k1 .* u >= 1"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "3_2"}, "rollout_rs_threshold = '3_2'"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": -1}, "rollout_rs_threshold = -1: allowed is for k2 one number u > 0"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": False}, "rollout_rs_threshold = False"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        CorrectionOptions(**options)
    assert "\n" not in str(refused.value)


def test_one_threshold_serves_all_options_and_numbers_may_be_text() -> None:
    one = CorrectionOptions(rollout_rs="token_k2, seq_sum_k3", rollout_rs_threshold="0.3")
    each = CorrectionOptions(rollout_rs="token_k2,seq_sum_k3", rollout_rs_threshold="0.3,0.3")
    assert (
        one.rejections
        == each.rejections
        == CorrectionOptions(rollout_rs="token_k2,seq_sum_k3", rollout_rs_threshold=0.3).rejections
    )
    assert CorrectionOptions(rollout_is="token", rollout_is_threshold="1.5").band.is_strict is False
