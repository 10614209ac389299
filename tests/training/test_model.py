"""Loading a model folder, and log-probs of chosen tokens against the plain Hugging Face forward pass."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from asyncrl.algorithms.token_log_probs import logits_log_probs
from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import FieldError, ModelError
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.model import load_model
from asyncrl.training.token_batch import token_batch

LENGTHS = [(3, 5), (7, 1), (2, 11), (4, 0), (1, 6)]


def _by_hand(folder: Path, columns: TensorDict, temperature: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One row at a time through the library's own model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    log_probs, entropies = [], []
    for ids, response, mask in zip(*(rows_of(columns[name]) for name in ("input_ids", "responses", "response_mask")), strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        places = slice(len(ids) - len(response) - 1, len(ids) - 1)
        values, entropy = logits_log_probs(logits[places], response, temperature)
        log_probs.append(values * mask)
        entropies.append(entropy * mask)
    return log_probs, entropies


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probs_are_those_of_the_whole_model_row_by_row(
    make_model: Callable[..., Path],
    make_run: Callable[..., TrainRun],
    make_columns: Callable[..., TensorDict],
    kind: str,
    tied: bool,
    temperature: float,
) -> None:
    folder, columns = make_model(kind, tied=tied), make_columns(LENGTHS)
    run = make_run(folder, rollout={"temperature": temperature}, actor={"ppo_max_token_len_per_gpu": 20})
    expected = _by_hand(folder, columns, temperature)
    for model in (Actor(run), Reference(run)):
        for got, want in zip(model.log_probs(columns), expected, strict=True):
            torch.testing.assert_close(got.values().double(), torch.cat(want), atol=1e-4, rtol=0)
            assert got.dtype == torch.float32
            assert [len(row) for row in rows_of(got)] == [response for _, response in LENGTHS]


def test_given_positions_are_used(make_model: Callable[..., Path], make_run: Callable[..., TrainRun]) -> None:
    """Rows whose positions start at 5 get what the library gives for those positions, in a padded batch."""
    folder = make_model("llama")
    ids, positions = [torch.arange(6), torch.arange(4)], [torch.arange(5, 11), torch.tensor([0, 1, 7, 8])]
    columns = {"input_ids": ids, "position_ids": positions, "response_mask": [torch.ones(3, dtype=torch.bool)] * 2}
    got, _ = Actor(make_run(folder)).log_probs(TensorDict({k: ragged(v) for k, v in columns.items()}, batch_size=[2]))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for row, place, values in zip(ids, positions, rows_of(got), strict=True):
        with torch.no_grad():
            logits = model(input_ids=row[None], position_ids=place[None], attention_mask=torch.ones(1, len(row))).logits[0]
        torch.testing.assert_close(values, logits_log_probs(logits[-4:-1], row[-3:])[0], atol=1e-5, rtol=0)


def test_a_policy_token_without_a_predecessor_is_refused() -> None:
    with pytest.raises(FieldError, match="row 1"):
        token_batch([torch.arange(3), torch.arange(2)], [torch.ones(2, dtype=torch.bool)] * 2)


def test_an_observation_may_come_first() -> None:
    batch = token_batch([torch.tensor([5, 6])], [torch.tensor([False, True])])
    assert batch.select_n.tolist() == [0]
    assert batch.labels_n.tolist() == [6]


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _break_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _more_layers(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))


def _wider(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": settings["intermediate_size"] * 2}))


@pytest.mark.parametrize("damage", [_break_config, _break_weights, _drop_config, _drop_weights, _more_layers, _wider])
def test_a_broken_folder_is_one_line_that_names_it(
    make_model: Callable[..., Path], damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_model("llama")
    damage(folder)
    with pytest.raises(ModelError, match=folder.name) as caught:
        load_model(ModelConfig(path=str(folder)))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "the library printed beside our line"


def test_weights_of_other_shapes_are_named(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    _wider(folder)
    with pytest.raises(ModelError, match=r"other shapes than its config.json says: model\.layers\.0\..* is \[.*\] instead of \["):
        load_model(ModelConfig(path=str(folder)))


def test_a_model_that_bends_its_logits_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.01,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="changes its logits"):
        load_model(ModelConfig(path=str(tmp_path / "capped")))


def test_dtype_is_the_configured_one(make_model: Callable[..., Path]) -> None:
    model = load_model(ModelConfig(path=str(make_model()), dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
