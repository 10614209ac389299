"""One update of the actor against a plain one in float64: full padded logits, autograd, no fused head, no sharding, no oneDNN."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import Json
from asyncrl.protocol.ragged import ragged
from asyncrl.training.actor import Actor
from asyncrl.training.mesh import full_copy

VOCAB = 41
UIDS = ["a", "b", "a", "c", "b", "c", "a"]
TEMPERATURE = 0.7
LOW, HIGH = 0.1, 0.25

MakeRun = Callable[..., TrainRun]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make(tied, **actor keys) -> a run on a random model whose attention has biases, or on one whose head is the embedding."""

    def make(tied: bool, **actor: Json) -> TrainRun:
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 12}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": tied}
        config = {**sizes, **heads, "attention_bias": not tied}
        model = Qwen3ForCausalLM(Qwen3Config(**config)) if tied else LlamaForCausalLM(LlamaConfig(**config))  # type: ignore[no-untyped-call, arg-type]
        model.save_pretrained(tmp_path)
        sections: dict[str, Json] = {
            "data": {"train_files": ["rows.jsonl"], "train_batch_size": 3, "max_prompt_length": 8, "max_response_length": 14},
            "model": {"path": str(tmp_path)},
            "rollout": {"temperature": TEMPERATURE},
            "actor": {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "optim": {"lr": 0.01, "clip_grad": 1e9}, **actor},
            "trainer": {"total_training_steps": 1},
        }
        return parse_run(TrainRun, sections)

    return make


def random_columns(*, reference: bool) -> TensorDict:
    """Rows of several turns, ragged, one without a policy token; old and reference log-probs are near the policy's and far away."""
    rows: dict[str, list[torch.Tensor]] = {}
    for number, response in enumerate([5, 9, 14, 3, 1, 8, 6]):
        mask = (torch.rand(response) < 0.7) & (number != 3)
        ids = torch.randint(VOCAB, (2 + number + response,))
        row = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "response_mask": mask, "advantages": torch.randn(1) * mask}
        row["old_log_probs"] = -4 * torch.rand(response) * mask
        if reference:
            row["ref_log_prob"] = -4 * torch.rand(response) * mask
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return TensorDict({name: ragged(column) for name, column in rows.items()}, batch_size=[len(UIDS)])


def plain_loss(model: PreTrainedModel, columns: TensorDict, run: TrainRun) -> torch.Tensor:
    """The loss as the papers write it, token by token."""
    rows = {str(name): columns[name].unbind() for name in columns.keys()}  # noqa: SIM118  a TensorDict iterates over rows
    tokens = [int(mask.sum()) for mask in rows["response_mask"]]
    num_rows, config, total = sum(map(bool, tokens)), run.actor, torch.zeros((), dtype=torch.float64)
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows["input_ids"], batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in rows["input_ids"]], batch_first=True)
    log_softmax_BLV = (model(input_ids=ids_BL, attention_mask=mask_BL).logits / TEMPERATURE).log_softmax(-1)
    for row, mask in enumerate(rows["response_mask"]):
        first = len(rows["input_ids"][row]) - len(mask)
        share = {"token-mean": 1 / sum(tokens), "seq-mean-token-sum": 1 / num_rows, "seq-mean-token-mean": 0.0}
        share["seq-mean-token-mean"] = 1 / (num_rows * max(tokens[row], 1))
        for place in mask.nonzero()[:, 0].tolist():
            at_V = log_softmax_BLV[row, first + place - 1]
            log_prob = at_V[rows["input_ids"][row][first + place]]
            ratio, advantage = (log_prob - rows["old_log_probs"][row][place]).exp(), rows["advantages"][row][place]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
            loss = torch.minimum(loss, -3 * advantage) if advantage < 0 else loss
            loss = loss + config.entropy_coeff * (at_V.exp() * at_V).sum()
            if config.use_kl_loss:
                gap = log_prob - rows["ref_log_prob"][row][place]
                estimates = {"kl": gap, "k2": gap**2 / 2, "low_var_kl": ((-gap).exp() - 1 + gap).clamp(-10, 10)}
                loss = loss + config.kl_loss_coef * estimates[config.kl_loss_type]
            total = total + share[config.loss_agg_mode] * loss
    return total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("kl", ["", "kl", "k2", "low_var_kl"])
@pytest.mark.parametrize("max_tokens", [22, 60])
def test_loss_and_every_gradient_are_those_of_a_plain_float64_step(
    make_run: MakeRun, tied: bool, mode: str, kl: str, max_tokens: int
) -> None:
    keys: dict[str, Json] = {"loss_agg_mode": mode, "ppo_max_token_len_per_gpu": max_tokens, "entropy_coeff": 0.02 if tied else 0.0}
    if kl:
        keys |= {"use_kl_loss": True, "kl_loss_type": kl, "kl_loss_coef": 0.3}
    run, columns = make_run(tied, **keys), random_columns(reference=bool(kl))
    actor, gradients = Actor(run), dict[str, torch.Tensor]()
    step = actor.learner.step

    def keep_gradients(suspects: Callable[[], str]) -> object:
        found = {name: parameter.grad for name, parameter in actor.learner.parameters.items()}
        gradients.update({name: full_copy(grad).double() for name, grad in found.items() if grad is not None})
        return step(suspects)

    actor.learner.step = keep_gradients  # type: ignore[method-assign, assignment]
    metrics = actor.update(columns, UIDS)
    model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float64, attn_implementation="eager")
    loss = plain_loss(model, columns, run)
    torch.autograd.backward(loss)
    assert metrics["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).abs().max()) < 2e-5 * scale, name
