"""The update: invariance to micro-batches, elision, mini-batches, clipping to finite gradients, snapshots."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import TrainRun
from asyncrl.errors import ConfigError, NonFiniteGradientError
from asyncrl.protocol.ragged import from_values
from asyncrl.training.actor import Actor, Reference

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 1)]
UIDS = ["a", "a", "b", "b", "c", "c", "d", "d"]

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]


def _weights(actor: Actor) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in actor.snapshot(0).tensors.values()])


def _spoil(columns: TensorDict, name: str, value: float) -> TensorDict:
    """The columns with one number of row 2's `name` replaced."""
    spoiled = columns.clone()
    column = columns[name]
    values = column.values().clone()
    first = int(column.offsets()[2])
    place = first + int(columns["response_mask"].values()[first:].nonzero()[0])
    values[place] = value
    spoiled[name] = from_values(values, column.offsets())
    return spoiled


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_update_does_not_depend_on_the_micro_batches(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, mode: str
) -> None:
    folder, columns = make_model(), make_columns(LENGTHS)
    options = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    results = []
    for max_tokens in (20, 30, 10_000):
        run = make_run(folder, actor={**options, "ppo_max_token_len_per_gpu": max_tokens, "optim": {"lr": 0.01}})
        actor = Actor(run)
        columns["ref_log_prob"] = Reference(run).log_probs(columns)[0] * 0.9
        metrics = actor.update(columns, UIDS)
        results.append((metrics, _weights(actor)))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=2e-5)
        # Adam turns a rounding error of a gradient near 0 into a step of its own size, hence the loose bound for few weights.
        assert float(((weights - results[0][1]).abs() > 1e-4).float().mean()) < 0.01


def test_the_gradient_step_is_the_reference_implementation_on_one_row_at_a_time(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    """pg_loss and gradient norm against plain autograd over the library's model."""
    from transformers import AutoModelForCausalLM

    folder, columns = make_model(tied=False), make_columns(LENGTHS)
    run = make_run(folder, actor={"optim": {"lr": 0.01, "clip_grad": 1e9}})
    metrics = Actor(run).update(columns, UIDS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    names = ("input_ids", "response_mask", "advantages")
    for ids, mask, advantages in zip(*(columns[name].unbind() for name in names), strict=True):
        log_softmax = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        log_probs = log_softmax.gather(1, ids[1:, None])[-len(mask) :, 0]
        total = total - (advantages * mask * log_probs).sum() / columns["response_mask"].values().sum()
    torch.autograd.backward(total)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    mean_advantage = (columns["advantages"].values() * columns["response_mask"].values()).sum() / columns[
        "response_mask"
    ].values().sum()
    assert metrics["actor/pg_loss"] == pytest.approx(-float(mean_advantage), abs=1e-6)


def test_elided_old_log_probs_equal_recomputed_ones(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> None:
    run, columns = make_run(make_model()), make_columns(LENGTHS)
    elided, recomputed = Actor(run), Actor(run)
    first = elided.update(columns, UIDS)
    columns["old_log_probs"] = recomputed.log_probs(columns)[0]
    second = recomputed.update(columns, UIDS)
    assert first["actor/pg_loss"] == pytest.approx(second["actor/pg_loss"], abs=1e-6)
    torch.testing.assert_close(_weights(elided), _weights(recomputed), atol=1e-5, rtol=0)


def test_learning_raises_the_log_prob_of_what_was_good(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> None:
    actor, columns = Actor(make_run(make_model())), make_columns(LENGTHS)
    signed = columns["advantages"].values()
    before = actor.log_probs(columns)[0].values()
    for _ in range(5):
        actor.update(columns, UIDS)
    gain = actor.log_probs(columns)[0].values() - before
    assert float((gain * signed).sum()) > 0


def test_optimizer_steps_are_groups_over_mini_batch_times_epochs(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    actor = Actor(make_run(make_model(), actor={"ppo_mini_batch_size": 2, "ppo_epochs": 3}))
    columns = make_columns(LENGTHS)
    columns["old_log_probs"] = actor.log_probs(columns)[0]
    metrics = actor.update(columns, UIDS)
    assert actor.updates == 6
    assert metrics["actor/ppo_kl"] != 0.0


def test_drift_to_the_rollout_is_measured_before_the_weights_move(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    actor = Actor(make_run(make_model(), actor={"ppo_mini_batch_size": 2}))
    columns = make_columns(LENGTHS)
    columns["old_log_probs"] = columns["rollout_log_probs"] = actor.log_probs(columns)[0]
    assert actor.update(columns, UIDS)["training/rollout_probs_diff_max"] < 1e-6
    assert actor.update(columns, UIDS)["training/rollout_probs_diff_max"] > 1e-6


@pytest.mark.parametrize(("name", "value"), [("advantages", float("nan")), ("old_log_probs", float("nan"))])
def test_a_gradient_that_is_not_finite_changes_nothing_and_names_the_row(
    make_model: MakeModel,
    make_run: MakeRun,
    make_columns: MakeColumns,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: float,
) -> None:
    actor, columns = Actor(make_run(make_model())), make_columns(LENGTHS)
    columns["old_log_probs"] = actor.log_probs(columns)[0]
    before = _weights(actor)
    metrics = actor.update(_spoil(columns, name, value), UIDS)
    assert torch.equal(_weights(actor), before)
    assert metrics["actor/skipped_updates"] == 1.0
    assert "b (row 2)" in caplog.text
    actor.update(columns, UIDS)
    assert not torch.equal(_weights(actor), before)
    assert (actor.updates, actor.skipped_updates) == (2, 1)


def test_too_many_skipped_updates_in_a_row_end_the_run(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> None:
    actor = Actor(make_run(make_model(), actor={"optim": {"lr": 0.01, "max_nonfinite_in_a_row": 2}}))
    columns = make_columns(LENGTHS)
    broken = _spoil(columns, "advantages", float("inf"))
    actor.update(broken, UIDS)
    actor.update(columns, UIDS)  # a good one in between starts the count again
    actor.update(broken, UIDS)
    with pytest.raises(NonFiniteGradientError, match=r"2 updates in a row.*b \(row 2\)"):
        actor.update(broken, UIDS)


def test_a_snapshot_is_a_copy_that_training_does_not_change(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    actor = Actor(make_run(make_model()))
    snapshot = actor.snapshot(7)
    copies = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    actor.update(make_columns(LENGTHS), UIDS)
    assert snapshot.version == 7
    for name, tensor in snapshot.tensors.items():
        assert torch.equal(tensor, copies[name])
    assert any(not torch.equal(tensor, copies[name]) for name, tensor in actor.snapshot(8).tensors.items())


@pytest.mark.parametrize("tied", [True, False])
def test_snapshot_names_are_hugging_faces(make_model: MakeModel, make_run: MakeRun, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model("qwen3", tied=tied)
    names = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    tensors = Actor(make_run(folder)).snapshot(0).tensors
    assert set(tensors) == set(names)
    assert all(torch.equal(tensor, names[name]) for name, tensor in tensors.items())


def test_rows_without_policy_tokens_are_passed_over(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> None:
    actor = Actor(make_run(make_model()))
    metrics = actor.update(make_columns([(3, 4), (4, 0)]), ["a", "b"])
    assert metrics["actor/grad_norm"] > 0
    log_probs, _ = actor.log_probs(make_columns([(4, 0), (2, 3)]))
    assert torch.isfinite(log_probs.values()).all()


@pytest.mark.parametrize("lengths", [[(3, 0), (3, 9)], [(3, 9), (3, 0)]])
def test_a_mini_batch_without_policy_tokens_takes_no_metric_along(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, lengths: list[tuple[int, int]]
) -> None:
    columns, folder = make_columns(lengths), make_model()
    together = Actor(make_run(folder)).update(columns, ["a", "b"])
    actor = Actor(make_run(folder, actor={"ppo_mini_batch_size": 1}))
    metrics = actor.update(columns, ["a", "b"])
    assert actor.updates == 2
    assert {name for name in together if name.startswith("actor/")} <= metrics.keys()
    assert metrics["actor/entropy"] == pytest.approx(together["actor/entropy"], rel=1e-5)


def test_a_batch_without_any_policy_token_updates_nothing(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    actor = Actor(make_run(make_model()))
    before = _weights(actor)
    metrics = actor.update(make_columns([(3, 0), (4, 0)]), ["a", "b"])
    assert metrics["actor/grad_norm"] == 0.0
    assert torch.equal(_weights(actor), before)


def test_a_falling_schedule_needs_its_end(make_model: MakeModel, make_run: MakeRun) -> None:
    optim = {"optim": {"lr": 0.01, "lr_scheduler_type": "cosine"}}
    run = make_run(make_model(), actor=optim, trainer={"total_training_steps": 0})
    with pytest.raises(ConfigError, match="needs the number"):
        Actor(run)
    assert Actor(run, total_updates=5).updates == 0


def test_the_reference_never_changes_and_has_no_gradient(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    run, columns = make_run(make_model()), make_columns(LENGTHS)
    reference, actor = Reference(run), Actor(run)
    before = reference.log_probs(columns)[0].values()
    actor.update(columns, UIDS)
    assert torch.equal(reference.log_probs(columns)[0].values(), before)
    assert not before.requires_grad


def test_the_actor_may_live_in_another_thread_than_the_one_that_made_it(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    """The trainer makes it in one thread and calls it in the world's model pool."""
    run, columns = make_run(make_model()), make_columns(LENGTHS)
    here, there = Actor(run), Actor(run)
    here.update(columns, UIDS)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(there.update, columns, UIDS).result()
        snapshot = pool.submit(there.snapshot, 1).result()
    assert all(torch.equal(tensor, snapshot.tensors[name]) for name, tensor in here.snapshot(1).tensors.items())


def test_the_sum_of_squared_probabilities_stands_at_the_token_it_is_of(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    """Against the library's model, one row at a time; the other two columns are those of `log_probs`."""
    from transformers import AutoModelForCausalLM

    folder, columns = make_model(), make_columns(LENGTHS)
    actor = Actor(make_run(folder, rollout={"temperature": 0.7}, actor={"ppo_max_token_len_per_gpu": 40}))
    log_probs, entropy, squares = actor.log_probs_and_squares(columns)
    plain = actor.log_probs(columns)
    assert torch.equal(log_probs.values(), plain[0].values())
    assert torch.equal(entropy.values(), plain[1].values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for ids, mask, got in zip(columns["input_ids"].unbind(), columns["response_mask"].unbind(), squares.unbind(), strict=True):
        with torch.no_grad():
            probabilities = (model(input_ids=ids[None]).logits[0, :-1] / 0.7).softmax(-1)
        torch.testing.assert_close(got, probabilities.square().sum(-1)[-len(mask) :] * mask, rtol=1e-4, atol=1e-6)
