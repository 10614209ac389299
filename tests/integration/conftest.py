"""A whole run with real parts, small enough for a test: the quick start's tokenizer, a random model of a few thousand weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.examples.tiny_model import save_model

CONFIG = """
[data]
train_batch_size = 2
max_prompt_length = 64
max_response_length = 12

[rollout]
n = 2
max_num_seqs = 8

[agent]
name = "single_turn"

[reward]
function = "length_reward:score"

[actor.optim]
lr = 1e-2

[trainer]
experiment_name = "small"
total_training_steps = 3
invariants = "all"
tensorboard = false
"""


@pytest.fixture(scope="session")
def model_folder(
    make_lm: Callable[..., LlamaForCausalLM],
    quickstart_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("small") / "model", quickstart_tokenizer
    model = make_lm(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(model, tokenizer, folder)
    return folder


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 3 / 2
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve prompts."""
    path = tmp_path / "rows.jsonl"
    lines = [
        {
            "prompt": [{"role": "user", "content": f"what is {n}+0?"}],
            "reward_model": {"ground_truth": str(n)},
            "data_source": "sums",
        }
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file of a small run in tmp_path/runs. Its reward differs between the answers of a random policy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length_reward.py").write_text(REWARD, encoding="utf-8")
    path = tmp_path / "small.toml"
    files = f'\n[model]\npath = "{model_folder}"\n'
    text = CONFIG.replace("[data]", f'[data]\ntrain_files = "{rows}"').replace(
        "[trainer]", f'[trainer]\ndefault_local_dir = "{tmp_path}/runs"'
    )
    path.write_text(text + files, encoding="utf-8")
    return path
