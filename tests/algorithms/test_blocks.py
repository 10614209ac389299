"""What goes through in blocks is what goes through in one piece, on batches of several blocks with a ragged last one."""

import pytest
import torch

from asyncrl.algorithms.advantages.returns import gae_advantages, rewards_of_actions, rewards_to_go
from asyncrl.algorithms.blocks import BLOCK, row_blocks, row_counts, row_sums
from asyncrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten

ROWS, COLUMNS = 331, 513


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask() -> torch.Tensor:
    return torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) < 0.8


def test_blocks_cover_each_row_once(values: torch.Tensor) -> None:
    blocks = row_blocks(values)
    assert len(blocks) > 2
    assert [row for rows in blocks for row in range(rows.start, rows.stop)] == list(range(ROWS))
    assert all((rows.stop - rows.start) * COLUMNS <= BLOCK for rows in blocks)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, BLOCK + 1)], ids=str)
def test_odd_shapes(shape: tuple[int, int]) -> None:
    assert row_sums(torch.ones(shape)).tolist() == [shape[1]] * shape[0]
    assert row_counts(torch.ones(shape, dtype=torch.bool)).tolist() == [shape[1]] * shape[0]


def test_sums_and_counts(values: torch.Tensor, mask: torch.Tensor) -> None:
    torch.testing.assert_close(row_sums(values), values.sum(1))
    assert torch.equal(row_counts(mask), mask.sum(1))
    assert row_sums(torch.tensor([[1e8, 1, -1e8]])).tolist() == [1.0]  # float32 would lose the 1


def test_statistics(values: torch.Tensor, mask: torch.Tensor) -> None:
    inside = values[mask]
    torch.testing.assert_close(masked_sum(values, mask), inside.sum())
    torch.testing.assert_close(masked_mean(values, mask), inside.mean())
    torch.testing.assert_close(masked_var(values, mask), inside.var())
    torch.testing.assert_close(masked_whiten(values, mask)[mask], (inside - inside.mean()) / inside.std(), rtol=1e-7, atol=1e-7)
    across = masked_whiten(values.T, mask.T)  # not contiguous
    torch.testing.assert_close(across, masked_whiten(values, mask).T)


def test_returns(values: torch.Tensor, mask: torch.Tensor) -> None:
    halves = [slice(0, 100), slice(100, ROWS)]
    rewards = torch.where(torch.arange(ROWS)[:, None] % 7 == 0, values, values * mask)  # some rows with rewards in gaps
    for gamma in (1.0, 0.9):
        apart = torch.cat([rewards_to_go(rewards[rows], mask[rows], gamma=gamma) for rows in halves])
        assert torch.equal(rewards_to_go(rewards, mask, gamma=gamma), apart)
    apart = torch.cat([gae_advantages(rewards[rows], values[rows], mask[rows], gamma=0.9, lam=0.8)[1] for rows in halves])
    assert torch.equal(gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)[1], apart)
    moved = rewards_of_actions(rewards, mask)
    assert not moved[~mask].any()
    unmoved = torch.arange(ROWS) % 7 != 0
    assert torch.equal(moved[unmoved], rewards[unmoved])
