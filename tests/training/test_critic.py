"""The critic: where its values are read, its loss and gradient against a plain implementation, and what must not change them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForTokenClassification

from asyncrl.config import TrainRun
from asyncrl.errors import ConfigError, ModelError, NonFiniteGradientError
from asyncrl.keys import TRAIN
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.padding import drop_padding, padded, with_padding
from asyncrl.protocol.ragged import from_values, ragged, rows_of, values_of
from asyncrl.training.critic import Critic
from asyncrl.training.disk import Disk
from asyncrl.training.export import write_model
from asyncrl.training.mesh import full_copy

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 1)]
UIDS = ["a", "a", "b", "b", "c", "c", "d", "d"]
KEYS = tuple(f"{uid}_{number % 2}_0" for number, uid in enumerate(UIDS))

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]


def _run(make_run: MakeRun, folder: Path, *, actor: dict[str, Any] | None = None, **critic: Any) -> TrainRun:
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"optim": {"lr": 0.01}, **critic},
        "actor": actor or {},
    }
    return make_run(folder, **sections)


def _tensors(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: full_copy(tensor) for name, tensor in critic.learner.parameters.items()}


def _weights(critic: Critic) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in _tensors(critic).values()])


@pytest.fixture
def batch(make_columns: MakeColumns) -> TensorDict:
    """Columns with returns of a few tenths, no two the same."""
    columns = make_columns(LENGTHS)
    generator = torch.Generator().manual_seed(9)
    mask = columns["response_mask"]
    columns["returns"] = from_values(torch.rand(len(mask.values()), generator=generator) * mask.values(), mask.offsets())
    columns["values"] = mask.float() * 0
    return columns


def _taught(run: TrainRun, batch: TensorDict) -> Critic:
    """A critic whose head is no longer 0."""
    critic = Critic(run)
    for _ in range(3):
        critic.update(batch, UIDS)
    return critic


def _plain(critic: Critic, folder: Path) -> Any:
    """The library's own model with the critic's weights."""
    write_model(folder, _tensors(critic), critic.learner.module.config_json(), disk=Disk())
    return AutoModelForTokenClassification.from_pretrained(folder)


def _plain_values(model: Any, ids: torch.Tensor, num_response: int) -> torch.Tensor:
    """[R]: the value of each response token, read where it is predicted."""
    values: torch.Tensor = model(input_ids=ids[None]).logits[0, :, 0]
    return values[len(ids) - num_response - 1 : len(ids) - 1]


# --- values -----------------------------------------------------------------------------------------------------------------------


def test_a_new_critic_expects_nothing(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    values = Critic(_run(make_run, make_model())).values(batch)
    assert values.dtype == torch.float32
    assert torch.equal(values.offsets(), batch["response_mask"].offsets())  # type: ignore[attr-defined]
    assert not values_of(values).any()


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen3", True), ("llama", False)])
def test_a_value_is_read_where_its_token_is_predicted(
    make_model: MakeModel, make_run: MakeRun, batch: TensorDict, tmp_path: Path, kind: str, tied: bool
) -> None:
    run = _run(make_run, make_model(kind, tied=tied), ppo_max_token_len_per_gpu=40)
    critic = _taught(run, batch)
    model = _plain(critic, tmp_path / "c")
    assert model.config.num_labels == 1
    names = ("input_ids", "response_mask")
    found = rows_of(critic.values(batch))
    for row, (ids, mask) in enumerate(zip(*(rows_of(batch[name]) for name in names), strict=True)):
        expected = _plain_values(model, ids, len(mask)) * mask
        torch.testing.assert_close(found[row], expected.detach(), atol=1e-5, rtol=1e-5)
        assert not found[row][~mask].any()
    assert values_of(critic.values(batch)).abs().max() > 0.01, "a critic that still says 0 proves nothing"


def test_a_value_does_not_know_the_token_it_is_a_baseline_for(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    """Nor anything after it: another last token changes no value at all, another first one all but its own."""
    critic = _taught(_run(make_run, make_model()), batch)
    ids, mask = torch.arange(1, 9), torch.ones(5, dtype=torch.bool)

    def values(changed: int | None) -> torch.Tensor:
        row = ids.clone()
        if changed is not None:
            row[changed] = 30
        columns = {"input_ids": ragged([row]), "position_ids": ragged([torch.arange(8)]), "response_mask": ragged([mask])}
        return values_of(critic.values(TensorDict(columns, batch_size=[1])))

    assert torch.equal(values(7), values(None))
    assert values(3)[0] == values(None)[0]
    assert (values(3)[1:] != values(None)[1:]).all()


def test_a_token_that_the_critic_does_not_know_is_told(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    small = make_model(seed=1, vocab_size=20)
    critic = Critic(_run(make_run, make_model(), model_path=str(small)))
    with pytest.raises(ModelError, match=r"critic\.model_path = '.*' has a vocabulary of 20 tokens, .* has token 3\d"):
        critic.values(batch)


def test_the_critic_starts_from_its_own_model_and_names_it(make_model: MakeModel, make_run: MakeRun, tmp_path: Path) -> None:
    folder, other = make_model(), make_model(seed=1)
    name = "model.embed_tokens.weight"
    own = full_copy(Critic(_run(make_run, folder)).learner.parameters[name])
    others = full_copy(Critic(_run(make_run, folder, model_path=str(other))).learner.parameters[name])
    assert not torch.equal(own, others)
    with pytest.raises(ModelError, match=r"^critic\.model_path = '.*/absent' is no model directory"):
        Critic(_run(make_run, folder, model_path=str(tmp_path / "absent")))
    with pytest.raises(ModelError, match=r"^model\.path = '.*/absent' is no model directory"):
        Critic(_run(make_run, tmp_path / "absent"))


def test_the_head_of_a_bfloat16_model_is_float32(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    sections: dict[str, Any] = {"model": {"path": str(make_model()), "dtype": "bfloat16"}, "algorithm": {"adv_estimator": "gae"}}
    critic = Critic(make_run(make_model(), **sections, critic={"optim": {"lr": 1e-5}}))
    critic.update(batch, UIDS)
    state = _tensors(critic)
    assert {name for name, tensor in state.items() if tensor.dtype == torch.float32} == {"score.weight", "score.bias"}
    assert float(state["score.weight"].abs().max()) == pytest.approx(1e-5, rel=1e-3)
    assert critic.values(batch).dtype == torch.float32


# --- update -----------------------------------------------------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_the_plain_formula_on_one_row_at_a_time(
    make_model: MakeModel, make_run: MakeRun, batch: TensorDict, tmp_path: Path
) -> None:
    run = _run(make_run, make_model(), optim={"lr": 0.01, "clip_grad": 1e9}, cliprange_value=0.1)
    critic = _taught(run, batch)
    model = _plain(critic, tmp_path / "c")
    now = critic.values(batch)
    spread = 0.4 * (torch.rand(len(values_of(now)), generator=torch.Generator().manual_seed(4)) - 0.5)
    batch["values"] = from_values((values_of(now) + spread) * values_of(batch["response_mask"]), now.offsets())  # type: ignore[attr-defined]
    metrics = critic.update(batch, UIDS)
    num_tokens = values_of(batch["response_mask"]).sum()
    total, clipped, predicted = torch.zeros(()), 0, 0.0
    names = ("input_ids", "response_mask", "values", "returns")
    for ids, mask, old, returns in zip(*(rows_of(batch[name]) for name in names), strict=True):
        values = _plain_values(model, ids, len(mask))
        near = torch.min(torch.max(values, old - 0.1), old + 0.1)
        far = (near - returns) ** 2 > (values - returns) ** 2
        total = total + 0.5 * (torch.max((values - returns) ** 2, (near - returns) ** 2) * mask).sum() / num_tokens
        clipped += int((far & mask).sum())
        predicted += float((values.detach() * mask).sum())
    torch.autograd.backward(total)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert metrics["critic/vf_loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped / int(num_tokens))
    assert 0.2 < metrics["critic/vf_clipfrac"] < 0.8
    assert metrics["critic/vpred_mean"] == pytest.approx(predicted / int(num_tokens), abs=1e-6)
    assert metrics["critic/lr"] == 0.01


def test_the_update_does_not_depend_on_the_micro_batches(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    folder = make_model()
    results = []
    for max_tokens in (20, 30, 10_000):
        critic = _taught(_run(make_run, folder, ppo_max_token_len_per_gpu=max_tokens), batch)
        results.append((critic.update(batch, UIDS), _weights(critic)))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=2e-5)
        # Adam turns a rounding error of a gradient near 0 into a step of its own size, hence the loose bound for few weights.
        assert float(((weights - results[0][1]).abs() > 1e-4).float().mean()) < 0.01


@pytest.mark.parametrize("groups_each", [2, 4])
def test_padding_rows_change_no_number(make_model: MakeModel, make_run: MakeRun, batch: TensorDict, groups_each: int) -> None:
    run = _run(make_run, make_model(), actor={"ppo_mini_batch_size": groups_each}, ppo_max_token_len_per_gpu=40)
    meta = KVBatchMeta(partition_id=TRAIN, keys=KEYS, tags=({},) * len(KEYS))
    plain, wide = Critic(run), Critic(run)
    whole = padded(meta, 5)
    mixed = whole.select([8, 0, 1, 9, 2, 3, 4, 10, 5, 6, 7, 11, 12])
    for _ in range(2):
        metrics = plain.update(batch, UIDS)
        columns = with_padding(mixed, batch)
        assert wide.update(columns, mixed.groups) == metrics
        _, back = drop_padding(mixed, columns.set("values", wide.values(columns)))
        batch["values"] = plain.values(batch)
        assert torch.equal(values_of(back["values"]), values_of(batch["values"]))
    assert torch.equal(_weights(wide), _weights(plain))


def test_a_rejected_token_counts_nowhere(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    """As if it were an observation."""
    run = _run(make_run, make_model())
    mask = batch["response_mask"]
    keep = torch.rand(len(values_of(mask)), generator=torch.Generator().manual_seed(5))
    kept = values_of(mask) & (keep < 0.7)
    rejecting, masking = batch.clone(), batch.clone()
    rejecting["loss_weights"] = from_values(kept.float(), mask.offsets())
    masking["response_mask"] = from_values(kept, mask.offsets())
    first, second = _taught(run, batch), _taught(run, batch)
    assert first.update(rejecting, UIDS) == pytest.approx(second.update(masking, UIDS), abs=1e-5)
    assert float(((_weights(first) - _weights(second)).abs() > 1e-4).float().mean()) < 0.01


def test_predictions_come_nearer_to_the_returns(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    critic, losses = Critic(_run(make_run, make_model())), []
    for _ in range(15):
        batch["values"] = critic.values(batch)
        losses.append(critic.update(batch, UIDS)["critic/vf_loss"])
    assert losses[-1] < 0.3 * losses[0]


def test_optimizer_steps_are_the_actors(make_model: MakeModel, make_run: MakeRun, batch: TensorDict) -> None:
    critic = Critic(_run(make_run, make_model(), actor={"ppo_mini_batch_size": 2, "ppo_epochs": 3}))
    critic.update(batch, UIDS)
    assert critic.updates == 6


def test_a_gradient_that_is_not_finite_changes_nothing_and_names_the_row(
    make_model: MakeModel, make_run: MakeRun, batch: TensorDict, caplog: pytest.LogCaptureFixture
) -> None:
    run = _run(make_run, make_model(), optim={"lr": 0.01, "max_nonfinite_in_a_row": 2})
    critic, returns = Critic(run), batch["returns"]
    before, values = _weights(critic), values_of(returns).clone()
    first = int(returns.offsets()[2])
    values[first + int(rows_of(batch["response_mask"])[2].nonzero()[0])] = float("nan")
    broken = batch.clone()
    broken["returns"] = from_values(values, returns.offsets())
    assert critic.update(broken, UIDS)["critic/skipped_updates"] == 1.0
    assert torch.equal(_weights(critic), before)
    assert (critic.updates, critic.skipped_updates) == (1, 1)
    assert "b (row 2)" in caplog.text
    with pytest.raises(NonFiniteGradientError, match=r"2 updates in a row.*b \(row 2\)"):
        critic.update(broken, UIDS)


@pytest.mark.parametrize("lengths", [[(3, 0), (3, 9)], [(3, 0), (4, 0)]])
def test_rows_without_policy_tokens_are_passed_over(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, lengths: Sequence[tuple[int, int]]
) -> None:
    columns = make_columns(lengths)
    columns["values"] = columns["returns"] = columns["response_mask"].float()
    critic = Critic(_run(make_run, make_model(), actor={"ppo_mini_batch_size": 1}))
    metrics = critic.update(columns, ["a", "b"])
    assert critic.updates == 2
    assert ("critic/vf_loss" in metrics) == bool(lengths[1][1])
    assert metrics["critic/grad_norm"] >= 0
    assert len(values_of(critic.values(columns))) == lengths[1][1]


def test_a_falling_schedule_needs_its_end(make_model: MakeModel, make_run: MakeRun) -> None:
    sections: dict[str, Any] = {"algorithm": {"adv_estimator": "gae"}, "trainer": {"total_training_steps": 0}}
    run = make_run(make_model(), critic={"optim": {"lr_scheduler_type": "cosine"}}, **sections)
    with pytest.raises(ConfigError, match="needs the number"):
        Critic(run)
    assert Critic(run, total_updates=5).updates == 0
