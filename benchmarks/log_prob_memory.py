"""Memory of log-probs over a large vocabulary: how far a process's peak rises while the actor scores a batch, or learns from it.

Each case runs in a fresh process: a two-layer model of hidden size 128 makes a pass over a short batch, so that its optimizer state
is there, and then one over the rows that are measured, in one micro-batch, half prompt and half answer. The peak is reset between
the two (Linux). `share`: of what one float32 tensor [answer tokens, vocabulary] would take; plain code has two or three of them.

    python benchmarks/log_prob_memory.py [--tokens 8192] [--vocab 150000] [--rows 8] [--json]

JSON: {tensor_bytes, cases: {scoring, scoring_with_squares, update, update_with_entropy: {grown_bytes, peak_bytes, share, cpu_s}}}.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import TrainRun, parse_run
from asyncrl.protocol.ragged import ragged
from asyncrl.training.actor import Actor

CASES = ("scoring", "scoring_with_squares", "update", "update_with_entropy")
GIB = 1 << 30


def make_model(folder: Path, vocab: int) -> None:
    """A Hugging Face directory with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def actor_of(folder: Path, *, entropy: bool, tokens: int) -> Actor:
    """An actor that takes 2 x tokens in one micro-batch."""
    tree = {
        "data": {"train_files": ["-"], "max_prompt_length": tokens, "max_response_length": tokens, "train_batch_size": 2},
        "model": {"path": str(folder)},
        "actor": {"ppo_max_token_len_per_gpu": 2 * tokens, "entropy_coeff": 0.01 if entropy else 0.0, "optim": {"lr": 1e-6}},
        "trainer": {"total_training_steps": 10},
    }
    return Actor(parse_run(TrainRun, tree))


def columns_of(rows: int, tokens: int, vocab: int) -> TensorDict:
    """`rows` rows of as many prompt as answer tokens, `tokens` answer tokens in all."""
    length = tokens // rows
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(vocab, (2 * length,), generator=generator) for _ in range(rows)]
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(2 * length)] * rows,
        "response_mask": [torch.ones(length, dtype=torch.bool)] * rows,
        "advantages": [torch.full((length,), 1.0 if row % 2 else -1.0) for row in range(rows)],
    }
    return TensorDict({name: ragged(values) for name, values in columns.items()}, batch_size=[rows])


def memory_of(name: str) -> int:
    """Bytes of a line of /proc/self/status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run_case(case: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """In this process: how far its peak rises above what it held before."""
    torch.set_num_threads(1)
    actor = actor_of(folder, entropy=case == "update_with_entropy", tokens=args.tokens)

    def run(columns: TensorDict) -> None:
        if case == "scoring":
            actor.log_probs(columns)
        elif case == "scoring_with_squares":
            actor.log_probs_and_squares(columns)
        else:
            actor.update(columns, [f"g{row // 2}" for row in range(len(columns))])

    run(columns_of(args.rows, args.rows * 4, args.vocab))
    columns = columns_of(args.rows, args.tokens, args.vocab)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins at what is held now
    before, began_s = memory_of("VmRSS"), time.process_time()
    run(columns)
    peak = memory_of("VmHWM")
    grown = peak - before
    return {
        "grown_bytes": grown,
        "peak_bytes": peak,
        "share": grown / tensor_bytes(args),
        "cpu_s": round(time.process_time() - began_s, 2),
    }


def tensor_bytes(args: argparse.Namespace) -> int:
    """Of one float32 tensor [tokens, vocabulary]."""
    return int(args.tokens * args.vocab * 4)


def measure(case: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """In a fresh process."""
    sizes = ("--tokens", str(args.tokens), "--vocab", str(args.vocab), "--rows", str(args.rows))
    command = [sys.executable, __file__, *sizes, "--case", case, "--model", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """All cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.model, args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.vocab)
        cases = {case: measure(case, Path(folder), args) for case in CASES}
    if args.json:
        print(json.dumps({"tensor_bytes": tensor_bytes(args), "cases": cases}))
        return
    print(f"one tensor of {args.tokens} tokens x {args.vocab} logits: {tensor_bytes(args) / GIB:.2f} GiB")
    for case, row in cases.items():
        print(
            f"{case:22} +{row['grown_bytes'] / GIB:.2f} GiB ({row['share']:.1%} of it)   peak {row['peak_bytes'] / GIB:.2f} GiB   "
            f"{row['cpu_s']:.1f} CPU s"
        )


if __name__ == "__main__":
    main()
