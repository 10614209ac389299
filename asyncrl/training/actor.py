"""The actor: the policy that is trained, and its PPO-clipped update; and the frozen reference.

... -> advantages -> [actor update] -> publish

Invariants:
1. The loss of a mini-batch does not depend on how it is cut into micro-batches: all weights come from counts of the mini-batch.
2. Only policy tokens (response_mask) have a logit, a loss and a count.
3. Log-probs are those of softmax(logits / rollout.temperature), the distribution the engine samples from. top_k and top_p are not
   modelled: with them on, rollout_log_probs are of the filtered distribution and the trainer's are not.

Where we differ from verl 0.9.1: means of metrics weigh every policy token of a mini-batch the same, not every micro-batch.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from asyncrl.algorithms.kl import kl_penalty
from asyncrl.algorithms.losses import ppo_clip_loss
from asyncrl.config import TrainRun
from asyncrl.ports import Topology
from asyncrl.protocol.mini_batches import mini_batches
from asyncrl.protocol.ragged import rows_of
from asyncrl.training.learner import Learner, LearnerState, Snapshot
from asyncrl.training.mesh import open_mesh, topology_of
from asyncrl.training.mini_batch import Tally, means, mini_batch_weights
from asyncrl.training.model import build_policy
from asyncrl.training.scoring import Rows, score_responses


class Actor:
    """Sync methods; the trainer calls them one at a time in the world's `model` pool.

    total_updates: optimizer steps of the whole run. 0: trainer.total_training_steps x updates a batch.
    Raises ModelError and ConfigError as `Learner` does.
    """

    def __init__(self, run: TrainRun, *, total_updates: int = 0) -> None:
        total = total_updates or run.trainer.total_training_steps * run.updates_per_batch
        self._config = run.actor
        self._temperature = run.rollout.temperature
        self._groups_a_mini_batch = run.mini_batch_groups
        mesh = open_mesh()
        self._learner = Learner(build_policy(run.model, mesh), mesh, run.actor.optim, total_updates=total)

    @property
    def updates(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._learner.updates

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because their gradient was not finite."""
        return self._learner.skipped_updates

    def log_probs(self, columns: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_probs, entropy), ragged float32 on the response axis, 0 where response_mask is 0. Changes nothing."""
        return score_responses(
            self._learner.module, columns, max_tokens=self._config.ppo_max_token_len_per_gpu, temperature=self._temperature
        )

    @property
    def topology(self) -> Topology:
        """How the actor's processes are cut."""
        return topology_of(self._learner.mesh)

    @property
    def num_ranks(self) -> int:
        """Ranks that share a batch: the data-parallel size of the mesh."""
        return self._learner.mesh.size()

    def update(self, columns: TensorDict, group_ids: Sequence[str | None]) -> dict[str, float]:
        """One pass of `ppo_epochs` over the batch, an optimizer step for each mini-batch of groups, in order of first appearance.

        columns: input_ids, position_ids, response_mask, advantages; old_log_probs (absent: the detached new ones); ref_log_prob
        when the KL loss is on; rollout_log_probs for the metrics, when there. group_ids: the uid of each row, None for padding.
        Returns metrics under verl's names, means over the mini-batches.
        Raises NonFiniteGradientError after too many skipped updates in a row.
        """
        batch = _Batch(columns, group_ids)
        reports: list[dict[str, float]] = []
        for _ in range(self._config.ppo_epochs):
            for chosen in mini_batches(group_ids, self._groups_a_mini_batch):
                compare = batch.rollout if not reports else None
                reports.append(self._update_mini_batch(batch, chosen, compare))
        return {**means(reports), "actor/skipped_updates": float(self._learner.skipped_updates)}

    def _update_mini_batch(self, batch: "_Batch", chosen: Sequence[int], rollout: list[torch.Tensor] | None) -> dict[str, float]:
        weights = mini_batch_weights(batch.rows.mask, chosen, self._config.loss_agg_mode, self._learner.mesh)
        tally = Tally()
        for rows in batch.rows.micro_batches(chosen, self._config.ppo_max_token_len_per_gpu):
            self._accumulate(batch, rows, weights, tally, rollout)
        report = self._learner.step(lambda: tally.suspects(batch.group_ids, chosen))
        return {**tally.metrics(), "actor/grad_norm": report.grad_norm, "actor/lr": report.lr}

    def _accumulate(
        self,
        batch: "_Batch",
        rows: Sequence[int],
        weights: list[torch.Tensor],
        tally: Tally,
        rollout: list[torch.Tensor] | None,
    ) -> None:
        """Forward and backward of one micro-batch."""
        config = self._config
        pick = batch.rows.on_policy_tokens
        tokens = batch.rows.token_batch(rows)
        log_prob, entropy = self._learner.module(tokens, self._temperature, config.entropy_coeff > 0)
        old = pick(batch.old, rows) if batch.old else log_prob.detach()
        weight = pick(weights, rows)
        policy_loss = ppo_clip_loss(
            log_prob,
            old,
            pick(batch.advantages, rows),
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
        )
        terms = {"actor/pg_loss": policy_loss.loss}
        loss = policy_loss.loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            terms["actor/kl_loss"] = kl_penalty(log_prob, pick(batch.reference, rows), config.kl_loss_type)
            loss = loss + config.kl_loss_coef * terms["actor/kl_loss"]
        terms |= {"actor/entropy_loss": entropy, "actor/loss": loss}
        self._learner.backward((loss * weight).sum())
        for name, values in terms.items():
            tally.add_sum(name, (values.detach() * weight).sum())
        tally.add_mean("actor/entropy", entropy.detach())
        tally.add_mean("actor/ppo_kl", -policy_loss.log_ratio)
        tally.add_mean("actor/pg_clipfrac", policy_loss.is_clipped.float())
        tally.add_mean("actor/pg_clipfrac_lower", policy_loss.is_clipped_lower.float())
        if rollout:
            tally.add_drift((log_prob.detach().exp() - pick(rollout, rows).exp()).abs())
        tally.note_broken(loss.detach(), batch.rows.mask, rows)

    def snapshot(self, version: int) -> Snapshot:
        """Copies of all weights by Hugging Face name, for `engine.publish`."""
        return self._learner.snapshot(version)

    def state(self) -> LearnerState:
        """Copies of weights, optimizer, random generator and counters, for a checkpoint."""
        return self._learner.state()

    def load(self, state: LearnerState) -> None:
        """Go on from a checkpoint. Raises CheckpointError when it is of another model."""
        self._learner.load(state)


class Reference:
    """The frozen model at `model.path`: log-probs for a KL term. It has no optimizer and never changes."""

    def __init__(self, run: TrainRun) -> None:
        self._max_tokens = run.actor.ppo_max_token_len_per_gpu
        self._temperature = run.rollout.temperature
        self._policy = build_policy(run.model, open_mesh())
        self._policy.requires_grad_(False)

    def log_probs(self, columns: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Actor.log_probs`."""
        return score_responses(self._policy, columns, max_tokens=self._max_tokens, temperature=self._temperature)


class _Batch:
    """The columns of a batch as one tensor a row; an absent column is an empty list."""

    def __init__(self, columns: TensorDict, group_ids: Sequence[str | None]) -> None:
        names = set(columns.keys())
        self.group_ids = group_ids
        self.rows = Rows.of(columns)
        self.advantages = rows_of(columns["advantages"])
        self.old = rows_of(columns["old_log_probs"]) if "old_log_probs" in names else []
        self.reference = rows_of(columns["ref_log_prob"]) if "ref_log_prob" in names else []
        self.rollout = rows_of(columns["rollout_log_probs"]) if "rollout_log_probs" in names else []
