"""The critic: what return is to be expected at each token, and its update towards the returns that came.

... -> [values] -> advantages -> [critic update] -> actor update

Invariants:
1. The loss of a mini-batch does not depend on how it is cut into micro-batches or spread over ranks: all weights come from its
   counts.
2. Only policy tokens (response_mask) have a value, a loss and a count; elsewhere the value is 0.
3. The value of a token is read at the position that predicts it, so it knows nothing of the token itself: a baseline.

Where we differ from verl 0.9.1:
1. Means of metrics weigh every policy token of a mini-batch the same, not every micro-batch.
2. Mini-batches and passes are the actor's; there are no keys for others. The loss is the mean over the tokens of the mini-batch
   whatever `actor.loss_agg_mode` is: a prediction is as wrong in a long answer as in a short one.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from asyncrl.algorithms.values import value_loss
from asyncrl.config import TrainRun
from asyncrl.errors import ModelError
from asyncrl.ports import Shards
from asyncrl.protocol.ragged import rows_of, values_of
from asyncrl.training.learner import Learner
from asyncrl.training.mesh import Mesh, open_mesh
from asyncrl.training.metrics import Metrics
from asyncrl.training.mini_batch import Tally, mini_batch_weights, passes, shares_of
from asyncrl.training.scoring import Rows, budget_of, joining_batch, score_tokens
from asyncrl.training.token_batch import TokenBatch
from asyncrl.training.value_model import build_value_model


class Critic:
    """Sync methods; the trainer calls them one at a time in the world's `model` pool.

    mesh and total_updates: as of the actor, whose ranks it shares. Raises ModelError and ConfigError as `build_value_model` and
    `Learner` do.
    """

    def __init__(self, run: TrainRun, mesh: Mesh | None = None, *, total_updates: int = 0) -> None:
        mesh = mesh or open_mesh()
        self._key = "critic.model_path" if run.critic.model_path else "model.path"
        self._config = run.critic
        self._path = run.critic_model.path
        self._num_passes = run.actor.ppo_epochs
        self._groups_a_mini_batch = run.mini_batch_groups
        total = total_updates or run.trainer.total_training_steps * run.updates_per_batch
        key = "critic.ppo_max_token_len_per_gpu"
        self._budget = budget_of(run.critic.ppo_max_token_len_per_gpu, run.critic_model, mesh, key=key)
        model = build_value_model(run.critic_model, mesh, run.actor.fsdp_config, key=self._key)
        self.learner = Learner(model, mesh, run.critic.optim, total_updates=total)

    @property
    def updates(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.learner.updates

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because their gradient was not finite."""
        return self.learner.skipped_updates

    def values(self, columns: TensorDict, shards: Shards = ()) -> torch.Tensor:
        """Ragged float32 on the response axis, 0 where response_mask is 0 and in rows of other ranks. Changes nothing.

        columns: input_ids, position_ids, response_mask. Raises ModelError for a token that the critic's vocabulary lacks.
        """
        self._check_ids(columns)
        learner = self.learner
        (values,) = score_tokens(
            learner.module, self._forward, columns, budget=self._budget, mesh=learner.mesh, shards=shards, count=1, what="values"
        )
        return values

    def _forward(self, tokens: TokenBatch) -> tuple[torch.Tensor]:
        return (self.learner.module(tokens),)

    def _check_ids(self, columns: TensorDict) -> None:
        ids, size = values_of(columns["input_ids"]), self.learner.module.vocab_size
        if len(ids) and int(ids.max()) >= size:
            raise ModelError(
                f"{self._key} = {self._path!r} has a vocabulary of {size} tokens, and a trajectory has token {int(ids.max())}; "
                "the critic must start from a model with the policy's tokenizer"
            )

    def update(self, columns: TensorDict, group_ids: Sequence[str | None], shards: Shards = ()) -> dict[str, float]:
        """One pass of `actor.ppo_epochs` over the batch, an optimizer step for each mini-batch of groups, as the actor's.

        columns: input_ids, position_ids, response_mask, values, returns; loss_weights, when there. group_ids: the uid of each row,
        None for padding. Returns metrics under verl's names, means over the mini-batches.
        Raises ConfigError and NonFiniteGradientError as the actor's.
        """
        batch, mesh = _Batch(columns, group_ids), self.learner.mesh
        shares = shares_of(shards, group_ids, self._groups_a_mini_batch, mesh)
        plans = [(ranks, batch.rows.micro_batches(ranks, self._budget)[mesh.dp_rank]) for ranks in shares]
        steps = [self._update_mini_batch(batch, *plan) for plan in plans * self._num_passes]
        return {**Metrics.over_steps(steps), "critic/skipped_updates": float(self.learner.skipped_updates)}

    def _update_mini_batch(
        self, batch: "_Batch", ranks: Sequence[Sequence[int]], micro_batches: Sequence[Sequence[int]]
    ) -> Metrics:
        """ranks: rows of each; micro_batches: of this one."""
        chosen = sorted(row for rows in ranks for row in rows)
        weights = mini_batch_weights(batch.rows.mask, chosen, "token-mean", loss_weights=batch.loss_weights)
        own = Tally()
        for rows, is_last in passes("update_critic", micro_batches):
            self._accumulate(batch, rows, weights, own, is_last=is_last)
        tally = own.over_ranks(self.learner.mesh)
        report = self.learner.step(lambda: tally.suspects(batch.group_ids, chosen))
        tally.metrics.add_weighted_mean("critic/grad_norm", report.grad_norm, 1.0)  # alike on all ranks
        tally.metrics.add_weighted_mean("critic/lr", report.lr, 1.0)
        return tally.metrics

    def _accumulate(
        self, batch: "_Batch", rows: Sequence[int], weights: list[torch.Tensor], tally: Tally, *, is_last: bool
    ) -> None:
        """Forward and backward of one micro-batch. Without rows the share of the loss is 0."""
        pick = batch.rows.on_policy_tokens
        values = self.learner.module(batch.rows.token_batch(rows) if rows else joining_batch())
        if not rows:
            self.learner.backward(0.0 * values.sum(), is_last=is_last)
            return
        weight = pick(weights, rows)
        loss = value_loss(values, pick(batch.values, rows), pick(batch.returns, rows), cliprange_value=self._config.cliprange_value)
        total = (loss.loss_n * weight).sum()
        self.learner.backward(total, is_last=is_last)
        tally.metrics.add_sum("critic/vf_loss", total.detach())
        counts = weight != 0
        for name, facts_n in loss.facts.items():
            tally.metrics.add_mean(f"critic/{name}", facts_n[counts])
        tally.note_broken(loss.loss_n.detach(), batch.rows.mask, rows)


class _Batch:
    """The columns of a batch as one tensor a row; an absent column is an empty list."""

    def __init__(self, columns: TensorDict, group_ids: Sequence[str | None]) -> None:
        self.group_ids = group_ids
        self.rows = Rows.of(columns)
        self.values = rows_of(columns["values"])
        self.returns = rows_of(columns["returns"])
        self.loss_weights = rows_of(columns["loss_weights"]) if "loss_weights" in set(columns.keys()) else []
