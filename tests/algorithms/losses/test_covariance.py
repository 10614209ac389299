"""Which tokens clip_cov and kl_cov pick: by the definition, over the mini-batch, from the caller's generator alone."""

import pytest
import torch

from asyncrl.algorithms.losses.covariance import select_clip_cov, select_kl_cov, token_covariance

LOG_PROB = torch.tensor([-1.0, -2.0, -3.0, -2.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([3.0, -1.0, -1.0, -1.0], dtype=torch.float64)
"""Covariances: means are -2 and 0, so 3, 0, 1, 0."""


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_covariance_by_hand() -> None:
    assert token_covariance(LOG_PROB, ADVANTAGES).tolist() == [3.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("ratio", "picked"), [(0.0002, [0]), (0.5, [0, 2]), (0.75, [0, 1, 2]), (1.0, [0, 1, 2, 3])])
def test_kl_cov_takes_the_largest_and_of_equal_ones_the_first(ratio: float, picked: list[int]) -> None:
    chosen = select_kl_cov(LOG_PROB, LOG_PROB, ADVANTAGES, generator=_generator(), kl_cov_ratio=ratio)
    assert chosen.nonzero()[:, 0].tolist() == picked


def test_of_many_equal_tokens_kl_cov_takes_the_first() -> None:
    same = torch.zeros(5000, dtype=torch.float64)
    chosen = select_kl_cov(same, same, same, generator=_generator(), kl_cov_ratio=0.01)
    assert chosen.nonzero()[:, 0].tolist() == list(range(50))


@pytest.mark.parametrize(("low", "high", "picked"), [(0.5, 5.0, [0, 2]), (1.0, 5.0, [0]), (0.5, 3.0, [2]), (5.0, 9.0, [])])
def test_clip_cov_takes_tokens_strictly_between_the_bounds(low: float, high: float, picked: list[int]) -> None:
    chosen = select_clip_cov(
        LOG_PROB, LOG_PROB, ADVANTAGES, generator=_generator(), clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high
    )
    assert chosen.nonzero()[:, 0].tolist() == picked


def test_clip_cov_leaves_out_what_the_clip_holds() -> None:
    """Token 0: A > 0 and a ratio of e."""
    old = LOG_PROB - torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    chosen = select_clip_cov(LOG_PROB, old, ADVANTAGES, generator=_generator(), clip_cov_ratio=1.0, clip_cov_lb=0.5)
    assert chosen.nonzero()[:, 0].tolist() == [2]


def test_clip_cov_picks_at_random_from_the_generator_and_from_nothing_else() -> None:
    noise = torch.randn(2, 1000, generator=_generator(), dtype=torch.float64)
    log_prob, advantages = noise[0] - 5, noise[0] + 0.1 * noise[1]

    def pick(seed: int) -> torch.Tensor:
        torch.manual_seed(seed + 1000)
        before = torch.random.get_rng_state()
        chosen = select_clip_cov(
            log_prob, log_prob, advantages, generator=_generator(seed), clip_cov_ratio=0.01, clip_cov_lb=0.5, clip_cov_ub=50.0
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        return chosen

    qualifies = token_covariance(log_prob, advantages) > 0.5
    picks = [pick(seed) for seed in range(40)]
    assert all(int(chosen.sum()) == 10 and bool(qualifies[chosen].all()) for chosen in picks)
    assert torch.equal(pick(3), picks[3])
    assert not torch.equal(picks[3], picks[4])
    assert int(torch.stack(picks).any(0).sum()) > 200  # of about 440 that qualify: no favourites


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_no_token_at_all_selects_nothing(select: "type") -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert select(empty, empty, empty, generator=_generator()).shape == (0,)
