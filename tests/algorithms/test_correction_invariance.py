"""What must not matter to importance weights and rejection: order, padding, splits, blocks, metrics, the width of a float."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import correction_sums
from asyncrl.algorithms.correction import REJECTIONS, Correction, CorrectionOptions, correct
from tests.algorithms.test_correction import SEEDS, batch_of, weights_of

ALL = CorrectionOptions(
    rollout_is="token",
    rollout_is_threshold=1.5,
    rollout_rs="token_k1,seq_mean_k2,seq_max_k3",
    rollout_rs_threshold="0.4_2.5,0.2,0.9",
)


def _same(got: Correction, want: Correction) -> None:
    assert got.weights_BR is not None
    torch.testing.assert_close(got.weights_BR, want.weights_BR, rtol=1e-14, atol=0)
    assert torch.equal(got.accepted_BR, want.accepted_BR)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-12, abs=1e-13)


def _without(metrics: dict[str, float], names: set[str]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in names}


@given(SEEDS)
@settings(max_examples=20)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    old, rollout, mask = batch_of(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    want, got = correct(old, rollout, mask, ALL), correct(old[order], rollout[order], mask[order], ALL)
    assert want.weights_BR is not None
    _same(got, Correction(weights_BR=want.weights_BR[order], accepted_BR=want.accepted_BR[order], metrics=want.metrics))


@given(SEEDS, st.sampled_from([0.0, -3.0, math.nan, math.inf, -math.inf]))
@settings(max_examples=20)
def test_padding_rows_columns_and_what_lies_outside_the_mask_do_not_matter(seed: int, filling: float) -> None:
    old, rollout, mask = batch_of(seed)
    want = correct(old, rollout, mask, ALL)
    inside = (slice(1, 1 + len(mask)), slice(mask.shape[1]))

    def widened(values: torch.Tensor, outside: float) -> torch.Tensor:
        wide = torch.full((len(mask) + 3, mask.shape[1] + 2), outside, dtype=values.dtype)
        wide[inside] = values
        return wide

    wide_mask = widened(mask, False)
    got = correct(widened(old.where(mask, filling), filling), widened(rollout.where(mask, filling), filling), wide_mask, ALL)
    assert got.weights_BR is not None
    assert not got.weights_BR[~wide_mask].any()
    _same(Correction(weights_BR=got.weights_BR[inside], accepted_BR=got.accepted_BR[inside], metrics=got.metrics), want)


@given(SEEDS, st.integers(1, 6))
@settings(max_examples=20)
def test_a_token_keeps_its_weight_however_the_batch_is_split(seed: int, cut: int) -> None:
    old, rollout, mask = batch_of(seed)
    options = CorrectionOptions(rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=0.1)
    whole = correct(old, rollout, mask, options)
    parts = [correct(old[rows], rollout[rows], mask[rows], options) for rows in (slice(cut), slice(cut, None))]
    assert torch.equal(torch.cat([part.accepted_BR for part in parts]), whole.accepted_BR)
    assert whole.weights_BR is not None
    assert torch.equal(torch.cat([part.weights_BR for part in parts if part.weights_BR is not None]), whole.weights_BR)


def test_a_batch_of_several_blocks_says_what_one_block_says() -> None:
    old, rollout, mask = batch_of(5, rows=50, width=1000)
    want = correct(old, rollout, mask, ALL)
    got = correct(old.repeat(6, 1), rollout.repeat(6, 1), mask.repeat(6, 1), ALL)
    assert 2 * old.numel() < correction_sums.BLOCK_TOKENS < 3 * old.numel()  # so this is one block, and that is three
    other = {name for name in want.metrics if name.endswith(("seq_std", "p01", "p50", "p99"))}  # n - 1; a choice of tokens
    assert want.weights_BR is not None
    tiled = Correction(weights_BR=want.weights_BR.repeat(6, 1), accepted_BR=want.accepted_BR.repeat(6, 1), metrics=want.metrics)
    _same(replace(got, metrics=_without(got.metrics, other)), replace(tiled, metrics=_without(tiled.metrics, other)))


@given(SEEDS)
@settings(max_examples=20)
def test_rows_of_one_token_make_sequence_options_token_options(seed: int) -> None:
    old, rollout, _ = batch_of(seed, width=1)
    mask = torch.ones_like(old, dtype=torch.bool)
    torch.testing.assert_close(
        *(weights_of(CorrectionOptions(rollout_is=kind), old, rollout, mask) for kind in ("token", "sequence")),
        rtol=1e-14,
        atol=1e-14,
    )
    for estimator, threshold in (("k1", "0.7_1.3"), ("k2", 0.05), ("k3", 0.05)):
        levels = [level for level in ("token", "seq_sum", "seq_mean", "seq_max") if f"{level}_{estimator}" in REJECTIONS]
        options = [CorrectionOptions(rollout_rs=f"{level}_{estimator}", rollout_rs_threshold=threshold) for level in levels]
        accepted = [correct(old, rollout, mask, option).accepted_BR for option in options]
        assert all(torch.equal(accepted[0], other) for other in accepted[1:])


@given(SEEDS, st.sampled_from(list(REJECTIONS)))
@settings(max_examples=40)
def test_a_wider_threshold_rejects_no_more(seed: int, name: str) -> None:
    old, rollout, mask = batch_of(seed)
    thresholds = [1.1, 1.5, 2.5] if name.endswith("k1") else [0.02, 0.1, 0.6]
    accepted = [
        correct(old, rollout, mask, CorrectionOptions(rollout_rs=name, rollout_rs_threshold=threshold)).accepted_BR
        for threshold in thresholds
    ]
    assert not (accepted[0] & ~accepted[1]).any()
    assert not (accepted[1] & ~accepted[2]).any()


@given(SEEDS, st.floats(0.1, 5), st.sampled_from(["token", "sequence"]), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40)
def test_weights_lie_between_zero_and_the_threshold(seed: int, high: float, kind: str, dtype: torch.dtype) -> None:
    old, rollout, mask = batch_of(seed, spread=30.0)
    weights = weights_of(CorrectionOptions(rollout_is=kind, rollout_is_threshold=high), old.to(dtype), rollout.to(dtype), mask)
    assert weights.dtype == dtype
    assert (weights >= 0).all()
    assert (weights <= torch.tensor(high, dtype=dtype)).all()


@given(SEEDS)
@settings(max_examples=20)
def test_float32_says_what_float64_says(seed: int) -> None:
    old, rollout, mask = (tensor.float() if tensor.is_floating_point() else tensor for tensor in batch_of(seed))
    options = CorrectionOptions(rollout_is="token", rollout_is_threshold=1.5)
    got, want = correct(old, rollout, mask, options), correct(old.double(), rollout.double(), mask, options)
    assert got.weights_BR is not None
    assert want.weights_BR is not None
    torch.testing.assert_close(got.weights_BR.double(), want.weights_BR, rtol=1e-6, atol=1e-7)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-6)


def test_a_small_mismatch_keeps_its_digits_in_float32() -> None:
    """e^l as a float32 near 1 leaves two digits of k3, which is 3e-8 here."""
    rollout = torch.full((4, 512), -1.0)
    old = rollout + 2**-12
    metrics = correct(old, rollout, torch.ones_like(old, dtype=torch.bool), CorrectionOptions()).metrics
    assert metrics["k3_kl"] == pytest.approx(2**-25, rel=1e-3)
    assert metrics["chi2_token"] == pytest.approx(math.expm1(2**-11), rel=1e-5)


def test_with_and_without_metrics_say_the_same() -> None:
    old, rollout, mask = batch_of(3)
    for kind in ("token", "sequence"):
        options = CorrectionOptions(
            rollout_is=kind, rollout_is_batch_normalize=True, rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="1.5,0.1"
        )
        quick, full = correct(old, rollout, mask, options, with_metrics=False), correct(old, rollout, mask, options)
        assert quick.metrics == {}
        _same(Correction(weights_BR=quick.weights_BR, accepted_BR=quick.accepted_BR, metrics=full.metrics), full)
