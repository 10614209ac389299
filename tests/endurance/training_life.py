"""One life of a real trainer, in a process of its own: what it runs, where it may be killed, and what it tells of what it trains.

    kill_training.py -> fork -> [live] -> assembly.run_training, on a World that counts what passes by

The policy is a tiny Llama whose head likes tool calls, so sessions of the real `tool_agent` have several turns, some of them
malformed. The tool loses its connection now and then (the session is retried), and ends the task of one row (its group is dropped).
"""

import functools
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.agents.token_builder import NO_VERSION
from asyncrl.assembly import run_training
from asyncrl.cluster import ForkServer
from asyncrl.config import TrainRun, load_run
from asyncrl.dataset import RLHFDataset
from asyncrl.event_loop import run_loop
from asyncrl.examples.calculator import demonstrations
from asyncrl.examples.demonstrator import MECHANICS
from asyncrl.examples.tiny_model import save_model, train_tokenizer
from asyncrl.preflight import RunInputs
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.stage import Stage, StepScope
from asyncrl.tools import load_tools
from asyncrl.world import RealWorld

T = TypeVar("T")

BATCH, SESSIONS, NUM_ROWS = 2, 2, 12
CALL = '<tool_call>{"name": "wait", "arguments": {}}'

CONFIG = """
[data]
train_files = "rows.jsonl"
val_files = "val.jsonl"
train_batch_size = 2
max_prompt_length = 400
max_response_length = 60

[model]
path = "model"

[rollout]
n = 2
max_num_seqs = 16

[agent]
name = "tool_agent"
tools = ["odd_parts:wait"]
max_turns = 4
max_tokens_per_turn = 12
max_attempts = 9
retry_backoff_s = 0.005

[reward]
function = "odd_parts:score"
num_workers = 1

[eval]
sampled = false

[actor.optim]
lr = 1e-3

[trainer]
experiment_name = "kill"
default_local_dir = "runs"
invariants = "all"
tensorboard = false
log_trajectories = 0
save_freq = 2
test_freq = 3
"""

ODD_PARTS = """
import asyncio
import random

from asyncrl.errors import TaskEndedError

async def score(data_source, solution_str, ground_truth, extra_info):
    return len(str(extra_info["messages"])) % 7 / 6

async def wait(*, tools_kwargs: dict) -> str:
    \"\"\"Wait.\"\"\"
    await asyncio.sleep(random.random() * 0.02)
    if tools_kwargs["ends"]:
        raise TaskEndedError("the task is over")
    if random.random() < tools_kwargs["loses"]:
        raise ConnectionResetError("the tool's server is gone")
    return "done"
"""
"""What the tool answers does not depend on chance, only when it does, and whether a try of the session is lost."""


def prepare(folder: Path) -> None:
    """The model, the rows, the reward and the tool of all runs, in `folder`."""
    (folder / "odd_parts.py").write_text(ODD_PARTS, encoding="utf-8")
    (folder / "kill.toml").write_text(CONFIG, encoding="utf-8")
    rows = [_row(number, ends=number == 5, loses=0.1) for number in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "val.jsonl").write_text(json.dumps(_row(99, ends=False, loses=0.0)) + "\n", encoding="utf-8")
    schemas = [tool.schema for tool in load_tools(["calculator"]).values()]
    tokenizer = train_tokenizer(demonstrations(MECHANICS, 100, seed=1, name="mechanics"), schemas)
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    save_model(_model(tokenizer), tokenizer, folder / "model")


def _row(number: int, *, ends: bool, loses: float) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"what is {number}+0?"}],
        "reward_model": {"ground_truth": str(number)},
        "data_source": "sums",
        "extra_info": {"tools_kwargs": {"wait": {"ends": ends, "loses": loses}}},
    }


def _model(tokenizer: Any) -> LlamaForCausalLM:
    """A random policy that writes whole calls, malformed calls and plain ends, each often: after the call's token its state points
    in one direction, after all others in another, and the head's rows lie along the two."""
    torch.manual_seed(1)
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(sizes)  # type: ignore[no-untyped-call]
    call, close = tokenizer.convert_tokens_to_ids([CALL, "</tool_call>"])
    with torch.no_grad():
        words, head = model.model.embed_tokens.weight, model.lm_head.weight
        words[:, 0] = 2.0
        words[call, :2] = torch.tensor([0.0, 2.0])
        for token, likings in ((call, (1.6, 0.0)), (end, (1.3, 0.0)), (close, (0.0, 1.8))):
            head[token, :2] = torch.tensor(likings)
    return model


# --- where a life may end -------------------------------------------------------------------------------------------------------


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """At the `number`-th pass of `point`: of this process, unless `of` ends another one."""

    point: str
    number: int
    of: Callable[[], None] = _end_this_process


class Points:
    """Counts the passes of this life, and ends it where it should. watch: is told of each."""

    def __init__(self, death: Death | None, watch: Callable[[str], None] = lambda point: None) -> None:
        self.passes: Counter[str] = Counter()
        self._death = death
        self._watch = watch

    def __call__(self, point: str) -> None:
        self.passes[point] += 1
        self._watch(point)
        if self._death is not None and self._death.point == point and self._death.number == self.passes[point]:
            self._death.of()

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Of the file system: what a checkpoint does to its folders."""
        if event == "os.rename" and "global_step" in str(args[0]):
            self("checkpoint: rename")
        elif event == "open" and str(args[0]).endswith("DONE") and args[1] and "w" in str(args[1]):
            self("checkpoint: DONE")
        elif event == "open" and str(args[0]).endswith("manifest.json") and args[1] and "w" in str(args[1]):
            self("checkpoint: manifest")
        elif event in ("os.remove", "shutil.rmtree") and "global_step" in str(args[0]):
            self("checkpoint: prune")


Told = Callable[[dict[str, Any]], None]


class WatchedWorld(RealWorld):
    """The real World; every site and every piece of work off the loop is a point before and after."""

    def __init__(self, points: Points, tell: Told, *, run_seed: int) -> None:
        super().__init__(run_seed=run_seed)
        self._points = points
        self._tell = tell

    async def site(self, name: str) -> None:
        self._points(f"site {name}")

    async def offload(self, function: Callable[..., T], *args: object, pool: str = "files", timeout_s: float | None = None) -> T:
        name = _name_of(function, args)
        self._points(f"before {name}")
        if isinstance(args[0] if args else None, Stage):
            self._note(*args)
        result = await super().offload(function, *args, pool=pool, timeout_s=timeout_s)
        self._points(f"after {name}")
        return result

    def _note(self, stage: Any, scope: Any, columns: Any) -> None:
        """What a stage works on, told before it works: the keys, and the versions of the tokens where it reads them."""
        assert isinstance(scope, StepScope)
        told = {"step": scope.context.step, "version": scope.context.version, "keys": list(scope.batch.keys), "stage": stage.name}
        if "token_versions" in columns.keys():  # noqa: SIM118 -- a TensorDict
            versions = values_of(columns["token_versions"])
            sampled = versions[versions != NO_VERSION]
            told |= {"oldest": int(sampled.min()), "newest": int(sampled.max())}
        self._tell(told)


def _name_of(function: Callable[..., object], args: tuple[object, ...]) -> str:
    if args and isinstance(args[0], Stage):
        return f"stage {args[0].name}"
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", function)).strip("_<>")


# --- a life ---------------------------------------------------------------------------------------------------------------------


def live(
    folder: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    death: Death | None,
    told: Path,
    seed: int,
    fork_server: ForkServer | None = None,
    watch: Callable[[str], None] = lambda point: None,
) -> Counter[str]:
    """Train from the beginning or from what the last life has left, until the end or the death; returns the passes of each point.
    For a forked process.

    told: file that gets a line before each stage.
    """
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    random.seed(seed)
    points = Points(death, watch)
    sys.addaudithook(points.audit)
    out = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def tell(line: dict[str, Any]) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")

    run = load_run(TrainRun, Path("kill.toml"), overrides)
    inputs = RunInputs(
        train_rows=RLHFDataset(run.data.train_files, run.data, max_rows=run.data.max_rows),
        val_rows=RLHFDataset(run.data.val_files, run.data, key="data.val_files", max_rows=run.eval.max_rows),
    )
    world = WatchedWorld(points, tell, run_seed=run.trainer.seed)
    run_loop(run_training(run, inputs, resume=resume, world=world, fork_server=fork_server))
    return points.passes
