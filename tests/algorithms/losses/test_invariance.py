"""Loss and gradient of every loss x aggregation: the same for any split, with padding, and for any cut of a session into rows.

1e-12 relative, in float64.
"""

import random

import pytest
import torch

from asyncrl.algorithms.aggregation import AggregationMode
from asyncrl.algorithms.losses import POLICY_LOSSES
from tests.algorithms.losses.cases import MODES, Batch, batch, loss_and_gradient

EVERY_LOSS = pytest.mark.parametrize("name", POLICY_LOSSES)
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to 1e-12 of the largest entry."""
    assert float((got - want).abs().max()) <= 1e-12 * float(want.abs().max())


def _splits(sequences_B: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Random micro-batches: the sequences shuffled and cut in two to four, each with all of its rows."""
    chance = random.Random(seed)
    part_of = {int(number): chance.randrange(chance.choice((2, 3, 4))) for number in torch.unique(sequences_B)}
    parts = torch.tensor([part_of[int(number)] for number in sequences_B])
    rows = [(parts == part).nonzero()[:, 0] for part in sorted(set(part_of.values()), key=lambda _: chance.random())]
    return [part[torch.tensor(chance.sample(range(len(part)), len(part)))] for part in rows]


@EVERY_LOSS
@EVERY_MODE
def test_any_split_into_micro_batches_gives_the_same(name: str, mode: AggregationMode) -> None:
    for seed in range(3):
        whole = batch(seed, sessions=None if seed == 0 else 4)
        loss, gradient = loss_and_gradient(name, whole, mode)
        assert gradient.any()
        got_loss, got_gradient = loss_and_gradient(name, whole, mode, _splits(whole.sequences_B, seed))
        _same(got_loss, loss)
        _same(got_gradient, gradient)


@pytest.mark.parametrize("name", [name for name, spec in POLICY_LOSSES.items() if not spec.is_sequence_level])
def test_a_token_loss_takes_a_split_inside_a_session(name: str) -> None:
    whole = batch(3, sessions=2)
    loss, gradient = loss_and_gradient(name, whole, "seq-mean-token-mean")
    got_loss, got_gradient = loss_and_gradient(name, whole, "seq-mean-token-mean", [torch.tensor([row]) for row in range(6)])
    _same(got_loss, loss)
    _same(got_gradient, gradient)


def _padded(whole: Batch, rows: int, columns: int) -> Batch:
    """Rows of sequences of their own and columns, full of numbers, outside the mask; the rows in front."""

    def pad(tensor_BR: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor_BR, (0, columns, rows, 0), value=value)

    return Batch(
        log_prob_BR=pad(whole.log_prob_BR, -3.0),
        old_log_prob_BR=pad(whole.old_log_prob_BR, -0.5),
        advantages_BR=pad(whole.advantages_BR, 2.0),
        weights_BR=pad(whole.weights_BR, 5.0),
        mask_BR=pad(whole.mask_BR, False),
        sequences_B=torch.cat([100 + torch.arange(rows), whole.sequences_B]),
    )


@EVERY_LOSS
@EVERY_MODE
def test_padding_changes_nothing(name: str, mode: AggregationMode) -> None:
    whole = batch(4, sessions=4)
    loss, gradient = loss_and_gradient(name, whole, mode)
    got_loss, got_gradient = loss_and_gradient(name, _padded(whole, 3, 4), mode)
    _same(got_loss, loss)
    _same(got_gradient[3:, :-4], gradient)
    assert not got_gradient[:3].any()
    assert not got_gradient[:, -4:].any()


@EVERY_LOSS
@EVERY_MODE
def test_a_session_counts_once_however_it_is_cut_into_rows(name: str, mode: AggregationMode) -> None:
    """Rows of 9 tokens against the same tokens in rows of 3, three to a session."""
    whole = batch(5)
    loss, gradient = loss_and_gradient(name, whole, mode)
    cut = Batch(
        log_prob_BR=whole.log_prob_BR.reshape(-1, 3),
        old_log_prob_BR=whole.old_log_prob_BR.reshape(-1, 3),
        advantages_BR=whole.advantages_BR.reshape(-1, 3),
        weights_BR=whole.weights_BR.reshape(-1, 3),
        mask_BR=whole.mask_BR.reshape(-1, 3),
        sequences_B=whole.sequences_B.repeat_interleave(3),
    )
    got_loss, got_gradient = loss_and_gradient(name, cut, mode)
    _same(got_loss, loss)
    _same(got_gradient.reshape(gradient.shape), gradient)


@EVERY_LOSS
@EVERY_MODE
def test_an_empty_mask_gives_zero_and_a_zero_gradient(name: str, mode: AggregationMode) -> None:
    whole = batch(6)
    loss, gradient = loss_and_gradient(name, Batch(**{**_tensors(whole), "mask_BR": torch.zeros_like(whole.mask_BR)}), mode)
    assert float(loss) == 0
    assert gradient.shape == whole.mask_BR.shape
    assert not gradient.any()


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    whole = batch(7)
    jump_BR = torch.linspace(-600, 600, whole.mask_BR.numel(), dtype=torch.float64).reshape(whole.mask_BR.shape)
    tensors = {
        **_tensors(whole),
        "log_prob_BR": (jump_BR.clamp(max=0) - 1e-3).to(dtype),
        "old_log_prob_BR": (-jump_BR.clamp(min=0) - 1e-3).to(dtype),
        "advantages_BR": whole.advantages_BR.to(dtype),
    }
    loss, gradient = loss_and_gradient(name, Batch(**tensors), "token-mean")
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def _tensors(whole: Batch) -> dict[str, torch.Tensor]:
    return {name: getattr(whole, name) for name in Batch.__slots__}
