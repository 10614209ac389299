"""The update in real processes: two ranks and one leave the same weights and numbers, for every kind of loss; errors are alike.

Weights are float64: what is compared is the arithmetic, not its rounding. The columns, float32, are given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from tensordict import TensorDict

from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.registry import LossSpec
from asyncrl.algorithms.losses.vanilla import vanilla
from asyncrl.chosen import ChosenLoss
from asyncrl.cluster import Rank
from asyncrl.config import TrainRun
from asyncrl.errors import AsyncRLError
from asyncrl.ports import Json, Shards, Topology
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of, values_of
from asyncrl.stages.balance import balance
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.critic import Critic
from asyncrl.training.mesh import full_copy, open_mesh

if TYPE_CHECKING:
    from asyncrl.training.learner import Learner

pytestmark = pytest.mark.ranks

LR = 0.01
TWO = Topology(world=2)
LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 2), (4, 0)]
KEYS = ("a_0_0", "a_1_0", "b_0_0", "b_0_1", "c_0_0", "c_1_0", "d_0_0", "d_0_1", "d_1_0")
"""Two sessions have two rows; one row has no policy token."""

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]
RunOnRanks = Callable[..., list[Any]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What each rank is given: plain data. rows: column -> a tensor a row."""

    run: TrainRun
    rows: dict[str, list[torch.Tensor]]
    batch: KVBatchMeta
    shards: Shards = ()
    kind: str = "actor"
    topology: Topology = field(default_factory=Topology)
    refuses: tuple[int, int] | None = None
    """The rank on which the user's loss raises, and in which of its calls."""

    @property
    def columns(self) -> TensorDict:
        return TensorDict({name: ragged(rows) for name, rows in self.rows.items()}, batch_size=[len(self.batch)])

    def on(self, topology: Topology) -> "Task":
        """The same batch in the order of the ranks."""
        dispatch = balance(self.batch, topology.dp, groups_each=self.run.mini_batch_groups)
        dispatch.check()
        order = [self.batch.keys.index(key) for key in dispatch.batch.keys]
        rows = {name: [column[row] for row in order] for name, column in self.rows.items()}
        return replace(self, rows=rows, batch=dispatch.batch, shards=dispatch.row_shards, topology=topology)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    scores: list[dict[str, torch.Tensor]]
    """By key, of each number; before the update."""
    updates: int


def learned(task: Task) -> Outcome:
    """Scores, update and weights of one rank (in this process: of the only one)."""
    mesh = open_mesh(task.topology)
    groups, sessions, columns = task.batch.groups, task.batch.sessions, task.columns
    if task.kind == "critic":
        critic = Critic(task.run, mesh)
        found: Sequence[torch.Tensor] = (critic.values(columns, task.shards),)
        metrics, learner = critic.update(columns, groups, task.shards), cast("Learner[Any]", critic.learner)
    else:
        actor = Actor(task.run, mesh)
        squares = actor.log_probs_and_squares(columns, task.shards)
        found = (*squares, *Reference(task.run, mesh).log_probs(columns, task.shards))
        metrics, learner = actor.update(columns, groups, sessions, seed=3, shards=task.shards), actor.learner
    scores = [dict(zip(task.batch.keys, rows_of(column), strict=True)) for column in found]
    weights = {name: full_copy(tensor) for name, tensor in learner.parameters.items()}
    return Outcome(metrics=metrics, weights=weights, scores=scores, updates=learner.updates)


def learn_on_rank(rank: Rank, task: dict[str, Any]) -> dict[str, Any]:
    """Plain data in and out: a rank knows this file by another name."""
    return vars(learned(Task(**task)))


def learned_on_ranks(run_on_ranks: RunOnRanks, task: Task) -> list[Outcome]:
    return [Outcome(**found) for found in run_on_ranks(task.topology.world, learn_on_rank, vars(task))]


@pytest.fixture
def task(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> Callable[..., Task]:
    """task(**sections) -> of one rank. The policy has moved a little from the old log-probs, and they from the engine's."""
    folder = make_model(num_key_value_heads=2)

    def make(kind: str = "actor", keys: Sequence[str] = KEYS, **sections: dict[str, Json]) -> Task:
        actor = {"ppo_max_token_len_per_gpu": 40, **sections.pop("actor", {})}
        actor["optim"] = {"lr": LR, **actor.get("optim", {})}
        run = make_run(folder, actor=actor, model={"dtype": "float64"}, **sections)
        columns = make_columns([LENGTHS[KEYS.index(key)] for key in keys])
        now = Actor(run).log_probs(columns)[0]
        generator = torch.Generator().manual_seed(4)
        mask = values_of(columns["response_mask"])
        rows = {name: rows_of(columns[name]) for name in map(str, columns.keys())}
        lengths = [len(row) for row in rows["response_mask"]]

        def near(values: torch.Tensor, distance: float) -> list[torch.Tensor]:
            noise = distance * torch.randn(len(mask), generator=generator)
            return list(torch.split((values + noise).clamp(max=0) * mask, lengths))

        old = near(values_of(now), 0.2)
        rows |= {"old_log_probs": old, "rollout_log_probs": near(torch.cat(old), 0.1), "ref_log_prob": near(values_of(now), 0.3)}
        rows |= {"values": near(-torch.ones(len(mask)), 0.5), "returns": near(-torch.ones(len(mask)), 0.5)}
        tags = tuple({"seq_len": len(ids)} for ids in rows["input_ids"])
        return Task(run=run, rows=rows, batch=KVBatchMeta(partition_id="train", keys=tuple(keys), tags=tags), kind=kind)

    return make


REJECTS = {"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.8_1.2"]}
NORMALISED = {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {"actor": {"ppo_epochs": 2, "ppo_mini_batch_size": 2, "entropy_coeff": 0.01, "use_kl_loss": True}},
    "one row at most on a rank": {"actor": {"ppo_mini_batch_size": 1, "loss_agg_mode": "seq-mean-token-mean"}},
    "gspo": {"actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}},
    "clip_cov": {
        "actor": {
            "ppo_mini_batch_size": 2,
            "loss_mode": "clip_cov",
            "loss_options": {"clip_cov_ratio": 0.1, "clip_cov_lb": -5.0},
        }
    },
    "kl_cov": {"actor": {"ppo_mini_batch_size": 2, "loss_mode": "kl_cov", "loss_options": {"kl_cov_ratio": 0.2}}},
    "bypass": {
        "actor": {"ppo_mini_batch_size": 2},
        "algorithm": {"old_log_probs": "bypass", "rollout_correction": {**NORMALISED, **REJECTS}},
    },
    "critic": {"kind": "critic", "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2}, "algorithm": {"adv_estimator": "gae"}},
}


def assert_same(found: Outcome, alone: Outcome) -> None:
    assert found.metrics == pytest.approx(alone.metrics, rel=1e-6, abs=1e-9)
    assert found.updates == alone.updates
    for name, weight in alone.weights.items():
        assert float((found.weights[name] - weight).abs().max()) <= 1e-6 * LR, name


def assert_scores_add_up(found: list[Outcome], alone: Outcome) -> None:
    """Each rank has its own rows, and 0 elsewhere."""
    for number, scores in enumerate(alone.scores):
        for key, values in scores.items():
            parts = [outcome.scores[number][key] for outcome in found]
            assert sum(bool(part.any()) for part in parts) <= 1
            torch.testing.assert_close(torch.stack(parts).sum(0), values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_does(run_on_ranks: RunOnRanks, task: Callable[..., Task], case: str) -> None:
    one = task(**CASES[case])
    alone = learned(one)
    found = learned_on_ranks(run_on_ranks, one.on(TWO))
    assert found[1].metrics == found[0].metrics
    for outcome in found:
        assert_same(outcome, alone)
    assert_scores_add_up(found, alone)
    prefix = "critic" if one.kind == "critic" else "actor"
    assert alone.metrics[f"{prefix}/grad_norm"] > 1e-3
    if case == "bypass":
        assert 0 < alone.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    if case in ("clip_cov", "vanilla"):
        assert 0 < alone.metrics["actor/pg_clipfrac"] < 1


@pytest.mark.parametrize(
    ("topology", "keys"),
    [
        (TWO, KEYS[2:4]),
        (Topology(world=4), (*KEYS[:2], KEYS[8])),
        (Topology(world=4, fsdp_size=2), KEYS[:3]),
        (Topology(world=4, sp=2), KEYS[2:4]),
        (Topology(world=4, tp=2), KEYS[2:4]),
    ],
)
def test_ranks_without_a_session_join(
    run_on_ranks: RunOnRanks, task: Callable[..., Task], topology: Topology, keys: Sequence[str]
) -> None:
    one = task(keys=keys, **CASES["vanilla"])
    alone = learned(one)
    found = learned_on_ranks(run_on_ranks, one.on(topology))
    assert all(outcome.metrics == found[0].metrics for outcome in found)
    for outcome in found:
        assert_same(outcome, alone)
    assert_scores_add_up(found[:: topology.world // topology.dp], alone)  # ranks that share rows have the same


def test_a_rank_of_one_session_joins_where_another_has_more_micro_batches(
    run_on_ranks: RunOnRanks, task: Callable[..., Task]
) -> None:
    """By hand: all but one session on rank 1, and a budget of one or two rows a pass."""
    one = task(actor={"ppo_max_token_len_per_gpu": 20})
    rows = [row for row in range(len(KEYS)) if row != 4]
    two = replace(one, shards=(((4,),), (tuple(rows),)), topology=TWO)
    alone = learned(one)
    for outcome in learned_on_ranks(run_on_ranks, two):
        assert_same(outcome, alone)


# --- errors -----------------------------------------------------------------------------------------------------------------------


def weights_of(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: full_copy(tensor) for name, tensor in actor.learner.parameters.items()}


def raised_on_rank(rank: Rank, given: dict[str, Any]) -> tuple[str, str, bool]:
    """(type, text, have weights changed) of the error of the update; then the ranks do something that needs all of them."""
    task = Task(**given)
    actor, calls = Actor(task.run, open_mesh(task.topology)), list[int]()

    def loss(inputs: LossInputs) -> PolicyLoss:
        calls.append(1)
        if task.refuses is not None and rank.rank == task.refuses[0] and len(calls) == task.refuses[1]:
            raise ZeroDivisionError("no loss here")
        return vanilla(inputs)

    actor._loss = ChosenLoss(spec=LossSpec(function=loss), options={}, name="mine:loss")
    before = weights_of(actor)
    with pytest.raises(AsyncRLError) as caught:
        actor.update(task.columns, task.batch.groups, task.batch.sessions, shards=task.shards)
    after = weights_of(actor)
    learned = any(not torch.equal(after[name], before[name]) for name in before)
    assert getattr(caught.value, "has_learned", learned) == learned
    return type(caught.value).__name__, str(caught.value), learned


@pytest.mark.parametrize(("call", "has_learned"), [(1, False), (3, True)])
def test_a_loss_that_raises_on_one_rank_is_raised_by_both_and_both_go_on(
    run_on_ranks: RunOnRanks, task: Callable[..., Task], call: int, has_learned: bool
) -> None:
    """A checkpoint of what was learned before can still be written: no rank waits for one that has left."""
    one = task(actor={"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 20})
    found = run_on_ranks(2, raised_on_rank, vars(replace(one.on(TWO), refuses=(1, call))))
    kind, text, learned = found[0]
    assert (kind, learned) == ("AlgorithmError", has_learned)
    assert text.startswith("loss 'mine:loss' raised ZeroDivisionError: no loss here")
    assert found[1] == found[0]


def test_a_row_that_is_not_finite_is_named_alike(run_on_ranks: RunOnRanks, task: Callable[..., Task]) -> None:
    one = task(actor={"optim": {"max_nonfinite_in_a_row": 1}})
    one.rows["advantages"][1] = one.rows["advantages"][1] + torch.nan
    two = one.on(TWO)
    row = two.batch.keys.index(KEYS[1])
    ((kind, text, learned), other) = run_on_ranks(2, raised_on_rank, vars(two))
    assert (kind, learned) == ("NonFiniteGradientError", False)
    assert text.endswith(f"loss not finite in a (row {row})")
    assert other == (kind, text, learned)


def test_rows_above_the_budget_are_told_alike_before_anything_is_computed(
    run_on_ranks: RunOnRanks, task: Callable[..., Task]
) -> None:
    one = task(actor={"ppo_max_token_len_per_gpu": 20})
    for name in ("input_ids", "position_ids"):
        one.rows[name][6] = torch.arange(27)
    for row in ("response_mask", "advantages"):
        one.rows[row][6] = torch.ones(22, dtype=one.rows[row][6].dtype)
    two = one.on(TWO)
    found = run_on_ranks(2, raised_on_rank, vars(two))
    place = two.batch.keys.index(KEYS[6])
    assert found[0] == found[1]
    assert found[0][:1] == ("ConfigError",)
    assert found[0][1].startswith(f"row {place} has 27 tokens")
