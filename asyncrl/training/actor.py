"""The actor: the policy that is trained, and its update by the chosen loss; and the frozen reference.

... -> advantages -> [actor update] -> publish

Invariants:
1. The loss of a mini-batch does not depend on how it is cut into micro-batches or spread over ranks: all weights come from its
   counts.
2. Only policy tokens (response_mask) have a logit, a loss and a count.
3. Log-probs are those of softmax(logits / rollout.temperature), the distribution the engine samples from. top_k and top_p are not
   modelled: with them on, rollout_log_probs are of the filtered distribution and the trainer's are not.
4. Every rank makes the same passes and optimizer steps and tells the same numbers. It is given all rows and computes its own, so
   what must be known of a whole mini-batch is counted where it is needed; only log-probs and metrics come from other ranks.

Where we differ from verl 0.9.1: means of metrics weigh every policy token of a mini-batch the same, not every micro-batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from tensordict import TensorDict

from asyncrl.algorithms.kl import kl_penalty
from asyncrl.algorithms.losses.inputs import LossInputs
from asyncrl.chosen import ChosenLoss, chosen_correction, chosen_loss
from asyncrl.config import TrainRun
from asyncrl.errors import AlgorithmError
from asyncrl.ports import Shards, Topology
from asyncrl.protocol.mini_batches import numbered
from asyncrl.protocol.ragged import rows_of
from asyncrl.training.learner import Learner
from asyncrl.training.lora import adapters_off, to_publish
from asyncrl.training.mesh import Mesh, open_mesh
from asyncrl.training.metrics import Metrics
from asyncrl.training.microbatch import Budget
from asyncrl.training.mini_batch import Tally, mini_batch_weights, passes, shares_of
from asyncrl.training.model import build_policy
from asyncrl.training.preparation import ActorRows, Prepared, prepare
from asyncrl.training.publication import Snapshot, gather
from asyncrl.training.scoring import Rows, budget_of, joining_batch, of_all_ranks, score_responses, score_tokens


class Actor:
    """Sync methods; the trainer calls them one at a time in the world's `model` pool.

    mesh: None: this process alone. On many ranks every method is a collective, called with the same arguments. total_updates:
    optimizer steps of the whole run. 0: trainer.total_training_steps x updates a batch.
    Raises ModelError and ConfigError as `build_policy` and `Learner` do.
    """

    def __init__(self, run: TrainRun, mesh: Mesh | None = None, *, total_updates: int = 0) -> None:
        total = total_updates or run.trainer.total_training_steps * run.updates_per_batch
        self._config = run.actor
        self._model = run.model
        self._temperature = run.rollout.temperature
        self._groups_a_mini_batch = run.mini_batch_groups
        mesh = mesh or open_mesh()
        self._scale = run.actor.loss_scale_factor or float(run.data.max_response_length)
        self._loss = chosen_loss(run)
        corrects_here = run.old_log_probs == "bypass" and run.algorithm.rollout_correction.is_on
        self._correction = chosen_correction(run.algorithm) if corrects_here else None
        self._tells_mismatch = run.old_log_probs != "recompute" and not corrects_here  # else the correction tells it
        self._budget = budget_of(run.actor.ppo_max_token_len_per_gpu, run.model, mesh)
        policy = build_policy(run.model, mesh, run.actor.fsdp_config)
        self.learner = Learner(policy, mesh, run.actor.optim, total_updates=total)

    @property
    def updates(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.learner.updates

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because their gradient was not finite."""
        return self.learner.skipped_updates

    def log_probs(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_probs, entropy), ragged float32 on the response axis, 0 where response_mask is 0 and in rows of other ranks. Changes
        nothing."""
        return score_responses(
            self.learner.module,
            columns,
            temperature=self._temperature,
            budget=self._budget,
            mesh=self.learner.mesh,
            shards=shards,
        )

    def log_probs_and_squares(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `log_probs`, and the sum over the vocabulary of squared probabilities at each token. Changes nothing."""
        module = self.learner.module
        forward = partial(module, temperature=self._temperature, with_squares=True)
        log_probs, entropy, squares = score_tokens(
            module, forward, columns, budget=self._budget, mesh=self.learner.mesh, shards=shards, count=3
        )
        return log_probs, entropy, squares

    @property
    def topology(self) -> Topology:
        """How the actor's processes are cut."""
        return self.learner.mesh.topology

    @property
    def num_ranks(self) -> int:
        """Ranks that share a batch: the data-parallel size of the mesh."""
        return self.learner.mesh.dp_size

    def update(
        self,
        columns: TensorDict,
        group_ids: Sequence[str | None],
        session_ids: Sequence[str | None] | None = None,
        *,
        seed: int = 0,
        shards: Shards = (),
    ) -> dict[str, float]:
        """One pass of `ppo_epochs` over the batch, an optimizer step for each mini-batch of groups, in order of first appearance or
        as the shards have them.

        columns: input_ids, position_ids, response_mask, advantages; old_log_probs (absent: the detached new ones); ref_log_prob
        when the KL loss is on; loss_weights and rollout_is_weights of the correction, when there; rollout_log_probs for the
        metrics, when there. group_ids: the uid of each row, None for padding. session_ids: the session of each row, which is one
        sequence in the loss; None: every row is one. seed: of what a loss picks at random.
        Returns metrics under verl's names, means over the mini-batches.
        Raises ConfigError, before anything is computed, for rows above the token budget; NonFiniteGradientError after too many
        skipped updates in a row; and AlgorithmError as ChosenLoss: all of them on every rank.
        """
        batch = _Batch.of(columns, group_ids, session_ids or [str(row) for row in range(len(group_ids))])
        shares = shares_of(shards, group_ids, self._groups_a_mini_batch, self.learner.mesh)
        plans = [batch.plan(ranks, self._budget, self._loss, self.learner.mesh) for ranks in shares]
        steps: list[Metrics] = []
        for plan in plans * self._config.ppo_epochs:
            try:
                steps.append(self._update_mini_batch(batch, plan, is_first=not steps, seed=seed + len(steps)))
            except AlgorithmError as error:
                error.has_learned = bool(steps)
                raise
        return {**Metrics.over_steps(steps), "actor/skipped_updates": float(self.learner.skipped_updates)}

    def _update_mini_batch(self, batch: "_Batch", plan: "_Plan", *, is_first: bool, seed: int) -> Metrics:
        score = partial(self._log_probs_now, batch.rows, plan.micro_batches)
        prepared = prepare(batch.values, plan.chosen, self._loss, self._correction, score, seed=seed)
        weights = mini_batch_weights(
            prepared.kept,
            plan.chosen,
            self._loss.spec.aggregation or self._config.loss_agg_mode,
            sequences_B=batch.values.sessions_B,
            scale=self._scale,
        )
        micro = _MicroBatches(
            batch=batch, prepared=prepared, weights=weights, compares=is_first, tells_mismatch=self._tells_mismatch
        )
        for rows, is_last in passes("update_actor", plan.micro_batches):
            self._accumulate(micro, rows, is_last=is_last)
        tally = micro.tally.over_ranks(self.learner.mesh)
        report = self.learner.step(lambda: tally.suspects(batch.group_ids, plan.chosen))
        for name, value in {**prepared.metrics, "actor/grad_norm": report.grad_norm, "actor/lr": report.lr}.items():
            tally.metrics.add_weighted_mean(name, value, 1.0)  # alike on all ranks
        return tally.metrics

    def _log_probs_now(self, rows: Rows, micro_batches: Sequence[Sequence[int]], chosen: Sequence[int]) -> list[torch.Tensor]:
        """Float32 [R] a row of the batch: log-probs now, 0 outside the mask; empty for rows not in `chosen`. micro_batches: of this
        rank."""
        lengths = [len(rows.mask[row]) for row in chosen]
        flat = torch.zeros(sum(lengths))
        own = dict(zip(chosen, torch.split(flat, lengths), strict=True))
        with torch.no_grad():
            for places, _ in passes("log-probs of a mini-batch", micro_batches):
                if not places:
                    self.learner.module(joining_batch(), self._temperature)
                    continue
                log_prob, _ = self.learner.module(rows.token_batch(places), self._temperature)
                for row, values in zip(places, rows.split(log_prob.float(), places), strict=True):
                    own[row][rows.mask[row]] = values
        found = [torch.empty(0)] * len(rows.mask)
        for row, values in zip(chosen, torch.split(of_all_ranks(flat, self.learner.mesh), lengths), strict=True):
            found[row] = values
        return found

    def _accumulate(self, micro: "_MicroBatches", rows: Sequence[int], *, is_last: bool) -> None:
        """Forward and backward of one micro-batch. Without rows, or after an error, the share of the loss is 0."""
        tokens = micro.batch.rows.token_batch(rows) if rows else joining_batch()
        log_prob, entropy = self.learner.module(tokens, self._temperature, self._config.entropy_coeff > 0)
        share = 0.0 * log_prob.sum()
        if rows and micro.tally.error is None:
            try:
                share = self._share_of_loss(micro, rows, log_prob, entropy)
            except AlgorithmError as error:
                micro.tally.error = error
        self.learner.backward(share, is_last=is_last)

    def _share_of_loss(
        self, micro: "_MicroBatches", rows: Sequence[int], log_prob: torch.Tensor, entropy: torch.Tensor
    ) -> torch.Tensor:
        """Rejected tokens have weight 0, and are not shown to the policy loss."""
        config, values, tally, pick = self._config, micro.batch.values, micro.tally, micro.batch.rows.on_policy_tokens
        weight = pick(micro.weights, rows)
        kept = pick(micro.prepared.kept, rows)
        policy_loss = self._loss(micro.loss_inputs(rows, log_prob, kept))
        pg_loss = torch.zeros_like(log_prob).masked_scatter(kept, policy_loss.loss_n) if not kept.all() else policy_loss.loss_n
        terms = {"actor/pg_loss": pg_loss}
        loss = pg_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            terms["actor/kl_loss"] = kl_penalty(log_prob, pick(values.reference, rows), config.kl_loss_type)
            loss = loss + config.kl_loss_coef * terms["actor/kl_loss"]
        terms |= {"actor/entropy_loss": entropy, "actor/loss": loss}
        for name, numbers in terms.items():
            tally.metrics.add_sum(name, (numbers.detach() * weight).sum())
        tally.metrics.add_mean("actor/entropy", entropy.detach())
        for name, facts in policy_loss.facts.items():
            tally.metrics.add_mean(f"actor/{name}", facts)
        micro.compare(rows, log_prob.detach())
        tally.note_broken(loss.detach(), values.mask, rows)
        return (loss * weight).sum()

    def snapshot(self, version: int, into: Mapping[str, torch.Tensor] | None = None) -> Snapshot:
        """Copies of what `engine.publish` needs, by Hugging Face name: all weights, or the adapters. into: as of `gather`."""
        parameters = self.learner.parameters
        published = to_publish(list(parameters), self._model)
        return Snapshot(version=version, tensors=gather(published, parameters, self.learner.mesh, into=into))


class Reference:
    """The frozen model at `model.path`: log-probs for a KL term. It has no optimizer and never changes.

    actor: of a run with adapters. With them off its policy is the reference, so no second model is loaded.
    """

    def __init__(self, run: TrainRun, mesh: Mesh | None = None, *, actor: Actor | None = None) -> None:
        self._mesh = mesh or open_mesh()
        self._budget = budget_of(run.actor.ppo_max_token_len_per_gpu, run.model, self._mesh)
        self._temperature = run.rollout.temperature
        self._is_shared = actor is not None
        if actor is not None:
            self._policy = actor.learner.module
            return
        self._policy = build_policy(run.model, self._mesh, run.actor.fsdp_config)
        self._policy.requires_grad_(False)

    def log_probs(self, columns: TensorDict, shards: Shards = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Actor.log_probs`."""
        with adapters_off(self._policy) if self._is_shared else nullcontext():
            return score_responses(
                self._policy, columns, temperature=self._temperature, budget=self._budget, mesh=self._mesh, shards=shards
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch, a tensor a row."""

    group_ids: Sequence[str | None]
    rows: Rows
    values: ActorRows
    places: list[int]
    """Of each row in an order that only the sessions' names decide, so that it is the same whatever rank has which rows."""

    @classmethod
    def of(cls, columns: TensorDict, group_ids: Sequence[str | None], session_ids: Sequence[str | None]) -> Self:
        names = set(columns.keys())
        rows = Rows.of(columns)

        def column(name: str) -> list[torch.Tensor]:
            return rows_of(columns[name]) if name in names else []

        kept = rows.mask
        if loss_weights := column("loss_weights"):
            kept = [mask & (weight > 0) for mask, weight in zip(rows.mask, loss_weights, strict=True)]
        values = ActorRows(
            mask=rows.mask,
            kept=kept,
            advantages=column("advantages"),
            sessions_B=numbered(session_ids),
            old=column("old_log_probs"),
            reference=column("ref_log_prob"),
            rollout=column("rollout_log_probs"),
            is_weights=column("rollout_is_weights"),
        )
        in_order = sorted(range(len(group_ids)), key=lambda row: session_ids[row] or "")  # rows of a session stay in batch order
        places = [0] * len(group_ids)
        for place, row in enumerate(in_order):
            places[row] = place
        return cls(group_ids=group_ids, rows=rows, values=values, places=places)

    def plan(self, ranks: Sequence[Sequence[int]], budget: Budget, loss: ChosenLoss, mesh: Mesh) -> "_Plan":
        """ranks: rows of each in the mini-batch. Raises ConfigError as `Rows.micro_batches`."""
        together = self.values.sessions_B.tolist() if loss.spec.is_sequence_level else ()
        return _Plan(
            chosen=sorted((row for rows in ranks for row in rows), key=self.places.__getitem__),
            micro_batches=self.rows.micro_batches(ranks, budget, together=together)[mesh.dp_rank],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A mini-batch. chosen: its rows, those of all ranks; micro_batches: of this rank, as many as every rank has, some empty."""

    chosen: list[int]
    micro_batches: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatches:
    """What the micro-batches of one mini-batch share, and add to. compares: note how far the policy is from the engine."""

    batch: _Batch
    prepared: Prepared
    weights: list[torch.Tensor]
    compares: bool
    """With the engine: as long as the weights are those that sampled, or were."""
    tells_mismatch: bool
    tally: Tally = field(default_factory=Tally)

    def loss_inputs(self, rows: Sequence[int], log_prob: torch.Tensor, kept: torch.Tensor) -> LossInputs:
        """The tokens of the micro-batch that count. log_prob, kept: [n] at the policy tokens of `rows`."""
        values, pick = self.batch.values, self.batch.rows.on_policy_tokens
        counts = torch.tensor([int(values.mask[row].sum()) for row in rows])

        def chosen(column: list[torch.Tensor]) -> torch.Tensor:
            return pick(column, rows)[kept]

        log_prob = log_prob[kept]
        return LossInputs(
            log_prob_n=log_prob,
            old_log_prob_n=chosen(values.old) if values.old else log_prob.detach(),
            advantages_n=chosen(values.advantages),
            rows_n=values.sessions_B[list(rows)].repeat_interleave(counts)[kept],
            is_weights_n=chosen(self.prepared.is_weights) if self.prepared.is_weights else None,
            selected_n=chosen(self.prepared.selected) if self.prepared.selected else None,
        )

    def compare(self, rows: Sequence[int], log_prob: torch.Tensor) -> None:
        """Note the gap between the policy, not yet updated, and the engine that sampled: of probabilities, and as KL(engine ||
        trainer) a token in nats, by k1 and k3."""
        rollout, metrics = self.batch.values.rollout, self.tally.metrics
        if not (self.compares and rollout):
            return
        engine = self.batch.rows.on_policy_tokens(rollout, rows)
        apart = (log_prob.exp() - engine.exp()).abs()
        metrics.add_max("training/rollout_probs_diff_max", apart)
        metrics.add_mean("training/rollout_probs_diff_mean", apart)
        metrics.add_std("training/rollout_probs_diff_std", apart)
        if self.tells_mismatch:
            gap = log_prob.double() - engine.double()
            metrics.add_mean("rollout_corr/kl", -gap)
            metrics.add_mean("rollout_corr/k3_kl", gap.exp() - 1 - gap)
