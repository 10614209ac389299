"""How long 64 trajectories x 3 turns take when each turn waits 0.1 s for its tool: everything but the generation is the product's.

    python benchmarks/tool_loop.py [--json]

Scripted: the sampled ids (ScriptedEngine), as in the peer's script (`benchmarks/peers/trl_tool_bench.py`). Real: GroupRunner,
sessions, TransferQueue, chat template, token builder, parser, tool runner with async and sync tools, reward scorer.
`ideal_s` is one `asyncio.gather` over 64 x 3 sleeps. Measured from the first `start` until the last group is terminal.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Sequence
from importlib import resources

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.runner import GroupRunner
from asyncrl.agents.text_codec import TextCodec
from asyncrl.config import TrainRun, parse_run
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Prompt
from asyncrl.rewards.scoring import open_scorer
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.tools import FunctionTool, tool
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = resources.files("asyncrl.examples").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 1,500 tokens over the template's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEMPLATE] * 3 + ["slow tool multiply the answer is 1 2 3 4 5 6 7 8 9 0"] * 50, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def build_tool(latency_s: float, *, is_async: bool) -> FunctionTool:
    async def slow_async(x: int) -> str:
        """Slow tool.

        Args:
            x: A number.
        """
        await asyncio.sleep(latency_s)
        return str(x)

    def slow_sync(x: int) -> str:
        """Slow tool.

        Args:
            x: A number.
        """
        time.sleep(latency_s)
        return str(x)

    return tool(name="slow")(slow_async if is_async else slow_sync)


class Script:
    """Calls the tool with a number of its own in each of the first turns, then answers."""

    def __init__(self, template: ChatTemplate, turns: int) -> None:
        self._template = template
        self._turns = turns
        self._calls = 0

    def __call__(self, request: GenerateRequest) -> Sequence[int]:
        turn = int(request.request_id.rsplit("_", 1)[1])
        if turn >= self._turns:
            return self._template.encode_assistant("the answer is 3")
        self._calls += 1
        return self._template.encode_assistant(
            f'<tool_call>\n{{"name": "slow", "arguments": {{"x": {self._calls}}}}}\n</tool_call>'
        )


def configuration(arguments: argparse.Namespace) -> TrainRun:
    return parse_run(
        TrainRun,
        {
            "data": {"train_files": ["-"], "train_batch_size": arguments.prompts, "max_response_length": 2048},
            "model": {"path": "-"},
            "rollout": {"n": arguments.gens},
            "agent": {"name": "tool_agent", "tools": ["slow"]},
            "reward": {"function": "exact_match"},
        },
    )


async def measure(arguments: argparse.Namespace, template: ChatTemplate, slow: FunctionTool) -> float:
    """Seconds of wall time; fails when a group does."""
    run = configuration(arguments)
    engine = ScriptedEngine(Script(template, arguments.turns))
    async with (
        RealWorld() as world,
        TransferQueue() as queue,
        open_scorer(run.reward, world=world) as scorer,
        GroupRunner(queue, engine, scorer, template, {"slow": slow}, run, world) as runner,
    ):
        prompts = [
            Prompt(
                uid=world.uid(number),
                messages=[{"role": "user", "content": f"multiply {number}"}],
                data_source="bench",
                ground_truth="the answer is 3",
            )
            for number in range(arguments.prompts)
        ]
        start = time.perf_counter()
        for prompt in prompts:
            runner.start(prompt)
        await runner.join()
        wall_s = time.perf_counter() - start
        await check(queue, arguments)
    return wall_s


async def check(queue: TransferQueue, arguments: argparse.Namespace) -> None:
    """All groups finished, each trajectory with all its tool calls and full reward."""
    tags = (await queue.kv_list(TRAIN))[TRAIN]
    assert all(tag["status"] == "finished" for tag in tags.values()), next(tag for tag in tags.values() if "failure" in tag)
    keys = [key for key, tag in tags.items() if not tag.get("is_prompt")]
    columns = await queue.kv_batch_get(keys, partition_id=TRAIN, fields=["num_turns", "reward_score"])
    assert columns["num_turns"].tolist() == [arguments.turns + 1] * arguments.prompts * arguments.gens
    assert columns["reward_score"].tolist() == [1.0] * len(keys)


async def ideal(arguments: argparse.Namespace) -> float:
    async def trajectory() -> None:
        for _ in range(arguments.turns):
            await asyncio.sleep(arguments.latency)

    start = time.perf_counter()
    await asyncio.gather(*[trajectory() for _ in range(arguments.prompts * arguments.gens)])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of one tool call")
    parser.add_argument("--turns", type=int, default=3, help="turns with a tool call")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--gens", type=int, default=8, help="sessions a prompt")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the median is reported")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {"async_s": [], "sync_s": [], "ideal_s": []}
    gc.collect()
    gc.freeze()  # as the trainer does before its first step: a full collection over all libraries' objects takes 0.2 s
    for _ in range(arguments.repeats):  # alternating, so that a busy moment of the machine hits all alike
        for name, is_async in (("async_s", True), ("sync_s", False)):
            slow = build_tool(arguments.latency, is_async=is_async)
            template = ChatTemplate(TextCodec(build_tokenizer()), tool_schemas=[slow.schema])
            figures[name].append(asyncio.run(measure(arguments, template, slow)))
        figures["ideal_s"].append(asyncio.run(ideal(arguments)))
    medians = {name: round(statistics.median(values), 4) for name, values in figures.items()}
    print(f"{arguments.prompts * arguments.gens} trajectories x {arguments.turns} turns x {arguments.latency} s tool")
    for name, values in figures.items():
        print(f"{name:8} median {medians[name]:.3f} of {' '.join(f'{value:.3f}' for value in values)}")
    if arguments.json:
        print(json.dumps({"bench": "tool-loop", **medians}))


if __name__ == "__main__":
    main()
