"""Every layout of ranks learns what one rank does: weights after ten AdamW steps, gradients, log-probs; and what cannot be cut is
refused alike on every rank.

In float64 what is compared is the arithmetic. In float32 rounding stays within a hundredth of the learning rate for models as small
as these: `benchmarks/rank_invariance.py` tells how it grows.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.cluster import Rank
from asyncrl.config import TrainRun
from asyncrl.errors import AsyncRLError
from asyncrl.ports import Json, Topology
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.training.actor import Actor
from asyncrl.training.critic import Critic
from asyncrl.training.mesh import full_copy, open_mesh
from asyncrl.training.scoring import Rows
from asyncrl.training.sharding import units_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]
RunOnRanks = Callable[..., list[Any]]
MakeTask = Callable[..., dict[str, Any]]
Weights = dict[str, torch.Tensor]

LR = 1e-3
LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 2)]
IDS = [str(row) for row in range(len(LENGTHS))]
LAYOUTS = {
    "data-2": Topology(world=2),
    "data-4": Topology(world=4),
    "hsdp-2x2": Topology(world=4, fsdp_size=2),
    "copies-2": Topology(world=2, fsdp_size=1),
    "sequence-2": Topology(world=2, sp=2),
    "sequence-4": Topology(world=4, sp=4),
    "tensor-2": Topology(world=2, tp=2),
    "hsdp-tensor-2": Topology(world=4, tp=2, fsdp_size=1),
    "hsdp-sequence-2": Topology(world=4, sp=2, fsdp_size=2),
    "sequence-2-tensor-2": Topology(world=4, sp=2, tp=2),
}
SIMPLE = ("data-2", "sequence-2", "tensor-2")
KINDS: list[dict[str, Any]] = [
    {"kind": "qwen2", "tied": True},
    {"kind": "qwen2", "tied": False},
    {"kind": "llama", "tied": False},
]


@pytest.fixture
def make_task(make_run: MakeRun, make_columns: MakeColumns) -> MakeTask:
    """make_task(folder, dtype, steps, **actor) -> run and batches of one training, plain data."""

    def make(folder: Path, dtype: str = "float64", steps: int = 3, *, model: Json = None, **actor: Any) -> dict[str, Any]:
        run = make_run(
            folder,
            data={"train_batch_size": len(LENGTHS), "max_prompt_length": 8, "max_response_length": 16},
            model={"dtype": dtype, **(model if isinstance(model, dict) else {})},
            actor={"ppo_max_token_len_per_gpu": 40, "optim": {"lr": LR}, **actor},
        )
        batches = [make_columns(LENGTHS, seed=seed) for seed in range(steps)]
        names = ("input_ids", "position_ids", "response_mask", "advantages")
        return {"run": run, "batches": [{name: rows_of(batch[name]) for name in names} for batch in batches]}

    return make


def _columns(rows: Mapping[str, list[torch.Tensor]]) -> TensorDict:
    return TensorDict({name: ragged(column) for name, column in rows.items()}, batch_size=[len(LENGTHS)])


def trained(task: dict[str, Any], topology: Topology) -> Weights:
    """The weights that one rank has whole after the task's batches, every update having four micro-batches or more."""
    mesh = open_mesh(topology)
    actor = Actor(task["run"], mesh)
    if task.get("keeps"):
        for unit in units_of(actor.learner.module):
            unit.set_reshard_after_forward(False, recurse=False)
    if task.get("packs"):
        actor.learner.module.placement = replace(actor.learner.module.placement, packs=True)
    shards = tuple((tuple(range(rank, len(LENGTHS), mesh.dp_size)),) for rank in range(mesh.dp_size)) if mesh.dp_size > 1 else ()
    for rows in task["batches"]:
        assert not actor.update(_columns(rows), IDS, IDS, shards=shards)["actor/skipped_updates"]
    return {name: full_copy(tensor) for name, tensor in actor.learner.parameters.items()}


def train_all(_rank: Rank, tasks: dict[str, Any]) -> list[Weights]:
    return [trained(task, tasks["topology"]) for task in tasks["tasks"]]


def _distance(found: Weights, expected: Weights) -> float:
    """In learning rates, of the worst weight."""
    assert found.keys() == expected.keys() != set()
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected) / LR


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_leave_the_weights_of_one_rank(
    layout: str, make_model: MakeModel, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    in_float64 = make_task(make_model("qwen3", **heads), steps=10)
    in_float32 = make_task(make_model("qwen2", initializer_range=0.02, **heads), "float32", 10)
    others = [make_task(make_model(seed=1, **heads, **kind)) for kind in KINDS] if layout in SIMPLE else []
    tasks = [in_float32, in_float64, *others]
    alone = [trained(task, Topology()) for task in tasks]
    found = run_on_ranks(LAYOUTS[layout].world, train_all, {"tasks": tasks, "topology": LAYOUTS[layout]})
    for weights in found:
        small, *smaller = [_distance(each, expected) for each, expected in zip(weights, alone, strict=True)]
        assert small < 1e-2
        assert max(smaller) < 1e-6


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(6, 3, 2), (12, 3, 4), (4, 1, 4)])
def test_key_heads_that_the_ranks_of_a_row_cannot_share_are_repeated(
    heads: int, key_heads: int, size: int, make_model: MakeModel, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    folder = make_model(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=4, hidden_size=4 * heads)
    task = make_task(folder)
    tasks = [task, {**task, "packs": True}]
    (found, *_) = run_on_ranks(size, train_all, {"tasks": tasks, "topology": Topology(world=size, sp=size)})
    alone = trained(task, Topology())
    assert [_distance(weights, alone) < 1e-6 for weights in found] == [True, True]


@pytest.mark.parametrize("layout", ["data-2", "sequence-2", "tensor-2"])
def test_what_saves_memory_changes_nothing(
    layout: str, make_model: MakeModel, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    """Checkpointed layers, weights kept after the forward pass, packed rows (here through the attention that takes padded ones,
    too), and the gradient of the entropy."""
    folder = make_model(num_attention_heads=4, num_key_value_heads=2)
    tasks = [
        make_task(folder, model={"enable_gradient_checkpointing": True}),
        {**make_task(folder), "keeps": True},
        {**make_task(folder), "packs": True},
        make_task(folder, entropy_coeff=0.1),
    ]
    plain, with_entropy = trained(make_task(folder), Topology()), trained(tasks[-1], Topology())
    (found, *_) = run_on_ranks(2, train_all, {"tasks": tasks, "topology": LAYOUTS[layout]})
    assert [_distance(weights, plain) < 1e-6 for weights in found[:3]] == [True] * 3
    assert _distance(found[3], with_entropy) < 1e-6
    assert _distance(with_entropy, plain) > 1e-6


def critic_values(_rank: Rank, task: dict[str, Any]) -> tuple[torch.Tensor, Weights]:
    return _critic(task, task["topology"])


def _critic(task: dict[str, Any], topology: Topology) -> tuple[torch.Tensor, Weights]:
    critic = Critic(task["run"], open_mesh(topology))
    for rows in task["batches"]:
        zeros = [torch.zeros(len(mask)) for mask in rows["response_mask"]]
        critic.update(_columns({**rows, "values": zeros, "returns": rows["advantages"]}), IDS, ())
    rows = Rows.of(_columns(task["batches"][0]))
    with torch.no_grad():
        values = critic.learner.module(rows.token_batch(range(len(LENGTHS))))
    return values, {name: full_copy(tensor) for name, tensor in critic.learner.parameters.items()}


@pytest.mark.parametrize("layout", ["sequence-2", "tensor-2"])
def test_the_critic_is_cut_as_the_actor_is(
    layout: str, make_model: MakeModel, make_run: MakeRun, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    folder = make_model(num_attention_heads=4, num_key_value_heads=2)
    task = make_task(folder)
    task["run"] = make_run(
        folder,
        model={"dtype": "float64"},
        algorithm={"adv_estimator": "gae"},
        critic={"optim": {"lr": LR}, "ppo_max_token_len_per_gpu": 40},
        data={"max_prompt_length": 8, "max_response_length": 16},
    )
    values, weights = _critic(task, Topology())
    assert values.abs().max() > 0
    for found in run_on_ranks(2, critic_values, {**task, "topology": LAYOUTS[layout]}):
        torch.testing.assert_close(found[0], values, rtol=0, atol=1e-9)
        assert _distance(found[1], weights) < 1e-6


def gradients_of(_rank: Rank, task: dict[str, Any]) -> Weights:
    return _gradients(task, task["topology"])


def _gradients(task: dict[str, Any], topology: Topology) -> Weights:
    """Of the mean log-prob of this rank's rows."""
    actor = Actor(task["run"], open_mesh(topology))
    rows = Rows.of(_columns(task["batches"][0]))
    mine = list(range(actor.learner.mesh.dp_rank, len(LENGTHS), actor.learner.mesh.dp_size))
    actor.learner.backward(actor.learner.module(rows.token_batch(mine))[0].sum() / len(LENGTHS))
    grads = {name: parameter.grad for name, parameter in actor.learner.parameters.items() if parameter.grad is not None}
    return {name: full_copy(grad) for name, grad in grads.items()}


@pytest.mark.parametrize("layout", ["data-2", "sequence-2", "tensor-2"])
def test_mixed_precision_computes_in_bfloat16_and_sums_in_float32(
    layout: str, make_model: MakeModel, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    folder = make_model(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    exact = _gradients(make_task(folder, "float32", 1), Topology())
    task = make_task(folder, "float32", 1, fsdp_config={"mixed_precision": True})
    (found, *_) = run_on_ranks(2, gradients_of, {**task, "topology": LAYOUTS[layout]})
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    error = max(float((found[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact)
    assert 1e-4 < error < 0.1


def refusals(_rank: Rank, tasks: list[tuple[TrainRun, Topology]]) -> list[str]:
    found = []
    for run, topology in tasks:
        with pytest.raises(AsyncRLError) as caught:
            Actor(run, open_mesh(topology))
        found.append(str(caught.value))
    return found


def test_what_cannot_be_cut_is_refused_with_the_arithmetic(
    make_model: MakeModel, make_task: MakeTask, run_on_ranks: RunOnRanks
) -> None:
    two, three = make_model(), make_model(seed=1, num_attention_heads=3, num_key_value_heads=1, hidden_size=24)
    sequence, tensor = Topology(world=2, sp=2), Topology(world=2, tp=2)
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    tasks = [
        (make_task(three)["run"], sequence),
        (make_task(two)["run"], tensor),
        (make_task(make_model(seed=2, **windows))["run"], sequence),
        (make_task(make_model(seed=3, num_key_value_heads=2, intermediate_size=25))["run"], tensor),
        (make_task(make_model(seed=4, num_key_value_heads=2), model={"lora_rank": 2})["run"], tensor),
    ]
    first, second = run_on_ranks(2, refusals, tasks)
    assert (
        first
        == second
        == [
            "ulysses_sequence_parallel_size = 2 must divide the model's 3 attention heads: 3 / 2 = 1.5",
            "tensor_model_parallel_size = 2 must divide the model's num_key_value_heads = 1: 1 / 2 = 0.5",
            "ulysses_sequence_parallel_size = 2: the model has layers of sliding_attention; "
            "sequence parallel has full attention alone",
            "tensor_model_parallel_size = 2 must divide the model's intermediate_size = 25: 25 / 2 = 12.5",
            "model.lora_rank: adapters are not cut by tensor_model_parallel_size; set one of them",
        ]
    )
