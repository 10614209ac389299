"""The sampling functions: exact distribution, no token of probability zero, independence of neighbours."""

import numpy as np
import pytest
import torch

from asyncrl.rollout.sampling import RowParams, filter_logits, invert_cdf, sample, uniforms


def params(rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> RowParams:
    return RowParams.stack([temperature] * rows, [top_k] * rows, [top_p] * rows)


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds, positions = np.arange(1000, dtype=np.uint64), np.arange(1000, dtype=np.uint64) % np.uint64(7)
    whole = uniforms(seeds, positions)
    assert torch.equal(whole[[3, 500]], uniforms(seeds[[3, 500]], positions[[3, 500]]))
    assert len(set(whole.tolist())) == 1000
    assert ((whole >= 0) & (whole < 1)).all()


def test_uniforms_are_even_over_seeds_and_over_positions() -> None:
    many = np.arange(20_000, dtype=np.uint64)
    for numbers in (uniforms(many, np.zeros_like(many)), uniforms(np.zeros_like(many), many)):
        counts = torch.histc(numbers, bins=20, min=0, max=1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees of freedom: p < 1e-4
        assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 0.03


@pytest.mark.parametrize("size", [1, 5, 64, 65, 200])
def test_inverse_cdf_is_exact(size: int) -> None:
    """An even grid of uniforms gives each token its share to within one grid point."""
    weights = torch.rand(size).where(torch.rand(size) > 0.3, torch.tensor(0.0))
    weights[size // 2] = 1.0
    grid = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    ids = invert_cdf(weights.expand(5000, -1), grid[:, None])
    counts = torch.bincount(ids[:, 0], minlength=size)
    assert (counts / 5000 - weights / weights.sum()).abs().max() <= 1.1 / 5000
    assert counts[weights == 0].sum() == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_zero_weights_are_never_drawn_not_even_at_the_ends(uniform: float) -> None:
    weights = torch.zeros(3, 200)
    weights[0, 199] = weights[1, 0] = weights[2, 70] = 1e-30
    ids = invert_cdf(weights, torch.full((3, 1), uniform, dtype=torch.float64))
    assert ids[:, 0].tolist() == [199, 0, 70]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, numbers = torch.randn(9, 300), torch.rand(9, dtype=torch.float64)
    whole = sample(logits.clone(), params(9), numbers)
    for row in range(9):
        alone = sample(logits[row : row + 1].clone(), params(1), numbers[row : row + 1])
        assert torch.equal(alone[0], whole[0][row : row + 1])
        assert torch.equal(alone[1], whole[1][row : row + 1])


def test_log_probs_stay_finite_with_extreme_logits() -> None:
    logits = torch.full((4, 500), -1e4)
    logits[:, 3] = 1e4
    ids, log_probs = sample(
        logits, params(4, temperature=0.01, top_k=3, top_p=0.9), torch.tensor([0, 0.3, 0.9, 1 - 2**-53]).double()
    )
    assert ids.tolist() == [3] * 4
    assert log_probs.tolist() == [0.0] * 4


def naive_keep(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    order = logits.argsort(descending=True)
    order = order[: top_k or None]
    probs = logits[order].double().softmax(-1)
    kept = order[(probs.cumsum(-1) - probs) < top_p]
    keep = torch.zeros(logits.shape, dtype=torch.bool)
    keep[kept if len(kept) else order[:1]] = True
    return keep


@pytest.mark.parametrize("top_k", [0, 1, 7, 257, 600, 2999, 10_000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.8, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("scale", [0.01, 0.5, 1.5, 3.0])
def test_filters_agree_with_a_plain_sort(top_k: int, top_p: float, scale: float) -> None:
    logits = torch.randn(3, 3000) * scale
    kept = filter_logits(logits.clone(), params(3, top_k=top_k, top_p=top_p)).isfinite()
    assert torch.equal(kept, torch.stack([naive_keep(row, top_k, top_p) for row in logits]))


def test_rows_with_and_without_filters_share_a_step() -> None:
    logits = torch.randn(3, 1000)
    mixed = RowParams.stack([1.0, 0.0, 1.0], [0, 5, 5], [1.0, 0.5, 1.0])
    kept = filter_logits(logits, mixed).isfinite().sum(-1)
    assert kept.tolist() == [1000, 1000, 5]


def test_sampled_frequencies_match_the_filtered_distribution() -> None:
    logits = torch.randn(50)
    numbers = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64))
    ids, log_probs = sample(logits.expand(20_000, -1).clone(), params(20_000, temperature=0.7, top_p=0.8), numbers)
    seen = torch.bincount(ids, minlength=50) / 20_000
    for token in sorted(set(ids.tolist())):
        assert float(seen[token]) == pytest.approx(float(log_probs[ids == token][0].exp()), abs=0.015)
