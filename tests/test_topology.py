"""Layouts of ranks: the logical data-parallel size of each backend, what must divide, and the keys that say it."""

import pytest

from asyncrl.config import TrainRun, parse_run, topology_of
from asyncrl.errors import ConfigError
from asyncrl.ports import Json, Topology
from asyncrl.preflight import describe_batch


@pytest.mark.parametrize(
    ("topology", "dp"),
    [
        (Topology(), 1),
        (Topology(world=8), 8),
        (Topology(world=8, sp=2), 4),
        (Topology(world=8, tp=2), 4),
        (Topology(world=8, tp=2, sp=2), 2),
        (Topology(world=8, fsdp_size=2), 8),
        (Topology(backend="megatron", world=16, tp=2), 8),
        (Topology(backend="megatron", world=16, tp=2, sp=2), 8),  # Megatron's sequence parallel takes no ranks of its own
        (Topology(backend="megatron", world=16, tp=2, pp=2, cp=2), 2),
        (Topology(backend="megatron", world=16, tp=2, cp=4, dynamic_cp=True), 1),
    ],
)
def test_the_data_parallel_size_is_what_is_left_of_the_world(topology: Topology, dp: int) -> None:
    assert topology.dp == dp


@pytest.mark.parametrize(
    ("topology", "shards", "replicas"),
    [
        (Topology(world=4), 4, 1),
        (Topology(world=4, fsdp_size=4), 4, 1),
        (Topology(world=4, fsdp_size=2), 2, 2),
        (Topology(world=4, fsdp_size=1), 1, 4),
        (Topology(world=4, sp=2), 4, 1),  # to FSDP the ranks of a sequence are ranks like the others
        (Topology(world=8, tp=2, fsdp_size=2), 2, 2),
    ],
)
def test_weights_are_cut_over_all_ranks_of_a_tensor_parallel_part_or_over_fsdp_size(
    topology: Topology, shards: int, replicas: int
) -> None:
    assert (topology.shards, topology.replicas) == (shards, replicas)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "world = 0: a topology has at least 1"),
        ({"world": 4, "sp": 3}, "world = 4 is not a multiple of tp x sp = 1 x 3 = 3: 4 / 3 = 1.33"),
        ({"world": 6, "tp": 2, "sp": 2}, "world = 6 is not a multiple of tp x sp = 2 x 2 = 4: 6 / 4 = 1.5"),
        ({"world": 4, "tp": 3}, "world = 4 is not a multiple of tp = 3: 4 / 3 = 1.33"),
        ({"world": 4, "fsdp_size": 3}, "world / tp = 4 is not a multiple of fsdp_size = 3: 4 / 3 = 1.33"),
        ({"world": 4, "tp": 2, "fsdp_size": 4}, "world / tp = 2 is not a multiple of fsdp_size = 4: 2 / 4 = 0.5"),
        ({"world": 4, "fsdp_size": -1}, "fsdp_size = -1: give 0 for all ranks, or a number of them"),
        ({"world": 4, "pp": 2}, "pp = 2, cp = 1, dynamic_cp = False: backend = 'fsdp' has neither pipeline nor context parallel"),
        ({"world": 4, "cp": 2}, "pp = 1, cp = 2, dynamic_cp = False: backend = 'fsdp' has neither"),
        ({"world": 4, "dynamic_cp": True}, "pp = 1, cp = 1, dynamic_cp = True: backend = 'fsdp' has neither"),
        (
            {"backend": "megatron", "world": 12, "tp": 2, "pp": 2, "cp": 2},
            "world = 12 is not a multiple of tp x pp x cp = 2 x 2 x 2 = 8: 12 / 8 = 1.5",
        ),
        ({"backend": "megatron", "world": 4, "tp": 2, "sp": 4}, "sp = 4: Megatron's sequence parallel ranks are its tensor"),
        ({"backend": "megatron", "world": 4, "fsdp_size": 2}, "fsdp_size = 2: weights of backend = 'megatron' are not cut"),
        # All ranks of a dynamic layout share one batch, and still must be whole groups.
        ({"backend": "megatron", "world": 6, "cp": 4, "dynamic_cp": True}, "world = 6 is not a multiple of tp x pp x cp"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_arithmetic(sizes: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(**sizes)
    assert str(caught.value).startswith(message)


def test_a_topology_says_how_its_data_parallel_size_follows() -> None:
    assert Topology(world=8, tp=2, sp=2).describe() == "world 8: dp = world / (tp x sp) = 8 / (2 x 2) = 2"
    megatron = Topology(backend="megatron", world=16, tp=2, cp=4)
    assert megatron.describe() == "world 16: dp = world / (tp x pp x cp) = 16 / (2 x 1 x 4) = 2"
    assert Topology(backend="megatron", world=4, dynamic_cp=True).describe() == "world 4: dynamic context parallel, so dp = 1"


# --- of a run ---------------------------------------------------------------------------------------------------------------------


def _run(num_ranks: int = 4, *, fsdp: dict[str, Json] | None = None, **sections: dict[str, Json]) -> TrainRun:
    tree: dict[str, dict[str, Json]] = {
        "data": {"train_files": "rows.jsonl", "max_prompt_length": 100, "max_response_length": 400},
        "model": {"path": "model"},
        "cluster": {"kind": "local", "num_ranks": num_ranks},
        **sections,
    }
    tree["actor"] = {**tree.get("actor", {}), "fsdp_config": fsdp or {}}
    return parse_run(TrainRun, tree)


def test_a_run_says_its_topology() -> None:
    fsdp: dict[str, Json] = {"ulysses_sequence_parallel_size": 2, "tensor_model_parallel_size": 2, "fsdp_size": 2}
    assert topology_of(_run(8, fsdp=fsdp)) == Topology(world=8, sp=2, tp=2, fsdp_size=2)
    in_process = parse_run(TrainRun, {"data": {"train_files": "rows.jsonl"}, "model": {"path": "model"}})
    assert topology_of(in_process) == Topology()


def test_a_run_with_adapters_and_tensor_parallel_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"lora_rank = 4 with actor.fsdp_config.tensor_model_parallel_size = 2: .* lora_rank = 0"):
        _run(4, fsdp={"tensor_model_parallel_size": 2}, model={"path": "model", "lora_rank": 4})


def test_a_run_whose_ranks_do_not_divide_names_keys_and_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        _run(4, fsdp={"ulysses_sequence_parallel_size": 3})
    assert str(caught.value) == (
        "configuration: the ranks cannot be cut like that: world = 4 is not a multiple of tp x sp = 1 x 3 = 3: 4 / 3 = 1.33 (world "
        "is cluster.num_ranks, tp is actor.fsdp_config.tensor_model_parallel_size, sp is "
        "actor.fsdp_config.ulysses_sequence_parallel_size)"
    )


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_the_longest_trajectory_must_fit_a_micro_batch(name: str) -> None:
    gae: dict[str, dict[str, Json]] = {"algorithm": {"adv_estimator": "gae"}} if name == "critic" else {}
    fits = _run(1, **gae, **{name: {"ppo_max_token_len_per_gpu": 500}})
    assert getattr(fits, name).ppo_max_token_len_per_gpu == 500
    with pytest.raises(ConfigError) as caught:
        _run(1, **gae, **{name: {"ppo_max_token_len_per_gpu": 499}})
    assert "data.max_prompt_length + data.max_response_length = 100 + 400 = 500 is more than" in str(caught.value)
    assert f"{name}.ppo_max_token_len_per_gpu = 499: the longest trajectory must fit" in str(caught.value)


def test_ranks_that_share_a_sequence_have_their_budgets_together() -> None:
    fsdp: dict[str, Json] = {"ulysses_sequence_parallel_size": 2}
    _run(2, fsdp=fsdp, actor={"ppo_max_token_len_per_gpu": 250})
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size = 249 x 2 = 498: the longest"):
        _run(2, fsdp=fsdp, actor={"ppo_max_token_len_per_gpu": 249})


def test_a_dry_run_shows_the_layout_and_its_arithmetic() -> None:
    fsdp: dict[str, Json] = {"ulysses_sequence_parallel_size": 2, "tensor_model_parallel_size": 2, "fsdp_size": 2}
    data: dict[str, Json] = {
        "train_files": "rows.jsonl",
        "train_batch_size": 4,
        "max_prompt_length": 100,
        "max_response_length": 400,
    }
    run = _run(8, fsdp=fsdp, data=data, rollout={"n": 3}, actor={"ppo_max_token_len_per_gpu": 4096})
    lines = describe_batch(run, num_rows=64).splitlines()
    assert lines[-5:] == [
        "# ranks               8 processes, trainer.num_threads = 1 in each",
        "# data parallel size  ranks / (tensor x sequence) = 8 / (2 x 2) = 2",
        "# weights             cut over 2 ranks, in 2 copies, and by 2 (tensor)",
        "# a rank's part       12 / 2 = 6 trajectories of a mini-batch",
        "# a micro-batch       4096 x 2 = 8192 tokens at most; a trajectory has up to 500",
    ]
    alone = parse_run(TrainRun, {"data": data, "model": {"path": "model"}})
    assert not any(line.startswith("# ranks") for line in describe_batch(alone, num_rows=64).splitlines())
