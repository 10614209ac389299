"""CPU seconds of one GRPO step, ours against TRL's GRPOTrainer: same model, prompts and lengths, alternating A B A B.

A step: 8 prompts x 8 samples of up to 128 new tokens, rewards, advantages, one optimizer step; neither side makes a pass for old
log-probs. Ours is the product's engine, advantages and actor; publishing the new weights to the engine is part of the step.
TRL runs in an environment of its own (`benchmarks/peers/trl_bench.py` says which); without one, our side runs alone on random ids.

    python benchmarks/grpo_step.py --peer-python PATH [--threads 2 1] [--rounds 5] [--json]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.algorithms.advantages import grpo_advantages
from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import GenerateRequest, Generation, SamplingParams
from asyncrl.protocol.ragged import ragged
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.training.actor import Actor
from asyncrl.training.model import load_model

PEER = Path(__file__).parent / "peers" / "trl_bench.py"
NUM_PROMPTS, NUM_SAMPLES, MAX_NEW = 8, 8, 128
VOCAB, EOS = 4096, 2
MICRO_BATCH_TOKENS = 4096
"""Fits the caches of a core; 16,384 costs a fifth more."""

Numbers = dict[str, float]


class Clock:
    """Process CPU seconds by phase; `rest` is what the phases leave of the whole."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.phases[phase] += time.process_time() - start

    def take(self) -> Numbers:
        taken, self.phases = dict(self.phases), defaultdict(float)
        return taken | {"rest": taken["step"] - sum(taken[phase] for phase in ("generate", "forward", "backward"))}


class OurSide:
    """Engine and actor on one model folder."""

    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        self.run = _run_config(folder)
        self.prompts = prompts
        self.clock = Clock()
        self.actor = Actor(self.run)
        self.hf = load_model(self.run.model)
        longest = max(map(len, prompts))
        self.engine = TorchEngine(load_model(self.run.model), max_num_seqs=NUM_PROMPTS * NUM_SAMPLES, context_len=longest + MAX_NEW)
        _time_actor(self.actor, self.clock)

    async def step(self, number: int) -> Numbers:
        """One step; CPU seconds of its phases, and the number of new tokens."""
        with self.clock.measure("step"):
            prompts = [self.prompts[(number * NUM_PROMPTS + at) % len(self.prompts)] for at in range(NUM_PROMPTS)]
            rows = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
            with self.clock.measure("generate"):
                answers = await _generate(self.engine, rows, number)
            columns, uids = _columns(rows, answers)
            self.actor.update(columns, uids)
            await self.engine.publish(number + 1, self.actor.snapshot(number + 1))
        return self.clock.take() | {"tokens": float(sum(len(answer.token_ids) for answer in answers))}

    def hf_rate(self, number: int) -> float:
        """Tokens per CPU second of `generate` on the same prompts."""
        prompts = self.prompts[:NUM_PROMPTS]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
        ids = torch.tensor(padded)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, top_k=0, max_new_tokens=MAX_NEW, min_new_tokens=MAX_NEW, pad_token_id=0, eos_token_id=None
        )
        torch.manual_seed(number)
        start = time.process_time()
        with torch.inference_mode():
            out = cast("Any", self.hf).generate(ids, attention_mask=(ids != 0).long(), generation_config=config)
        return float(out.shape[0] * (out.shape[1] - longest) / (time.process_time() - start))


def _run_config(folder: Path) -> TrainRun:
    tree = {
        "data": {"train_files": ["-"], "train_batch_size": NUM_PROMPTS, "max_response_length": MAX_NEW},
        "model": {"path": str(folder)},
        "rollout": {"n": NUM_SAMPLES},
        "actor": {"ppo_max_token_len_per_gpu": MICRO_BATCH_TOKENS, "optim": {"lr": 1e-5}},
        "trainer": {"total_training_steps": 1000},
    }
    return parse_run(TrainRun, tree)


def _time_actor(actor: Actor, clock: Clock) -> None:
    """Charge the policy's forward and the learner's backward to their phases."""
    learner = cast("Any", actor).learner
    for owner, name, phase in ((learner.module, "forward", "forward"), (learner, "backward", "backward")):
        plain = getattr(owner, name)

        def timed(*args: object, plain: Any = plain, phase: str = phase, **named: object) -> object:
            with clock.measure(phase):
                return plain(*args, **named)

        setattr(owner, name, timed)


async def _generate(engine: TorchEngine, rows: list[list[int]], number: int) -> list[Generation]:
    sampling = SamplingParams(max_tokens=MAX_NEW, stop_token_ids=(EOS,))
    requests = [
        GenerateRequest(request_id=f"{number}-{at}", prompt_ids=prompt, sampling=sampling, seed=number * 1000 + at)
        for at, prompt in enumerate(rows)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
    return [task.result() for task in tasks]


def _columns(rows: list[list[int]], answers: list[Generation]) -> tuple[TensorDict, list[str]]:
    """Columns of the update. The reward is cheap and differs between samples, as the peer's: the share of ids below 300."""
    responses = [torch.tensor(answer.token_ids) for answer in answers]
    sequences = [torch.cat([torch.tensor(prompt), response]) for prompt, response in zip(rows, responses, strict=True)]
    masks = [torch.ones(len(response), dtype=torch.bool) for response in responses]
    rewards = torch.stack([(response < 300).float().mean() for response in responses])
    groups = torch.arange(len(rows)) // NUM_SAMPLES
    scalar = grpo_advantages(rewards, groups, torch.ones(len(rows), 1, dtype=torch.bool))
    columns = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(sequence)) for sequence in sequences],
        "response_mask": masks,
        "advantages": [value * mask for value, mask in zip(scalar, masks, strict=True)],
        "rollout_log_probs": [torch.tensor(answer.log_probs) for answer in answers],
    }
    batch = TensorDict({name: ragged(values) for name, values in columns.items()}, batch_size=[len(rows)])
    return batch, [str(int(group)) for group in groups]


def run_peer(python: str, threads: int, work: Path) -> Numbers:
    """One warm-up step and one counted step of TRL, in its own process: CPU seconds by phase."""
    command = [python, str(PEER), "--threads", str(threads), "--steps", "2", "--work", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
    seconds = json.loads(done.stdout.strip().splitlines()[-1])["median_s"]
    phases = {"generate": seconds["cpu:generate"], "forward": seconds["cpu:loss_fwd"], "backward": seconds["cpu:backward"]}
    return phases | {"step": seconds["cpu"], "rest": seconds["cpu"] - sum(phases.values())}


def peers_model(work: Path) -> tuple[Path, list[list[int]]]:
    """The folder that the peer's script made, and its prompts."""
    folder = work / f"qwen2-L4-H256-V{VOCAB}"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rng = random.Random(1)
    texts = [f"compute {rng.randint(0, 99)} + {rng.randint(0, 99)} and answer" for _ in range(512)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, tokenize=True) for chat in chats]
    return folder, cast("list[list[int]]", rendered)


def own_model(work: Path) -> tuple[Path, list[list[int]]]:
    """A folder with a random model of the same shape, and prompts of random ids of the same lengths."""
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
    model.save_pretrained(work / "own")
    rng = random.Random(1)
    return work / "own", [[rng.randrange(3, VOCAB) for _ in range(rng.randint(28, 30))] for _ in range(512)]


async def measure(threads: int, rounds: int, peer_python: str, work: Path) -> dict[str, Any]:
    """Medians over the rounds: ours, the peer's, and Hugging Face `generate`, one after another in each round."""
    if peer_python:
        run_peer(peer_python, threads, work)  # makes the model
    torch.set_num_threads(threads)
    side = OurSide(*(peers_model(work) if peer_python else own_model(work)))
    ours: list[Numbers] = []
    peers: list[Numbers] = []
    hf: list[float] = []
    async with side.engine:
        await side.step(0)
        side.hf_rate(0)
        for number in range(1, rounds + 1):
            ours.append(await side.step(number))
            if peer_python:
                peers.append(run_peer(peer_python, threads, work))
            hf.append(side.hf_rate(number))
    return _summary(ours, peers, hf)


def _summary(ours: list[Numbers], peers: list[Numbers], hf: list[float]) -> dict[str, Any]:
    mine, theirs = _medians(ours), _medians(peers)
    return {
        "cpu_s": round(mine["step"], 3),
        "trl_cpu_s": round(theirs["step"], 3) if peers else None,
        "ratio": round(mine["step"] / theirs["step"], 3) if peers else None,
        "generate_tokens_per_cpu_s": round(statistics.median(each["tokens"] / each["generate"] for each in ours), 1),
        "hf_tokens_per_cpu_s": round(statistics.median(hf), 1),
        "phases": {name: round(value, 3) for name, value in mine.items()},
        "trl_phases": {name: round(value, 3) for name, value in theirs.items()},
        "rounds": len(ours),
    }


def _medians(rounds: list[Numbers]) -> Numbers:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]} if rounds else {}


def _print(threads: int, result: dict[str, Any]) -> None:
    print(f"\n{threads} thread(s), median of {result['rounds']}: process CPU seconds a step")
    print(f"{'':12s}{'asyncrl':>10s}{'TRL':>10s}")
    for phase in ("generate", "forward", "backward", "rest", "step"):
        theirs = result["trl_phases"].get(phase)
        print(f"{phase:12s}{result['phases'][phase]:10.2f}{'-' if theirs is None else f'{theirs:.2f}':>10s}")
    print(f"ratio {result['ratio']}; tokens per CPU second: engine {result['generate_tokens_per_cpu_s']:.0f}, ", end="")
    print(f"generate() {result['hf_tokens_per_cpu_s']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help="thread counts; the JSON's own keys are the first's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", default=os.environ.get("TRL_PYTHON", ""), help="Python with TRL 1.16.0; $TRL_PYTHON")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    if not args.peer_python:
        print("no --peer-python: TRL is not measured")
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        for threads in args.threads:
            results[threads] = asyncio.run(measure(threads, args.rounds, args.peer_python, Path(work)))
            _print(threads, results[threads])
    if args.json:
        print(json.dumps({**results[args.threads[0]], "threads": args.threads[0], "by_threads": results}))


if __name__ == "__main__":
    main()
