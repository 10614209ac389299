"""Every policy loss through the model: the split into micro-batches, sessions of several rows, and rejected tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import TrainRun
from asyncrl.config.algorithms import LOSSES
from asyncrl.ports import Json
from asyncrl.protocol.ragged import from_values, ragged
from asyncrl.training.actor import Actor

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 2)]
GROUPS = ["a", "a", "b", "b", "c", "c", "d", "d"]
SESSIONS = ["a_0", "a_1", "b_0", "b_0", "c_0", "c_1", "d_0", "d_0"]
"""Two sessions have two rows."""
OPTIONS: dict[str, dict[str, float]] = {
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -5.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]
Rig = Callable[..., dict[str, float]]


@pytest.fixture
def update(make_model: MakeModel, make_run: MakeRun) -> Rig:
    """update(columns, loss, **[actor] keys) -> metrics of one update of a fresh actor, the gradient's norm among them."""
    folder = make_model()

    def run(
        columns: TensorDict, loss: str = "vanilla", algorithm: dict[str, Json] | None = None, **actor: Json
    ) -> dict[str, float]:
        keys = {"loss_mode": loss, "loss_options": OPTIONS.get(loss, {}), "optim": {"lr": 0.01, "clip_grad": 1e9}, **actor}
        made = make_run(folder, actor={name: value for name, value in keys.items() if value != {}}, algorithm=algorithm or {})
        return Actor(made).update(columns, GROUPS, SESSIONS, seed=3)

    return run


@pytest.fixture
def columns(make_columns: MakeColumns) -> TensorDict:
    """With old log-probs some way off, and importance weights."""
    made = make_columns(LENGTHS)
    offsets, mask = made["response_mask"].offsets(), made["response_mask"].values()
    generator = torch.Generator().manual_seed(1)
    made["old_log_probs"] = from_values((-3 + torch.rand(len(mask), generator=generator)) * mask, offsets)
    made["rollout_is_weights"] = from_values((0.5 + torch.rand(len(mask), generator=generator)) * mask, offsets)
    return made


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_depends_on_the_micro_batches(update: Rig, columns: TensorDict, loss: str) -> None:
    whole = update(columns, loss)
    assert whole["actor/grad_norm"] > 1e-4
    for max_tokens in (36, 50):
        parts = update(columns, loss, ppo_max_token_len_per_gpu=max_tokens)
        assert parts == pytest.approx(whole, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_session_is_one_sequence(update: Rig, columns: TensorDict, mode: str) -> None:
    """By hand: with one update the ratio is 1, so the loss is the weighted sum of -A."""
    data = columns.exclude("old_log_probs", "rollout_is_weights")
    got = update(data, loss_agg_mode=mode)["actor/pg_loss"]
    numbers = {name: place for place, name in enumerate(dict.fromkeys(SESSIONS))}
    of_row = torch.tensor([numbers[name] for name in SESSIONS])
    masks, advantages = data["response_mask"].unbind(), data["advantages"].unbind()
    tokens = torch.tensor([float(mask.sum()) for mask in masks])
    session_tokens = torch.zeros(len(numbers)).index_add(0, of_row, tokens)
    num_sessions = float((session_tokens > 0).sum())
    share = {
        "token-mean": torch.full_like(tokens, 1 / float(tokens.sum())),
        "token-sum": torch.ones_like(tokens),
        "seq-mean-token-sum": torch.full_like(tokens, 1 / num_sessions),
        "seq-mean-token-mean": 1 / session_tokens[of_row] / num_sessions,
        "seq-mean-token-sum-norm": torch.full_like(tokens, 1 / num_sessions / 12),
    }[mode]
    want = -sum(float((advantage * mask).sum() * part) for advantage, mask, part in zip(advantages, masks, share, strict=True))
    assert got == pytest.approx(want, rel=1e-5)


def test_importance_weights_multiply_the_loss_and_change_no_denominator(update: Rig, columns: TensorDict) -> None:
    """By hand: with one update the ratio is 1, so the loss is the mean of -A w."""
    data = columns.exclude("old_log_probs")
    mask = data["response_mask"].values()
    want = -(data["advantages"].values() * data["rollout_is_weights"].values())[mask].mean()
    assert update(data)["actor/pg_loss"] == pytest.approx(float(want), rel=1e-5)
    assert update(data)["actor/grad_norm"] != pytest.approx(update(data.exclude("rollout_is_weights"))["actor/grad_norm"], rel=1e-3)


def test_rejected_tokens_are_in_no_numerator_and_no_denominator(update: Rig, columns: TensorDict) -> None:
    mask = columns["response_mask"]
    kept = mask.values() & (torch.rand(len(mask.values()), generator=torch.Generator().manual_seed(5)) < 0.6)
    rejected, shorter = columns.clone(), columns.clone()
    rejected["loss_weights"] = from_values(kept.float(), mask.offsets())
    shorter["response_mask"] = from_values(kept, mask.offsets())
    for loss in ("vanilla", "gspo", "geo_mean", "kl_cov"):
        got, want = update(rejected, loss), update(shorter, loss)
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-7), (loss, name)
    assert update(rejected)["actor/pg_loss"] != pytest.approx(update(columns)["actor/pg_loss"], rel=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_is_rejected_whole_changes_nothing(update: Rig, columns: TensorDict, loss: str) -> None:
    mask = columns["response_mask"]
    columns["loss_weights"] = from_values(torch.zeros(len(mask.values())), mask.offsets())
    metrics = update(columns, loss)
    assert (metrics["actor/pg_loss"], metrics["actor/grad_norm"], metrics["actor/skipped_updates"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("loss", [*LOSSES, "bypass"])
def test_padding_rows_are_in_no_loss(make_model: MakeModel, make_run: MakeRun, columns: TensorDict, loss: str) -> None:
    """Not in what a loss picks, nor in what the correction takes for its means; here with tokens that are rejected."""
    mask = columns["response_mask"]
    columns["loss_weights"] = from_values((torch.rand(len(mask.values())) < 0.9).float(), mask.offsets())
    actor: dict[str, Json] = {"ppo_mini_batch_size": 2, "loss_mode": loss}
    if loss in OPTIONS:
        actor["loss_options"] = OPTIONS[loss]
    bypass = {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True}
    rejects = {"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.1_1.5"]}
    corrects: dict[str, Json] = {"old_log_probs": "bypass", "rollout_correction": {**bypass, **rejects}}
    run = make_run(make_model(), **({"algorithm": corrects} if loss == "bypass" else {"actor": actor}))
    names = sorted(map(str, columns.keys()))
    rows = {name: list(columns[name].unbind()) for name in names}
    groups, sessions = list[str | None](GROUPS), list[str | None](SESSIONS)
    for place in (8, 3, 3, 0):
        groups.insert(place, None)
        sessions.insert(place, None)
        for column in rows.values():
            column.insert(place, torch.zeros(1, dtype=column[0].dtype))
    wide = TensorDict({name: ragged(column) for name, column in rows.items()}, batch_size=[len(groups)])
    want = Actor(run).update(columns, GROUPS, SESSIONS, seed=3)
    assert Actor(run).update(wide, groups, sessions, seed=3) == want
    assert 0 < want.get("rollout_corr/rollout_rs_masked_fraction", 0.5) < 1


def test_with_the_engines_log_probs_rejection_is_by_the_policy_now(update: Rig, columns: TensorDict) -> None:
    """The clipped loss on what is left: as if the rejected tokens had been rejected before."""
    data = columns.exclude("rollout_is_weights")
    algorithm = {
        "old_log_probs": "bypass",
        "rollout_correction": {"rollout_rs": ["token_k2"], "rollout_rs_threshold": [0.5]},
    }
    got = update(data, algorithm=algorithm)
    assert 0 < got["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert got["actor/pg_loss"] != pytest.approx(update(data)["actor/pg_loss"], rel=1e-3)
    for max_tokens in (36, 50):
        assert update(data, algorithm=algorithm, ppo_max_token_len_per_gpu=max_tokens) == pytest.approx(got, rel=2e-4, abs=2e-6)


def test_reinforce_against_the_engine_weighs_by_the_policy_now(
    make_model: MakeModel, make_run: MakeRun, columns: TensorDict
) -> None:
    """-A log p w, w = min(p / engine, 2), against the policy's own log-probs."""
    algorithm = {"old_log_probs": "bypass", "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}}
    actor = Actor(make_run(make_model(), algorithm=algorithm))
    now, _ = actor.log_probs(columns)
    mask = columns["response_mask"].values()
    weight = (now.values() - columns["old_log_probs"].values()).exp().clamp(max=2.0)
    want = -(columns["advantages"].values() * now.values() * weight)[mask].mean()
    assert actor.update(columns, GROUPS, SESSIONS)["actor/pg_loss"] == pytest.approx(float(want), rel=1e-4)


def test_what_a_loss_picks_at_random_is_given_by_the_seed(make_model: MakeModel, make_run: MakeRun, columns: TensorDict) -> None:
    actor = {"loss_mode": "clip_cov", "loss_options": {**OPTIONS["clip_cov"], "clip_cov_ratio": 0.1}}
    run = make_run(make_model(), actor=actor)

    def loss(seed: int) -> float:
        return Actor(run).update(columns, GROUPS, SESSIONS, seed=seed)["actor/pg_loss"]

    losses = [loss(seed) for seed in range(4)]
    assert [loss(seed) for seed in range(4)] == losses
    assert len(set(losses)) > 1
