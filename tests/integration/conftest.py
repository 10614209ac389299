"""A whole run with real parts, small enough for a test: the quick start's tokenizer, a random model of a few thousand weights."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.assembly import open_rollout, open_trainer
from asyncrl.config import TrainRun, load_run
from asyncrl.examples.tiny_model import save_model
from asyncrl.observe.run_folder import create_run_folder
from asyncrl.preflight import check_train
from asyncrl.stopping import Stop
from asyncrl.trainer import Trainer
from asyncrl.wiring import Rollout
from asyncrl.world import RealWorld

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
retry_backoff_s = 0.01

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


NUM_STEPS = 6
"""Six steps of two groups use all twelve rows."""


@asynccontextmanager
async def _opened(
    config: Path, *overrides: str, equip: Callable[[Rollout], Rollout] = lambda rollout: rollout
) -> AsyncIterator[Trainer]:
    """A trainer on a rollout that a test may change; on leaving nothing of it may be left."""
    before = asyncio.all_tasks()
    run = load_run(TrainRun, config, [f"trainer.total_training_steps={NUM_STEPS}", *overrides])
    inputs = await asyncio.to_thread(check_train, run)
    async with RealWorld(run_seed=run.trainer.seed) as world, open_rollout(run, world) as rollout:
        folder = await world.offload(create_run_folder, run.trainer.default_local_dir, run.trainer.experiment_name)
        async with open_trainer(run, inputs, folder, equip(rollout), world, Stop()) as (trainer, _):
            yield trainer
    assert asyncio.all_tasks() == before
    assert trainer.queue.stats()["open_leases"] == 0
    trainer.admission.check_conservation()


@pytest.fixture
def opened() -> Callable[..., AbstractAsyncContextManager[Trainer]]:
    """opened(config, *overrides, equip=...): see _opened."""
    return _opened


def _check_whole_run(trainer: Trainer, *, num_failed: int) -> None:
    """Every step was trained on whole groups; every failed group was dropped and counted; the store is empty."""
    counts = trainer.admission.counters()
    assert (trainer.step, counts["trained"], counts["open"]) == (NUM_STEPS, 2 * NUM_STEPS, 0)
    assert counts.get("dropped/failure", 0) == counts["dropped"] == trainer.replay.counts()["failure"] == num_failed
    assert (trainer.queue.stats()["keys"], trainer.queue.stats()["bytes"]) == (0, 0)


@pytest.fixture
def check_whole_run() -> Callable[..., None]:
    """check_whole_run(trainer, num_failed=...): see _check_whole_run."""
    return _check_whole_run
