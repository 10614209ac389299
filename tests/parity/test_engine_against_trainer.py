"""The engine's log-probs against the actor's, on the engine's own samples: what is trained is what was sampled, before and after a
publication."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import GenerateRequest, Generation, SamplingParams
from asyncrl.protocol.ragged import ragged
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.training.actor import Actor
from asyncrl.training.model import load_model

VOCAB = 101


@pytest.fixture
def make_run(make_lm: Callable[..., PreTrainedModel], tmp_path: Path) -> Callable[[str, bool, float], TrainRun]:
    """make(kind, tied, temperature) -> a run on a random model with peaked distributions."""

    def make(kind: str, tied: bool, temperature: float) -> TrainRun:
        model = make_lm(kind, vocab_size=VOCAB, initializer_range=0.3, tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / "model")
        return parse_run(
            TrainRun,
            {
                "data": {"train_files": ["rows.jsonl"]},
                "model": {"path": str(tmp_path / "model")},
                "rollout": {"temperature": temperature},
                "actor": {"optim": {"lr": 0.01}},
            },
        )

    return make


async def _sample(engine: TorchEngine, prompts: list[list[int]], temperature: float, seed: int) -> list[Generation]:
    sampling = SamplingParams(temperature=temperature, max_tokens=24)
    return [
        await engine.generate(GenerateRequest(request_id=f"{seed}-{at}", prompt_ids=prompt, sampling=sampling, seed=seed + at))
        for at, prompt in enumerate(prompts)
    ]


def _columns(prompts: list[list[int]], answers: list[Generation]) -> TensorDict:
    sequences = [torch.tensor([*prompt, *answer.token_ids]) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [torch.ones(len(answer.token_ids), dtype=torch.bool) for answer in answers]
    columns = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(sequence)) for sequence in sequences],
        "response_mask": masks,
        "advantages": [mask * (-1.0) ** at for at, mask in enumerate(masks)],
        "rollout_log_probs": [torch.tensor(answer.log_probs) for answer in answers],
    }
    return TensorDict({name: ragged(rows) for name, rows in columns.items()}, batch_size=[len(prompts)])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("tied", "temperature"), [(True, 0.7), (False, 1.0), (True, 1.3)])
async def test_log_probs_agree_before_and_after_an_update(
    make_run: Callable[[str, bool, float], TrainRun], kind: str, tied: bool, temperature: float
) -> None:
    run = make_run(kind, tied, temperature)
    actor = Actor(run)
    prompts = [[(at * 7 + step) % VOCAB for step in range(3 + 4 * at)] for at in range(4)]
    uids = [str(at) for at in range(4)]
    async with TorchEngine(load_model(run.model), max_num_seqs=4, context_len=64) as engine:
        for version in (0, 1):
            columns = _columns(prompts, await _sample(engine, prompts, temperature, seed=version * 100))
            trained, _ = actor.log_probs(columns)
            assert float((trained.values() - columns["rollout_log_probs"].values()).abs().max()) <= 1e-4
            assert actor.update(columns, uids)["training/rollout_probs_diff_max"] <= 1e-4
            await engine.publish(version + 1, actor.snapshot(version + 1))
        # without the last publication the two would differ: the test can fail
        stale = _columns(prompts, await _sample(engine, prompts, temperature, seed=7))
        actor.update(stale, uids)
        moved, _ = actor.log_probs(stale)
        assert float((moved.values() - stale["rollout_log_probs"].values()).abs().max()) > 1e-3
