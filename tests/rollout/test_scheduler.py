"""Slots, prefill and weights, step by step and without a thread."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.rollout.model_runner import ModelRunner
from asyncrl.rollout.scheduler import Outcome, Scheduler
from asyncrl.rollout.stopping import StopRules

MakeRequest = Callable[..., GenerateRequest]
TinyModel = Callable[..., PreTrainedModel]


@pytest.fixture
def runner(tiny_model: TinyModel) -> ModelRunner:
    return ModelRunner(tiny_model("qwen2", 1), num_slots=4, context_len=64, deterministic=False)


@pytest.fixture
def scheduler(runner: ModelRunner) -> Scheduler:
    return Scheduler(runner, max_num_seqs=4, version=0, rules=StopRules(64, None))


def step(scheduler: Scheduler) -> list[Outcome]:
    with torch.inference_mode():
        return scheduler.step()


def test_freed_slots_are_zero_and_active_rows_stay_dense(
    scheduler: Scheduler, runner: ModelRunner, request_of: MakeRequest
) -> None:
    for ticket, tokens in enumerate([20, 3, 20, 20]):
        scheduler.submit(ticket, request_of([ticket + 1] * 9, seed=ticket, max_tokens=tokens))
    step(scheduler)
    assert not runner.cache.is_clear(3)
    assert [outcome.ticket for outcome in step(scheduler)] == [1]
    assert (scheduler.num_running, runner.cache.is_clear(3)) == (3, True)
    scheduler.cancel(0)
    assert [runner.cache.is_clear(slot) for slot in range(4)] == [False, False, True, True]
    while scheduler.has_work:
        step(scheduler)
    assert all(runner.cache.is_clear(slot) for slot in range(4))


def test_a_row_that_moves_goes_on_as_if_it_had_not(scheduler: Scheduler, request_of: MakeRequest) -> None:
    request = request_of([7] * 5, seed=9, max_tokens=12)
    scheduler.submit(0, request_of([1] * 20, seed=1, max_tokens=4))
    scheduler.submit(1, request)
    moved = drain(scheduler)[1]
    scheduler.submit(2, request)
    alone = drain(scheduler)[2]
    assert moved.token_ids == alone.token_ids


def drain(scheduler: Scheduler) -> dict[int, Generation]:
    results: dict[int, Generation] = {}
    while scheduler.has_work:
        for outcome in step(scheduler):
            assert isinstance(outcome.result, Generation)
            results[outcome.ticket] = outcome.result
    return results


def test_equal_prompts_are_computed_once(
    scheduler: Scheduler, runner: ModelRunner, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    runner._model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for ticket, prompt in enumerate([[1, 2, 3], [1, 2, 3], [4, 5], [1, 2, 3]]):
        scheduler.submit(ticket, request_of(prompt, seed=ticket, max_tokens=1))
    assert len(step(scheduler)) == 4
    assert shapes == [(2, 3)]


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "tie"])
def test_a_snapshot_that_does_not_fit_changes_nothing(
    scheduler: Scheduler, runner: ModelRunner, tiny_model: TinyModel, change: str
) -> None:
    before = {name: tensor.clone() for name, tensor in runner._model.state_dict().items()}
    tensors = {name: tensor.clone() for name, tensor in tiny_model("qwen2", 2).state_dict().items()}
    match change:
        case "missing":
            del tensors["model.norm.weight"]
        case "unexpected":
            tensors["model.extra.weight"] = torch.zeros(1)
        case "shape":
            tensors["model.norm.weight"] = torch.zeros(3)
        case "tie":
            tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(EngineError, match="lm_head" if change == "tie" else "model"):
        scheduler.load(1, tensors)
    assert scheduler.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner._model.state_dict().items())


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_may_come_under_one_name(
    scheduler: Scheduler, runner: ModelRunner, tiny_model: TinyModel, left_out: str
) -> None:
    tensors = dict(tiny_model("qwen2", 2).state_dict())
    expected = tensors.pop(left_out)
    scheduler.load(1, tensors)
    assert torch.equal(runner._model.state_dict()[left_out], expected)


def test_an_older_version_is_refused(scheduler: Scheduler, tiny_model: TinyModel) -> None:
    tensors = dict(tiny_model("qwen2", 2).state_dict())
    scheduler.load(5, tensors)
    scheduler.load(5, tensors)
    with pytest.raises(EngineError, match="version 4"):
        scheduler.load(4, tensors)


def test_logits_that_are_not_finite_fail_their_rows_by_name(
    scheduler: Scheduler, runner: ModelRunner, request_of: MakeRequest
) -> None:
    tensors = {name: tensor * torch.nan for name, tensor in runner._model.state_dict().items()}
    scheduler.load(1, tensors)
    scheduler.submit(0, request_of(seed=3))
    (outcome,) = step(scheduler)
    assert isinstance(outcome.result, EngineError)
    assert "request-3" in str(outcome.result)
    assert not scheduler.has_work


def test_nothing_of_a_tenant_with_nans_reaches_the_next(
    scheduler: Scheduler, runner: ModelRunner, tiny_model: TinyModel, request_of: MakeRequest
) -> None:
    good = dict(tiny_model("qwen2", 1).state_dict())
    scheduler.submit(0, request_of([1] * 30, max_tokens=9))
    step(scheduler)
    for layer in runner.cache.slot_layers:
        layer.keys[0], layer.values[0] = torch.nan, torch.nan
    step(scheduler)
    assert not scheduler.has_work
    scheduler.load(1, good)
    scheduler.submit(1, request_of([2] * 3, max_tokens=9))
    assert len(drain(scheduler)[1].token_ids) == 9
