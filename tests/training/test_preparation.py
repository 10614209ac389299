"""What is known of a mini-batch before its first gradient: a loss picks tokens from the right columns, row by row."""

import pytest
import torch

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.registry import LossSpec
from asyncrl.chosen import ChosenLoss
from asyncrl.training.preparation import ActorRows, prepare

MASK = [torch.tensor([True, False, True]), torch.tensor([True, True]), torch.tensor([True])]
KEPT = [torch.tensor([True, False, True]), torch.tensor([False, True]), torch.tensor([True])]
NOW, OLD, ADVANTAGES = (
    [torch.arange(start, start + len(mask), dtype=torch.float32) for start, mask in zip(starts, MASK, strict=True)]
    for starts in ((0, 10, 20), (100, 110, 120), (200, 210, 220))
)


def spec(seen: list[list[float]]) -> LossSpec:
    def plain(inputs: LossInputs) -> PolicyLoss:
        return PolicyLoss(loss_n=inputs.log_prob_n)

    def select(now_n: torch.Tensor, old_n: torch.Tensor, advantages_n: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        seen.extend(values.tolist() for values in (now_n, old_n, advantages_n))
        return now_n > 10

    return LossSpec(function=plain, select=select)


@pytest.mark.parametrize("has_old", [True, False])
def test_a_loss_picks_among_the_kept_tokens_of_its_mini_batch(has_old: bool) -> None:
    rows = ActorRows(
        mask=MASK,
        kept=KEPT,
        advantages=ADVANTAGES,
        sessions_B=torch.arange(3),
        old=OLD if has_old else [],
        reference=[],
        rollout=[],
        is_weights=[],
    )
    seen: list[list[float]] = []
    found = prepare(rows, [2, 1], ChosenLoss(spec=spec(seen), options={}), None, lambda chosen: NOW, seed=0)
    now = [20.0, 11.0]
    assert seen == [now, [120.0, 111.0] if has_old else now, [220.0, 211.0]]
    assert [found.selected[row].tolist() for row in (1, 2)] == [[False, True], [True]]
    assert found.kept is KEPT
