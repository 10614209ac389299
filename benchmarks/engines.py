"""Tokens per CPU second of the embedded engine against vLLM, alternating in one run.

    .venv-vllm/bin/python benchmarks/engines.py [--engines torch vllm vllm_alone] [--rows 8 64 256] [--threads 1] [--repeats 3]
                                                [--distinct] [--no-seeds] [--json]

The model is that of `benchmarks/generate.py` (Qwen2 of 4 layers, hidden 256, heads of 64, vocabulary 4096), fp32 and temperature 1;
prompts of 27-31 tokens in groups of 8 equal ones, 128 new tokens a row, log-probs of the sampled tokens, a seed for each request.

    torch       the embedded engine
    vllm        the engine as `rollout.name = "vllm"` opens it: AsyncLLM here, its core and its worker in processes of their own
    vllm_alone  vLLM's LLM, core and worker in one process: the least that vLLM takes by itself

Each engine lives in a process of its own, with 256 slots. CPU seconds are those of that process and of all that it has started, all
threads together, from the first request to the last answer: starts are not counted, nor is a first round of each size. Rounds
alternate between engines, and one engine works at a time, so a busy machine does the same to all of them.

JSON: tokens_per_cpu_s[engine][rows], medians, and ratios[rows]: medians of torch over vllm, round by round.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.ports import RolloutEngine
    from asyncrl.rollout.vllm.settings import VLLMSettings

MAX_NEW, CONTEXT, SLOTS, GROUP = 128, 160, 256, 8
START_S, ROUND_S = 300.0, 300.0
"""Deadlines, for a machine with much else to do."""

Prompts = list[list[int]]


def make_prompts(rows: int, group: int = GROUP) -> Prompts:
    """27-31 random ids each, in groups of equal ones."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(27, 31))] for _ in range(-(-rows // group))]
    return [prompts[row // group] for row in range(rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an engine's process is told."""

    folder: Path
    threads: int
    has_seeds: bool
    """Requests to vLLM alone have seeds of their own, as a run's have."""


# --- in a process of its own ----------------------------------------------------------------------------------------------------


def serve_torch(pipe: Connection, setting: Setting) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.rollout.torch_engine import TorchEngine

    torch.set_num_threads(setting.threads)
    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32)
    asyncio.run(_serve_port(pipe, TorchEngine(model, max_num_seqs=SLOTS, context_len=CONTEXT)))


async def _serve_port(pipe: Connection, engine: "RolloutEngine") -> None:
    """Rounds through the port."""
    from asyncrl.ports import GenerateRequest, SamplingParams

    async def run(prompts: Prompts, seed: int) -> int:
        sampling = SamplingParams(max_tokens=MAX_NEW)
        requests = [
            GenerateRequest(request_id=f"{seed}_{row}", prompt_ids=ids, sampling=sampling, seed=seed * 1000 + row)
            for row, ids in enumerate(prompts)
        ]
        return sum([len(made.token_ids) for made in await asyncio.gather(*map(engine.generate, requests))])

    async with engine:
        pipe.send("ready")
        while (asked := await asyncio.to_thread(_receive, pipe)) is not None:
            pipe.send(await run(*asked))


def serve_vllm(pipe: Connection, setting: Setting) -> None:
    asyncio.run(_serve_vllm(pipe, setting))


async def _serve_vllm(pipe: Connection, setting: Setting) -> None:
    from asyncrl.rollout.publication import Publisher, Shelf
    from asyncrl.rollout.vllm.engine import VLLMEngine
    from asyncrl.world import RealWorld

    async with RealWorld() as world:
        shelf = Shelf(world=world)
        try:
            publisher = Publisher("shm", str(setting.folder), shelf)
            await _serve_port(pipe, VLLMEngine(_vllm_settings(setting), world=world, publisher=publisher))
        finally:
            await shelf.close()


def serve_alone(pipe: Connection, setting: Setting) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from asyncrl.rollout.vllm.settings import engine_args

    args = engine_args(_vllm_settings(setting))
    llm = LLM(**{name: value for name, value in args.items() if name not in {"worker_extension_cls", "weight_transfer_config"}})
    pipe.send("ready")
    while (asked := _receive(pipe)) is not None:
        prompts, seed = asked
        seeds = [seed * 1000 + row if setting.has_seeds else None for row in range(len(prompts))]
        params = [SamplingParams(max_tokens=MAX_NEW, ignore_eos=True, logprobs=0, detokenize=False, seed=each) for each in seeds]
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        pipe.send(sum(len(answer.outputs[0].token_ids) for answer in answers))


def _vllm_settings(setting: Setting) -> "VLLMSettings":
    from asyncrl.rollout.vllm.settings import VLLMSettings

    return VLLMSettings(
        model=str(setting.folder), dtype="float32", max_num_seqs=SLOTS, context_len=CONTEXT, num_threads=setting.threads
    )


def _receive(pipe: Connection) -> tuple[Prompts, int] | None:
    """The next round; None when nobody asks any more."""
    try:
        asked: tuple[Prompts, int] | None = pipe.recv()
    except EOFError:
        return None
    return asked


# --- the rounds -----------------------------------------------------------------------------------------------------------------

SERVERS: dict[str, Callable[[Connection, Setting], None]] = {
    "torch": serve_torch,
    "vllm": serve_vllm,
    "vllm_alone": serve_alone,
}


@dataclass(slots=True, kw_only=True)
class Served:
    """An engine in a process of its own."""

    process: BaseProcess
    pipe: Connection

    def wait(self, timeout_s: float) -> Any:
        if not self.pipe.poll(timeout_s):
            raise SystemExit(f"{self.process.name}: no answer within {timeout_s:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.process.name}: its process has ended") from None

    def rate(self, prompts: Prompts, seed: int) -> float:
        """Tokens per CPU second of one round."""
        before = cpu_s(self.process.pid or 0)
        self.pipe.send((prompts, seed))
        tokens = int(self.wait(ROUND_S))
        return tokens / (cpu_s(self.process.pid or 0) - before)

    def close(self) -> None:
        """It ends by itself when nobody can ask any more."""
        self.pipe.close()
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and of all below it, by the CPU clock that Linux gives each process."""
    return time.clock_gettime(~pid << 3 | 2) + sum(cpu_s(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def open_engine(stack: ExitStack, name: str, setting: Setting) -> Served:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=SERVERS[name], args=(there, setting), name=name)
    process.start()
    there.close()
    served = Served(process=process, pipe=here)
    stack.callback(served.close)
    served.wait(START_S)
    return served


def measure(names: Sequence[str], sizes: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Rates of all engines: rounds of each size after one that is not counted."""
    rates: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in sizes} for name in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runpy.run_path(str(Path(__file__).with_name("generate.py")))["make_model"]().save_pretrained(folder)
        setting = Setting(folder=folder, threads=args.threads, has_seeds=args.seeds)
        engines = {name: open_engine(stack, name, setting) for name in names}
        for number in range(args.repeats + 1):
            for rows in sizes:
                prompts = make_prompts(rows, group=1 if args.distinct else GROUP)
                for name, engine in engines.items():
                    rates[name][rows].append(engine.rate(prompts, seed=number * 1000 + rows))
    return summary({name: {rows: values[1:] for rows, values in of.items()} for name, of in rates.items()})


def summary(rates: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    medians = {name: {str(rows): round(statistics.median(each), 1) for rows, each in of.items()} for name, of in rates.items()}
    ratios = {
        f"torch / {name}": {str(rows): round(_ratio(rates["torch"][rows], each), 3) for rows, each in of.items()}
        for name, of in rates.items()
        if name != "torch" and "torch" in rates
    }
    return {"bench": "engines", "tokens_per_cpu_s": medians, "ratios": ratios}


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def table(result: dict[str, Any]) -> str:
    rows = {**result["tokens_per_cpu_s"], **result["ratios"]}
    sizes = next(iter(rows.values()))
    lines = ["tokens per CPU s    " + "".join(f"{size + ' rows':>12}" for size in sizes)]
    lines += [f"{name:20}" + "".join(f"{value:12.3f}" for value in of.values()) for name, of in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = list(SERVERS) if find_spec("vllm") else ["torch"]
    parser.add_argument("--engines", nargs="+", choices=here, default=here, help="where vLLM is not installed, torch alone")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--distinct", action="store_true", help="all prompts different instead of groups of 8")
    parser.add_argument("--no-seeds", dest="seeds", action="store_false", help="vLLM alone samples without seeds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")
    result = measure(args.engines, args.rows, args)
    print(table(result))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
