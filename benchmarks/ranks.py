"""Wall seconds of the actor's GRPO update: one rank with one thread against several, on the model and batch of `grpo_step.py`.

The one is the run's own process (`cluster.kind = "process"`), the others rank processes as in a run ("local"): columns go through
shared memory, rows are dealt out by their work, gradients are summed. They take turns, A B A B; who waits uses no CPU. Both do
`--updates` passes over 64 trajectories a round, with the optimizer step that ends each. Gathered weights are kept from forward to
backward, as one does while they fit; `--reshard` frees them.

    python benchmarks/ranks.py [--ranks 2] [--rounds 9] [--updates 2] [--reshard] [--json]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import TrainRun, parse_run
from asyncrl.keys import TrajectoryKey
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.stages.balance import balance
from asyncrl.training.learners import open_learners
from asyncrl.training.ranks import RankedLearners

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW, VOCAB = 8, 8, 128, 4096
LENGTHS = {"max_prompt_length": 32, "max_response_length": MAX_NEW}
LR, MICRO_BATCH_TOKENS = 1e-5, 4096
"""Fits the caches of a core, as in `grpo_step.py`."""


def make_model(folder: Path) -> Path:
    """The shape of `grpo_step.py`'s: 4 layers of 256, a vocabulary of 4096."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def make_run(model: Path, num_ranks: int, *, reshard: bool = False) -> TrainRun:
    """num_ranks 0: in this process."""
    fsdp = {"fsdp_config": {"reshard_after_forward": reshard}} if num_ranks else {}
    return parse_run(
        TrainRun,
        {
            "data": {
                "train_files": ["-"],
                "train_batch_size": NUM_PROMPTS,
                "max_prompt_length": 32,
                "max_response_length": MAX_NEW,
            },
            "model": {"path": str(model)},
            "rollout": {"n": NUM_SAMPLES},
            "actor": {"ppo_max_token_len_per_gpu": MICRO_BATCH_TOKENS, "optim": {"lr": LR}, **fsdp},
            "cluster": {"kind": "local", "num_ranks": num_ranks} if num_ranks else {},
            "trainer": {"total_training_steps": 1000},
        },
    )


def make_columns() -> TensorDict:
    """64 trajectories of 28 to 30 prompt ids and 32 to 128 new ones."""
    rng, torch_rng = random.Random(1), torch.Generator().manual_seed(1)
    lengths = [(rng.randint(28, 30), rng.randint(MAX_NEW // 4, MAX_NEW)) for _ in range(NUM_PROMPTS * NUM_SAMPLES)]
    sequences = [torch.randint(VOCAB, (prompt + new,), generator=torch_rng) for prompt, new in lengths]
    columns = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(sequence)) for sequence in sequences],
        "response_mask": [torch.ones(new, dtype=torch.bool) for _, new in lengths],
        "advantages": [torch.randn(1, generator=torch_rng).expand(new) for _, new in lengths],
        "rollout_log_probs": [torch.full((new,), -8.3) for _, new in lengths],
    }
    return TensorDict({name: ragged(rows) for name, rows in columns.items()}, batch_size=[len(lengths)])


def make_batch(columns: TensorDict) -> KVBatchMeta:
    keys = [TrajectoryKey(uid=f"u{row // NUM_SAMPLES}", session_id=row % NUM_SAMPLES, index=0) for row in range(len(columns))]
    lengths = [len(row) for row in rows_of(columns["input_ids"])]
    return KVBatchMeta(partition_id="train", keys=tuple(map(str, keys)), tags=tuple({"seq_len": length} for length in lengths))


def seconds_of(update: Callable[[], object], updates: int) -> float:
    start = time.perf_counter()
    for _ in range(updates):
        update()
    return time.perf_counter() - start


def measure(num_ranks: int, rounds: int, updates: int, folder: Path, *, reshard: bool) -> dict[str, Any]:
    """Medians over the rounds, of seconds an update."""
    model, columns = make_model(folder), make_columns()
    batch = make_batch(columns)
    split = balance(batch, num_ranks, groups_each=NUM_PROMPTS)
    order = [batch.keys.index(key) for key in split.batch.keys]
    dealt = TensorDict(
        {name: ragged([rows_of(columns[name])[row] for row in order]) for name in columns.keys()},  # noqa: SIM118 -- a TensorDict
        batch_size=[len(batch)],
    )
    alone, ranks = open_learners(make_run(model, 0)), RankedLearners(make_run(model, num_ranks, reshard=reshard))
    try:
        ranks.start()
        ranks.open(1000)

        def by_one() -> object:
            return alone.actor.update(columns, batch.groups, batch.sessions, seed=1)

        def by_all() -> object:
            return ranks.actor.update(dealt, split.batch.groups, split.batch.sessions, seed=1, shards=split.row_shards)

        by_one(), by_all()
        pairs = [(seconds_of(by_one, updates) / updates, seconds_of(by_all, updates) / updates) for _ in range(rounds)]
        apart = _distance(alone.actor.snapshot(0).tensors, ranks.snapshot(0).tensors)
    finally:
        ranks.close()
    one, all_ = (statistics.median(times) for times in zip(*pairs, strict=True))
    tokens = sum(int(tag["seq_len"]) for tag in batch.tags)
    return {
        "ranks": num_ranks,
        "one_rank_s": round(one, 4),
        "ranks_s": round(all_, 4),
        "speedup": round(statistics.median(a / b for a, b in pairs), 3),
        "tokens_per_s": round(tokens / all_),
        "rounds": rounds,
        "weights_apart_in_lr": round(apart / LR, 6),
    }


def _distance(one: Any, two: Any) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=2, help="a round and side")
    parser.add_argument("--reshard", action="store_true", help="actor.fsdp_config.reshard_after_forward = true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        result = measure(args.ranks, args.rounds, args.updates, Path(work) / "model", reshard=args.reshard)
    print(f"an update of 64 trajectories, median of {args.rounds}: one rank {result['one_rank_s']:.3f} s, ", end="")
    print(f"{args.ranks} ranks {result['ranks_s']:.3f} s: {result['speedup']:.2f} x")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
