"""Whole runs of the command line with a real vLLM: to the end, stopped, gone on with, with an engine killed, killed themselves."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config import TrainRun, load_run
from asyncrl.examples.tiny_model import save_model
from asyncrl.observe.metrics import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 120.0
STEPS = ("trainer.total_training_steps=500", "actor.optim.lr=1e-3", "algorithm.old_log_probs=recompute")
VLLM = ("rollout.name=vllm", "rollout.vllm.kv_cache_memory_mib=16", "rollout.vllm.enforce_eager=true")


@pytest.fixture(scope="session")
def model_folder(
    make_lm: Callable[..., LlamaForCausalLM],
    quickstart_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """As that of the other tests, with heads that vLLM's CPU build serves."""
    folder, tokenizer = tmp_path_factory.mktemp("vllm") / "model", quickstart_tokenizer
    model = make_lm(
        "llama",
        vocab_size=len(tokenizer),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(model, tokenizer, folder)
    return folder


# --- a command and its processes ------------------------------------------------------------------------------------------------


class Command:
    """`python -m module arguments` in a session of its own, as a terminal starts it; `lines` are what it has printed so far.

    folder: where modules of the test lie.
    """

    def __init__(self, module: str, *arguments: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        )
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}
        """pid -> pidfd of what it has started."""

    def read_until(self, pattern: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until a line of the output matches; "": until it ends."""
        until = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            line = self.process.stdout.readline()
            if line:
                self.lines.append(line.rstrip("\n"))
            if not line or (pattern and re.search(pattern, line)):
                assert bool(line) == bool(pattern), self.output
                return
        raise AssertionError(f"no {pattern or 'end'!r} within {timeout_s:g} s of:\n{self.output}")

    def watch(self) -> dict[int, str]:
        """Note its processes of now, and return their names."""
        found = descendants(self.process.pid)
        self.pids |= {pid: os.pidfd_open(pid) for pid in found if pid not in self.pids}
        return found

    def end(self, *, timeout_s: float = END_TIMEOUT_S) -> int:
        """Its exit code."""
        self.read_until("", timeout_s=timeout_s)
        return self.process.wait(timeout_s)

    def check_nothing_is_left(self, *, timeout_s: float = 20.0) -> None:
        until = time.monotonic() + timeout_s
        for pid, fd in self.pids.items():
            ended, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
            assert ended, f"process {pid} is left: {name_of(pid)}"

    def close(self) -> None:
        for fd in self.pids.values():
            os.close(fd)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


def descendants(parent: int) -> dict[int, str]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, left = {}, [parent]
    while left:
        for pid in children.get(left.pop(), []):
            found[pid] = name_of(pid)
            left.append(pid)
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "(ended)"


@pytest.fixture
def start(config: Path) -> Iterator[Callable[..., Command]]:
    begun: list[Command] = []

    def start(*overrides: str, resume: bool = False, module: str = "asyncrl.cli") -> Command:
        """`asyncrl train` with overrides, or another module with arguments."""
        train = ["train", str(config), *STEPS, *overrides, *(["--resume"] if resume else [])]
        begun.append(Command(module, *(train if module == "asyncrl.cli" else overrides), folder=config.parent))
        return begun[-1]

    yield start
    for command in begun:
        command.close()


def check_run(folder: Path, *, steps: int) -> None:
    """Whole, by steps that follow each other, with weights that have learned; of tokens whose log-probs are the trainer's."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["training/global_step"] for row in rows] == list(range(1, steps + 1))
    exact = [row["training/rollout_probs_diff_max"] for row in rows if row["staleness/max"] == 0]
    assert 0 < max(exact) < 1e-4
    assert f"global_step_{steps}" in {path.name for path in (folder / "checkpoints").iterdir()}
    start = load_file(Path(load_run(TrainRun, folder / "config.toml").model.path) / "model.safetensors")
    end = load_file(folder / "hf" / "model.safetensors")
    assert any(not start[name].equal(end[name]) for name in end)


def steps_of(command: Command) -> int:
    """The last one that was told."""
    return int(re.findall(r"^step (\d+)/", command.output, re.MULTILINE)[-1])


GROUPS_ALL_TRAINED = r"groups: admitted (\d+) = trained \1 \+ dropped 0 \+ open 0"


# --- runs ------------------------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_an_async_run_at_a_border_and_resume_goes_on(start: Callable[..., Command], tmp_path: Path) -> None:
    mode = (*VLLM, "trainer.mode=async", "trainer.max_staleness=2", "trainer.save_freq=2")
    first = start(*mode)
    first.read_until(r"^step 3/")
    assert any("EngineCore" in name for name in first.watch().values())
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert first.end() == 0, first.output
    first.check_nothing_is_left()
    assert "Traceback" not in first.output
    folder, step = tmp_path / "runs" / "small", steps_of(first)
    assert (folder / "checkpoints" / f"global_step_{step}").is_dir()

    second = start(*mode, f"trainer.total_training_steps={step + 3}", resume=True)
    second.read_until(rf"^step {step + 1}/")
    second.watch()
    assert second.end() == 0, second.output
    second.check_nothing_is_left()
    check_run(folder, steps=step + 3)
    assert max(row["staleness/max"] for row in read_metrics(folder / "metrics.jsonl")) > 0


def test_a_killed_trainer_leaves_no_process_and_a_killed_engine_costs_no_session(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    first = start(*VLLM, "trainer.save_freq=2")
    first.read_until(r"^step 3/")
    first.watch()
    first.process.kill()
    first.process.wait()
    first.check_nothing_is_left()
    folder = tmp_path / "runs" / "small"

    second = start(*VLLM, "trainer.save_freq=2", "trainer.total_training_steps=12", resume=True)
    second.read_until(r"^step [56]/")
    (engine,) = [pid for pid, name in second.watch().items() if "EngineCore" in name]
    os.kill(engine, signal.SIGKILL)
    second.read_until(r"^step 10/")
    second.watch()
    assert second.end() == 0, second.output
    second.check_nothing_is_left()
    assert re.search(GROUPS_ALL_TRAINED, second.output), second.output
    check_run(folder, steps=12)
    assert read_metrics(folder / "metrics.jsonl")[-1]["engine/restarts"] == 1
    assert "EngineCore" in (folder / "incidents.jsonl").read_text(encoding="utf-8")


def test_runs_through_a_server_begin_with_their_own_weights(
    start: Callable[..., Command], tmp_path: Path, model_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ("--context-len=76", "--max-num-seqs=8", "--kv-cache-memory-mib=16", f"--port={port}", "--dtype=float32")
    server = start(str(model_folder), *arguments, module="asyncrl.rollout.vllm.serve")
    server.read_until("startup complete")
    overrides = ("rollout.name=openai", f"rollout.openai.base_urls=http://127.0.0.1:{port}")
    for name, steps in (("small", 3), ("small-2", 2)):
        run = start(*overrides, f"trainer.total_training_steps={steps}")
        assert run.end(timeout_s=START_TIMEOUT_S) == 0, (run.output, server.output)
        assert re.search(GROUPS_ALL_TRAINED, run.output), run.output
        # The second begins anew, though the server has the weights of the first.
        check_run(tmp_path / "runs" / name, steps=steps)
    server.watch()
    os.killpg(server.process.pid, signal.SIGINT)
    server.end()
    server.check_nothing_is_left()
