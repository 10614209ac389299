"""Configuration: every rule has a test, and every file in configs/ loads."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from asyncrl.config import SFTRun, TrainRun, idle_keys, keys_of, load_run, parse_run
from asyncrl.config.keys import leaves
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.toml"))
Tree = dict[str, Any]


def tree(**settings: object) -> Tree:
    """The smallest run, plus `section__key=value`."""
    made: Tree = {"data": {"train_files": "rows.jsonl"}, "model": {"path": "model"}}
    return _set(made, settings)


def sft_tree(**settings: object) -> Tree:
    return _set({"data": {"train_files": "rows.jsonl"}, "model": {"path": "model"}}, settings)


def _set(made: Tree, settings: dict[str, object]) -> Tree:
    for name, value in settings.items():
        *sections, key = name.split("__")
        node = made
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return made


def refusal(settings: Tree, *, sft: bool = False) -> str:
    """The one line that the user sees."""
    with pytest.raises(ConfigError) as caught:
        parse_run(SFTRun, settings, where="run.toml") if sft else parse_run(TrainRun, settings, where="run.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message.removeprefix("run.toml: ")


# --- files ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_in_configs_loads(path: Path) -> None:
    if path.parent.name == "sim":
        assert load_run(Scenario, path).train_run().updates_per_batch > 0
    elif "sft" in tomllib.loads(path.read_text(encoding="utf-8")):
        assert load_run(SFTRun, path).sft.total_steps > 0
    else:
        assert load_run(TrainRun, path).updates_per_batch > 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such configuration file"):
        load_run(TrainRun, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(TrainRun, tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("data = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML: Invalid value \(at line 1"):
        load_run(TrainRun, broken)
    broken.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"broken\.toml: cannot be read"):
        load_run(TrainRun, broken)


# --- unknown keys and wrong values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__train_file": "x"}, "unknown key data.train_file; did you mean data.train_files?"),
        ({"actor__optim__lrr": 1.0}, "unknown key actor.optim.lrr; did you mean actor.optim.lr?"),
        ({"data__mapping__promt": "x"}, "unknown key data.mapping.promt; did you mean data.mapping.prompt?"),
        ({"trianer__seed": 1}, "unknown key trianer; did you mean trainer?"),
        ({"trainer__lr": 1.0}, "unknown key trainer.lr; did you mean actor.optim.lr?"),
        (
            {"replay__zzzzqq": 1},
            "unknown key replay.zzzzqq; known here: failed_groups, max_failed_groups_in_a_row, max_filtered_groups_in_a_row, "
            "quarantine_after, sample_timeout_s",
        ),
    ],
)
def test_an_unknown_key_suggests_the_nearest_name(settings: Tree, message: str) -> None:
    assert refusal(tree(**settings)) == message


def test_a_misspelt_required_key_is_reported_before_the_missing_one() -> None:
    assert refusal({"data": {"train_files": "x"}, "model": {"pth": "m"}}) == "unknown key model.pth; did you mean model.path?"


def test_a_missing_key_is_named() -> None:
    assert refusal({"data": {"train_files": "x"}, "model": {}}) == "model.path is missing; it has no default"
    assert refusal({"model": {"path": "m"}}) == "data is missing; it has no default"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout__n": "8"}, "rollout.n = '8': input should be a valid integer"),
        ({"rollout__n": True}, "rollout.n = True: input should be a valid integer"),
        ({"rollout__n": 0}, "rollout.n = 0: input should be greater than 0"),
        ({"rollout__n": 10**22}, f"rollout.n = {10**22}: input should be less than or equal to 2147483647"),
        ({"trainer__seed": -(10**22)}, f"trainer.seed = {-(10**22)}: input should be greater than or equal to -2147483647"),
        ({"trainer__num_threads": 10**8}, "trainer.num_threads = 100000000: input should be less than or equal to 1024"),
        ({"model__chat_template_kwargs": {"a": [1]}}, "model.chat_template_kwargs.a = [1]: input should be a valid string"),
        ({"model__chat_template_kwargs": 3}, "model.chat_template_kwargs = 3: input should be a valid dictionary"),
        ({"trainer__experiment_name": 7}, "trainer.experiment_name = 7: input should be a valid string; quote it: '\"7\"'"),
        ({"model__path": ["x" * 1000]}, "model.path = ['" + "x" * 98 + "...: input should be a valid string"),
        ({"rollout__temperature": 0}, "rollout.temperature = 0: input should be greater than 0"),
        ({"actor__optim__lr": float("inf")}, "actor.optim.lr = inf: input should be a finite number"),
        ({"actor__optim__betas": [0.9, 1.5]}, "actor.optim.betas.1 = 1.5: input should be less than or equal to 1"),
        ({"actor__loss_agg_mode": "mean"}, "actor.loss_agg_mode = 'mean': input should be 'token-mean', 'token-sum',"),
        ({"data__train_files": [3]}, "data.train_files.0 = 3: input should be a valid string"),
        ({"data__shuffle": "yes"}, "data.shuffle = 'yes': input should be a valid boolean"),
        ({"trainer": 3}, "trainer = 3: input should be a valid dictionary"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(settings: Tree, message: str) -> None:
    assert refusal(tree(**settings)).startswith(message)


def test_an_int_is_taken_where_a_float_is_meant_and_one_path_where_a_list_is() -> None:
    run = parse_run(TrainRun, tree(actor__optim__lr=1))
    assert run.actor.optim.lr == 1.0
    assert run.data.train_files == ["rows.jsonl"]


def test_sections_are_immutable() -> None:
    run = parse_run(TrainRun, tree())
    with pytest.raises(ValueError, match="frozen"):
        run.trainer.seed = 2


# --- values that do not fit together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data__train_batch_size": 10, "actor__ppo_mini_batch_size": 4},
            "data.train_batch_size = 10 is not a multiple of actor.ppo_mini_batch_size = 4: 10 / 4 = 2.5",
        ),
        (
            {"data__train_batch_size": 4, "actor__ppo_mini_batch_size": 8},
            "data.train_batch_size = 4 is not a multiple of actor.ppo_mini_batch_size = 8: 4 / 8 = 0.5",
        ),
        (
            {"rollout__max_model_len": 100, "data__max_prompt_length": 64, "data__max_response_length": 64},
            "rollout.max_model_len = 100 is less than data.max_prompt_length + data.max_response_length = 128",
        ),
        ({"data__train_files": []}, "data.train_files is empty: name a file, a directory or a glob"),
        ({"agent__name": "tool_agent"}, 'agent.name = "tool_agent" needs agent.tools, such as ["calculator"]'),
    ],
)
def test_values_that_do_not_fit_together_are_refused(settings: Tree, message: str) -> None:
    assert refusal(tree(**settings)) == message


@pytest.mark.parametrize(
    ("batch", "mini", "epochs", "groups", "updates", "old"),
    [(16, 0, 1, 16, 1, "elide"), (16, 16, 1, 16, 1, "elide"), (16, 4, 1, 4, 4, "recompute"), (16, 8, 3, 8, 6, "recompute")],
)
def test_batch_arithmetic(batch: int, mini: int, epochs: int, groups: int, updates: int, old: str) -> None:
    run = parse_run(TrainRun, tree(data__train_batch_size=batch, actor__ppo_mini_batch_size=mini, actor__ppo_epochs=epochs))
    assert (run.mini_batch_groups, run.updates_per_batch, run.old_log_probs) == (groups, updates, old)


def test_old_log_probs_can_be_asked_for() -> None:
    assert parse_run(TrainRun, tree(algorithm__old_log_probs="bypass")).old_log_probs == "bypass"
    assert parse_run(TrainRun, tree(algorithm__old_log_probs="recompute")).old_log_probs == "recompute"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__train_files": []}, "set either data.train_files or sft.stages, not both and not neither"),
        ({"sft__stages": ["a", "b"]}, "set either data.train_files or sft.stages, not both and not neither"),
        (
            {"data__train_files": [], "sft__stages": ["a", "b"], "sft__stage_shares": [1.0]},
            "sft.stage_shares = [1.0]: give one share",
        ),
        (
            {"data__train_files": [], "sft__stages": ["a", "b"], "sft__stage_shares": [0.5, 0.4]},
            "sft.stage_shares = [0.5, 0.4]: give",
        ),
        ({"sft__optim__min_lr_ratio": 0.1}, "sft.optim.min_lr_ratio has no effect because sft.optim.lr_scheduler_type is"),
    ],
)
def test_sft_values_that_do_not_fit_together_are_refused(settings: Tree, message: str) -> None:
    assert refusal(sft_tree(**settings), sft=True).startswith(message)


def test_sft_stages_are_taken() -> None:
    run = parse_run(SFTRun, sft_tree(data__train_files=[], sft__stages=["a", ["b", "c"]], sft__stage_shares=[0.75, 0.25]))
    assert run.sft.stages == [["a"], ["b", "c"]]


# --- keys without effect ----------------------------------------------------------------------------------------------------------

HELD_OUT: Tree = {"data__val_files": "held_out.jsonl"}
DAPO: Tree = {"reward__manager": "dapo", "reward__overlong_buffer_len": 100}
LIMITED: Tree = {"reward__manager": "rate_limited", "reward__limits__max_tpm": 9000}
JUDGE: Tree = {"reward__manager": "judge", "reward__judge__base_url": "http://localhost/v1", "reward__judge__model": "m"}
VLLM: Tree = {"rollout__name": "vllm"}
SERVERS: Tree = {"rollout__name": "openai", "rollout__openai__base_urls": ["http://localhost:8000", "http://127.0.0.1:8001"]}
FILES: Tree = {**SERVERS, "rollout__weight_transfer": "directory", "rollout__openai__weights_dir": "weights"}
# switch -> settings under which it holds, and those under which its keys have an effect
SWITCHES: dict[str, tuple[Tree, Tree]] = {
    "actor.use_kl_loss is false": ({}, {"actor__use_kl_loss": True}),
    'agent.name is "single_turn"': ({}, {"agent__name": "tool_agent", "agent__tools": ["calculator"]}),
    'trainer.mode is "sync"': ({}, {"trainer__mode": "async"}),
    "agent.max_attempts is 1": ({"agent__max_attempts": 1}, {}),
    'replay.failed_groups is "abort"': ({"replay__failed_groups": "abort"}, {"replay__failed_groups": "train_partial"}),
    'cluster.kind is "process"': ({}, {"cluster__kind": "local"}),
    "model.lora_rank is 0": ({}, {"model__lora_rank": 4}),
    'rollout.name is not "vllm"': (SERVERS, VLLM),
    'rollout.name is not "openai"': (VLLM, FILES),
    'rollout.name is "torch"': ({}, VLLM),
    'rollout.name is "openai", whose engines are rollout.openai.base_urls': (SERVERS, {}),
    "the only engine is in this process (rollout.name, rollout.num_engines)": ({}, {"rollout__num_engines": 2}),
    'rollout.weight_transfer is not "directory"': (SERVERS, FILES),
    'algorithm.adv_estimator is not "gae"': (
        {},
        {"algorithm__adv_estimator": "gae", "critic__optim__lr_scheduler_type": "cosine"},
    ),
    'critic.optim.lr_scheduler_type is "constant"': (
        {"algorithm__adv_estimator": "gae"},
        {"algorithm__adv_estimator": "gae", "critic__optim__lr_scheduler_type": "cosine"},
    ),
    'actor.optim.lr_scheduler_type is "constant"': ({}, {"actor__optim__lr_scheduler_type": "cosine"}),
    "algorithm.use_kl_in_reward is false": (
        {},
        {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
    ),
    'algorithm.kl_ctrl.type is "fixed"': (
        {"algorithm__use_kl_in_reward": True},
        {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
    ),
    'algorithm.adv_estimator is "gdpo", whose advantages are made of the components of the reward alone': (
        {"algorithm__adv_estimator": "gdpo", "algorithm__gdpo_reward_keys": "format"},
        {},
    ),
    'algorithm.rollout_correction.rollout_is is "none"': ({}, {"algorithm__rollout_correction__rollout_is": "token"}),
    "the ratio of the clipped loss is that weight already (algorithm.old_log_probs, algorithm.rollout_correction.loss_type)": (
        {"algorithm__old_log_probs": "bypass"},
        {
            "algorithm__old_log_probs": "bypass",
            "algorithm__rollout_correction__loss_type": "reinforce",
            "algorithm__rollout_correction__rollout_is": "token",
        },
    ),
    "algorithm.rollout_correction.rollout_rs is empty": (
        {"algorithm__rollout_correction__rollout_is": "token"},
        {
            "algorithm__rollout_correction__rollout_rs": ["token_k2"],
            "algorithm__rollout_correction__rollout_rs_threshold": [0.5],
        },
    ),
    'algorithm.old_log_probs is not "bypass"': ({}, {"algorithm__old_log_probs": "bypass"}),
    "algorithm.filter_groups is false": ({}, {"algorithm__filter_groups": True}),
    'actor.loss_agg_mode is not "seq-mean-token-sum-norm"': ({}, {"actor__loss_agg_mode": "seq-mean-token-sum-norm"}),
    'reward.manager is not "dapo"': ({}, DAPO),
    'reward.manager is not "rate_limited" or "judge"': ({}, LIMITED),
    "there is no limit to wait for: reward.limits has neither max_concurrent, max_rpm nor max_tpm": (JUDGE, LIMITED),
    "reward.limits.max_tpm is 0": ({"reward__manager": "rate_limited", "reward__limits__max_rpm": 9}, LIMITED),
    'reward.manager is not "judge"': ({}, JUDGE),
    'reward.manager is "judge"': (JUDGE, {}),
    "data.mapping.prompt is set": ({"data__mapping__prompt": "{question}"}, {}),
    "data.mapping.prompt is empty": ({}, {"data__mapping__prompt": "{question}"}),
    "trainer.total_training_steps is set": ({"trainer__total_training_steps": 3}, {}),
    "data.val_files is empty": ({}, {"data__val_files": "held_out.jsonl"}),
    "store.journal is false": ({"store__journal": False}, {}),
    "eval.sampled is false": ({"eval__sampled": False, **HELD_OUT}, HELD_OUT),
    "eval.sampled and eval.greedy are false": ({"eval__sampled": False, "eval__greedy": False, **HELD_OUT}, HELD_OUT),
}
ROWS = [(switch.reason, key) for switch in idle_keys.SWITCHES for key in switch.keys.split()]


def _default(key: str) -> object:
    value = dict(keys_of(TrainRun))[key].default
    return "held_out.jsonl" if key == "data.val_files" else ["calculator"] if key == "agent.tools" else value


@pytest.mark.parametrize(("reason", "key"), ROWS)
def test_a_key_without_effect_is_refused_even_at_its_default(reason: str, key: str) -> None:
    holds, _ = SWITCHES[reason]
    # the key under test last: it must win over the setting that makes the switch hold, and be the one that is named
    settings = tree(**{**holds, key.replace(".", "__"): _default(key)} if key.replace(".", "__") not in holds else holds)
    message = refusal(settings)
    assert message.startswith(f"{key} has no effect because {reason}; ")


@pytest.mark.parametrize(("reason", "key"), ROWS)
def test_the_same_key_is_taken_where_it_has_an_effect(reason: str, key: str) -> None:
    _, acts = SWITCHES[reason]
    parse_run(TrainRun, tree(**{key.replace(".", "__"): _default(key), **acts}))


def test_every_switch_names_keys_that_exist() -> None:
    known = dict(keys_of(TrainRun))
    assert [key for _, key in ROWS if key not in known] == []
    assert {switch.reason for switch in idle_keys.SWITCHES} == set(SWITCHES)


# --- overrides --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain_files = "rows.jsonl"\n[model]\npath = "model"\n[trainer]\nseed = 1\n')
    return path


def test_overrides_are_toml_values_and_bare_words_are_strings(run_file: Path) -> None:
    run = load_run(
        TrainRun,
        run_file,
        [
            "trainer.seed=7",
            "actor.optim.lr = 3e-4",
            "model.path=some/dir",
            'trainer.experiment_name="7"',
            'data.train_files=["a", "b"]',
            "trainer.tensorboard=false",
            "model.chat_template_kwargs.enable_thinking=false",
            "data.mapping.prompt={question}",
            "data.mapping.system=",
        ],
    )
    assert (run.trainer.seed, run.actor.optim.lr, run.model.path, run.trainer.experiment_name) == (7, 3e-4, "some/dir", "7")
    assert run.data.train_files == ["a", "b"]
    assert run.model.chat_template_kwargs == {"enable_thinking": False}
    assert (run.data.mapping.prompt, run.data.mapping.system, run.trainer.tensorboard) == ("{question}", "", False)


@pytest.mark.parametrize("override", ["trainer.seed", "seed=1", "=1", "trainer.=1", ".seed=1"])
def test_an_override_of_another_form_is_refused(run_file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value"):
        load_run(TrainRun, run_file, [override])


@pytest.mark.parametrize("value", ["[calculator]", '["a"', '"a', "'it's"])
def test_an_override_that_begins_like_toml_and_is_none_is_refused(run_file: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"not valid TOML .*need quotes"):
        load_run(TrainRun, run_file, [f"agent.tools={value}"])


def test_a_date_where_a_text_is_meant_wants_quotes(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name = 2024-01-31: .*quote it: '\"2024-01-31\"'"):
        load_run(TrainRun, run_file, ["trainer.experiment_name=2024-01-31"])


def test_one_tool_needs_no_list(run_file: Path) -> None:
    overrides = ["agent.name=tool_agent", "agent.tools=calculator"]
    assert load_run(TrainRun, run_file, overrides).agent.tools == ["calculator"]


def test_an_override_below_a_value_and_of_an_unknown_key_are_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="'seed' is a value, not a section"):
        load_run(TrainRun, run_file, ["trainer.seed.x=1"])
    with pytest.raises(ConfigError, match=r"run\.toml: unknown key trainer\.sed; did you mean trainer\.seed\?"):
        load_run(TrainRun, run_file, ["trainer.sed=1"])


# --- the reference ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TrainRun, SFTRun])
def test_every_key_has_help(kind: type[BaseModel]) -> None:
    keys = dict(keys_of(kind))
    assert [key for key, entry in keys.items() if not entry.description] == []
    assert len(keys) <= 200


def test_leaves() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {"d": [2]}}, "e": {}})) == {"a.b": 1, "a.c.d": [2], "e": {}}


def test_loading_a_run_imports_no_torch(run_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from asyncrl.config import TrainRun, load_run; "
        f"load_run(TrainRun, Path({str(run_file)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
