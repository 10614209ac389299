"""Tiny random models on disk, and batches of ragged columns for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import Json
from asyncrl.protocol.ragged import ragged

VOCAB = 37
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]


@pytest.fixture
def make_model(make_lm: Callable[..., PreTrainedModel], tmp_path: Path) -> MakeModel:
    """make(kind="qwen2", tied=True, seed=0, **config) -> folder of a random two-layer model with a stand-in tokenizer file."""

    def make(kind: str = "qwen2", *, tied: bool = True, seed: int = 0, **config: Json) -> Path:
        model = make_lm(kind, seed=seed, **{**SIZES, "initializer_range": 0.3, "tie_word_embeddings": tied, **config})
        folder = tmp_path / f"{kind}-{'tied' if tied else 'untied'}-{seed}"
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("template")
        return folder

    return make


@pytest.fixture
def make_run() -> MakeRun:
    """make(folder, **sections) -> a run's configuration, a section's keys given as a dict."""

    def make(folder: Path, **sections: dict[str, Json]) -> TrainRun:
        base: dict[str, dict[str, Json]] = {
            "data": {"train_files": ["rows.jsonl"], "train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 12},
            "model": {"path": str(folder)},
            "actor": {"optim": {"lr": 0.01}},
            "trainer": {"total_training_steps": 10},
        }
        return parse_run(TrainRun, {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})

    return make


@pytest.fixture
def make_columns() -> MakeColumns:
    """make(lengths, seed=0) -> columns of rows with (prompt, response) lengths; about a fifth of a response is observation."""

    def make(lengths: Sequence[tuple[int, int]], *, seed: int = 0) -> TensorDict:
        generator = torch.Generator().manual_seed(seed)
        prompts, responses, masks, advantages, rollout = [], [], [], [], []
        for prompt_len, response_len in lengths:
            mask = torch.rand(response_len, generator=generator) < 0.8
            prompts.append(torch.randint(VOCAB, (prompt_len,), generator=generator))
            responses.append(torch.randint(VOCAB, (response_len,), generator=generator))
            masks.append(mask)
            advantages.append(torch.randn(1, generator=generator) * mask)
            rollout.append(-3 * torch.rand(response_len, generator=generator) * mask)
        sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        columns = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": sequences,
            "position_ids": [torch.arange(len(row)) for row in sequences],
            "response_mask": masks,
            "loss_mask": masks,
            "advantages": advantages,
            "rollout_log_probs": rollout,
        }
        return TensorDict({name: ragged(rows) for name, rows in columns.items()}, batch_size=[len(lengths)])

    return make
