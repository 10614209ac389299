"""The catalogue: complete, consistent, and free of torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncrl
from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE, TAGS, Axis, _fields, field
from asyncrl.stages.advantage import advantage_stage, kl_coefficient
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.correction import correction_stage
from asyncrl.stages.old_log_prob import bypass_stage, recompute_stage
from asyncrl.stages.ref_log_prob import ref_log_prob_stage
from asyncrl.stages.stage import Stage
from asyncrl.stages.update_actor import LOSS_COLUMNS, update_actor_stage
from asyncrl.stages.update_critic import update_critic_stage
from asyncrl.stages.values import values_stage

NAMES = [
    "raw_prompt",
    "data_source",
    "extra_info",
    "reward_model",
    "index",
    "tools_kwargs",
    "interaction_kwargs",
    "uid",
    "session_id",
    "prompts",
    "responses",
    "response_mask",
    "loss_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
    "multi_modal_inputs",
    "rollout_log_probs",
    "token_versions",
    "rm_scores",
    "reward_score",
    "extra_fields",
    "num_turns",
    "old_log_probs",
    "entropy",
    "ref_log_prob",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    "rollout_is_weights",
    "loss_weights",
    "dummy_tensor",
]


def test_the_catalogue_has_every_name_of_the_design() -> None:
    assert set(NAMES) <= set(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_can_be_checked_against_a_column(name: str) -> None:
    entry = field(name)
    assert entry.name == name
    assert entry.producer
    assert entry.consumers
    assert entry.when
    if entry.is_tensor:
        assert isinstance(getattr(torch, entry.dtype), torch.dtype)
    else:
        assert entry.axis is Axis.NONE, "objects have no ragged axis"


def test_an_unknown_name_says_what_to_do() -> None:
    with pytest.raises(FieldError, match=r"'nonsense' is not in the catalogue .*; add an entry"):
        field("nonsense")


def test_a_name_that_stands_twice_is_refused() -> None:
    entry = CATALOGUE["uid"]
    row = (entry.name, entry.dtype, entry.axis.value, entry.producer, "replay", entry.when, entry.evidence)
    with pytest.raises(AssertionError, match="twice"):
        _fields(row, row)


def test_every_tag_is_a_plain_value_with_a_meaning() -> None:
    assert {"is_prompt", "status", "global_steps", "policy_len", "min_global_steps", "max_global_steps", "is_padding"} <= set(TAGS)
    for name, tag in TAGS.items():
        assert tag.name == name
        assert tag.type in (bool, int, float, str)
        assert tag.on in ("prompt", "trajectory", "both")
        assert tag.meaning


@pytest.mark.parametrize("module", ["asyncrl.config", "asyncrl.fields", "asyncrl.ports", "asyncrl.world", "asyncrl.reference"])
def test_the_ground_loads_no_heavy_library(module: str) -> None:
    heavy = ["torch", "numpy", "transformers", "tensordict", "pyarrow", "vllm", "aiohttp"]
    code = f"import sys, {module}; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


STAGES = [
    advantage_stage(AlgorithmConfig(use_kl_in_reward=True), kl=kl_coefficient(AlgorithmConfig(use_kl_in_reward=True))),
    advantage_stage(AlgorithmConfig(adv_estimator="gae")),
    advantage_stage(AlgorithmConfig(adv_estimator="remax")),
    advantage_stage(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["x"])),
    advantage_stage(AlgorithmConfig(adv_estimator="optimal_token_baseline"), has_is_weights=True),
    correction_stage(CorrectionOptions(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1.0)),
    batch_metrics_stage(),
    bypass_stage(),
    recompute_stage(lambda columns, shards: (columns["entropy"],) * 3, with_squares=True),
    ref_log_prob_stage(lambda columns, shards: (columns["entropy"], columns["entropy"])),
    update_actor_stage(lambda columns, group_ids, session_ids, *, seed, shards: {}, columns=LOSS_COLUMNS),
    update_critic_stage(lambda columns, group_ids, shards: {}, has_loss_weights=True),
    values_stage(lambda columns, shards: columns["values"]),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_catalogue_names_the_stages_that_read_and_write(stage: Stage) -> None:
    assert [name for name in sorted(stage.reads) if stage.name not in CATALOGUE[name].consumers] == []
    assert [name for name in sorted(stage.writes) if stage.name != CATALOGUE[name].producer] == []


def test_every_stage_that_the_catalogue_names_reads_or_writes_the_field() -> None:
    """The other way round; a name that no code uses yet says so in its condition."""
    built = {stage.name for stage in STAGES}
    reads = {(stage.name, name) for stage in STAGES for name in stage.reads}
    writes = {(stage.name, name) for stage in STAGES for name in stage.writes}
    used = [entry for entry in CATALOGUE.values() if not entry.when.startswith("not yet: ")]
    named = {(stage, entry.name) for entry in used for stage in built.intersection(entry.consumers)}
    assert named - reads == set()
    assert [entry.name for entry in used if entry.producer in built and (entry.producer, entry.name) not in writes] == []


def test_every_producer_and_consumer_is_a_room_or_a_stage() -> None:
    rooms = {path.name for path in Path(asyncrl.__path__[0]).iterdir() if path.is_dir()} | {"feed"}
    known = rooms | {stage.name for stage in STAGES}
    used = [entry for entry in CATALOGUE.values() if not entry.when.startswith("not yet: ")]
    assert [entry.name for entry in used if not {entry.producer, *entry.consumers} <= known] == []
