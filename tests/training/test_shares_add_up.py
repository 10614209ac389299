"""What the ranks compute of a mini-batch makes up the whole: shards of 2 and 4 ranks, one after the other in this process.

Nothing is asked of other ranks here; that, and the losses that need it, are in `test_update_on_ranks.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import TrainRun
from asyncrl.ports import Shards
from asyncrl.protocol.ragged import rows_of
from asyncrl.training.actor import Actor
from asyncrl.training.critic import Critic
from asyncrl.training.learner import UpdateReport
from asyncrl.training.mesh import Mesh, full_copy, open_mesh
from asyncrl.training.mini_batch import shares_of

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5)]
GROUPS = ["a", "a", "b", "b", "c", "c", None]
SESSIONS = ["a_0", "a_1", "b_0", "b_0", "c_0", "c_1", None]
SPREAD: dict[int, Shards] = {
    2: (((0, 6, 2, 3),), ((1, 4, 5),)),
    4: (((4, 1),), ((2, 3),), ((),), ((0, 5, 6),)),  # one without rows
}

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]


def rank_of(number: int, size: int) -> Mesh:
    """As if this process were that one of `size` ranks, alone with its weights."""
    return replace(open_mesh(), dp_rank=number, dp_size=size)


def share_of(model: Any, columns: TensorDict, mesh: Mesh, shards: Shards) -> tuple[torch.Tensor, float]:
    """(all gradients of an update, its loss): what this rank's rows alone make of them. The weights stay as they are."""
    found = list[torch.Tensor]()

    def keep(suspects: Callable[[], str]) -> UpdateReport:
        found.extend(full_copy(parameter.grad).flatten() for parameter in model.learner.trained.values())
        model.learner.optimizer.zero_grad()
        return UpdateReport(grad_norm=0.0, lr=0.0, skipped=False)

    model.learner.step, model.learner.mesh = keep, mesh
    is_critic = isinstance(model, Critic)
    metrics = model.update(columns, GROUPS, *([] if is_critic else [SESSIONS]), shards=shards)
    return torch.cat(found), metrics.get("critic/vf_loss" if is_critic else "actor/loss", 0.0)


@pytest.mark.parametrize("kind", ["vanilla", "gspo", "critic"])
def test_gradients_and_losses_of_the_shards_add_up(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, kind: str
) -> None:
    actor = {"ppo_max_token_len_per_gpu": 40, "loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01}
    actor |= {} if kind == "critic" else {"loss_mode": kind}
    algorithm = {"adv_estimator": "gae"} if kind == "critic" else {}
    run = make_run(make_model(), actor=actor, algorithm=algorithm, model={"dtype": "float64"})
    columns = make_columns(LENGTHS)
    columns["old_log_probs"] = columns["rollout_log_probs"]
    columns["values"], columns["returns"] = columns["rollout_log_probs"], columns["advantages"]
    model = Critic(run) if kind == "critic" else Actor(run)
    whole, loss = share_of(model, columns, rank_of(0, 1), ())
    assert float(whole.norm()) > 1e-3
    for size, shards in SPREAD.items():
        parts = [share_of(model, columns, rank_of(number, size), shards) for number in range(size)]
        total = torch.stack([gradient for gradient, _ in parts]).sum(0)
        assert float((total - whole).abs().max()) < 1e-9 * float(whole.abs().max())
        assert sum(part for _, part in parts) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("shards", [(((0, 1),),) * 2, ()])
def test_shards_of_other_ranks_are_refused(shards: Shards) -> None:
    with pytest.raises(ValueError, match=f"shards for {len(shards)} ranks came to one of 3"):
        shares_of(shards, ["a", "b"], 1, rank_of(0, 3))


def test_shards_of_one_rank_make_its_mini_batches() -> None:
    assert shares_of((((1,), (0,)),), ["a", "b"], 2, rank_of(0, 1)) == [[(1,)], [(0,)]]
    assert shares_of((), ["a", "b"], 2, rank_of(0, 1)) == [[[0, 1]]]


def test_scores_are_of_the_own_rows(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> None:
    columns, actor = make_columns(LENGTHS), Actor(make_run(make_model()))
    whole = rows_of(actor.log_probs(columns)[0])
    actor.learner.mesh = rank_of(1, 2)
    found = rows_of(actor.log_probs(columns, SPREAD[2])[0])
    for row, values in enumerate(whole):
        torch.testing.assert_close(found[row], values if row in SPREAD[2][1][0] else torch.zeros_like(values))
