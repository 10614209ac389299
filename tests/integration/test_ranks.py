"""Whole runs whose models are in rank processes: as in the one process, and what a rank that is gone or stands still may cost."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncrl import assembly
from asyncrl.cluster import ForkServer
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import RankDiedError, RankHungError
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.trace_file import TraceFile
from asyncrl.preflight import check_train
from asyncrl.training.ranks import RankedLearners

pytestmark = pytest.mark.ranks

LR = 1e-2
DOUBLE = ("model.dtype=float64", "rollout.deterministic=true")
"""Exact enough that no rounding changes a sampled token, so that two runs have the same trajectories."""

Train = Callable[..., Awaitable[Path]]


def on(num_ranks: int, **fsdp: int) -> tuple[str, ...]:
    keys = (f"actor.fsdp_config.{name}={value}" for name, value in fsdp.items())
    return "cluster.kind=local", f"cluster.num_ranks={num_ranks}", *keys


def children_of(server: ForkServer) -> str:
    """Pids; of Linux."""
    listed = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    return listed.read_text() if listed.exists() else ""


@pytest.fixture
def train(config: Path, fork_server: ForkServer) -> Train:
    """train("a.key=value", ..., resume=False): a whole run, of which no rank is left; its folder."""

    async def run_it(*overrides: str, resume: bool = False) -> Path:
        run = load_run(TrainRun, config, overrides)
        inputs = await asyncio.to_thread(check_train, run)
        try:
            return await assembly.run_training(run, inputs, resume=resume, fork_server=fork_server)
        finally:
            assert not children_of(fork_server), "a rank outlived its run"

    return run_it


def furthest(one: Path, two: Path, name: str = "hf/model.safetensors") -> float:
    """The largest difference of a weight, in learning rates."""
    these, those = load_file(one / name), load_file(two / name)
    assert these.keys() == those.keys()
    return max(float((these[key] - those[key]).abs().max()) for key in these) / LR


@pytest.mark.parametrize(
    ("num_ranks", "fsdp"),
    [
        (1, {}),
        (2, {}),
        (2, {"fsdp_size": 1}),
        (2, {"ulysses_sequence_parallel_size": 2}),
        (3, {}),
    ],
    ids=["one", "two", "copies", "sequence", "more ranks than groups"],
)
async def test_a_run_on_ranks_ends_with_the_weights_of_one_in_one_process(
    train: Train, num_ranks: int, fsdp: dict[str, int]
) -> None:
    keys = (*DOUBLE, "actor.ppo_mini_batch_size=1", "trainer.total_training_steps=3")
    alone = await train(*keys, "trainer.experiment_name=alone")
    ranked = await train(*keys, "trainer.experiment_name=ranked", *on(num_ranks, **fsdp))
    assert furthest(alone, ranked) < 1e-6
    ours, theirs = read_metrics(ranked / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    names = [name for name in theirs[0] if name.startswith(("actor/", "critic/", "rollout_corr/", "training/rollout_probs"))]
    assert len(names) > 10
    for row, other in zip(ours, theirs, strict=True):
        assert {name: row[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-5, abs=1e-7)
    told = TraceFile(ranked / "trace.jsonl").heads[0].actor
    sp = fsdp.get("ulysses_sequence_parallel_size", 1)
    assert (told.world, told.sp, told.dp) == (num_ranks, sp, num_ranks // sp)


async def test_a_run_goes_on_with_any_number_of_ranks(train: Train) -> None:
    """In one process, on two ranks, in one process again; as one that never stopped."""
    keys = (*DOUBLE, "trainer.save_freq=1")
    whole = await train(*keys, "trainer.experiment_name=whole", "trainer.total_training_steps=4", *on(2))
    parts = (*keys, "trainer.experiment_name=parts")
    await train(*parts, "trainer.total_training_steps=1")
    await train(*parts, "trainer.total_training_steps=2", *on(2), resume=True)
    await train(*parts, "trainer.total_training_steps=3", *on(2, fsdp_size=1), resume=True)
    folder = await train(*parts, "trainer.total_training_steps=4", resume=True)
    assert [row["training/global_step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert furthest(whole, folder) < 1e-6


async def test_everything_at_once(train: Train, rows: Path) -> None:
    """Async mode, a critic, a reference for both KL terms, correction, evaluation on a snapshot, several updates a batch."""
    folder = await train(
        *on(2),
        "trainer.mode=async",
        "trainer.total_training_steps=4",
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=0.01",
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor.ppo_mini_batch_size=1",
        "actor.ppo_epochs=2",
        "actor.ppo_max_token_len_per_gpu=80",
        f"data.val_files={rows}",
        "eval.max_rows=2",
        "eval.where=snapshot",
        "trainer.test_freq=1",
    )
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if "training/global_step" in row]
    assert [row["training/global_step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["actor/skipped_updates"] == row["critic/skipped_updates"] == 0 for row in steps)
    assert all(row["critic/vf_loss"] > 0 for row in steps)
    assert steps[0]["actor/kl_loss"] != steps[-1]["actor/kl_loss"]
    assert steps[-1]["admission/trained"] == 8
    assert (folder / "checkpoints/global_step_4/critic/model/model.safetensors").is_file()


async def test_a_critic_on_ranks_is_the_one_in_one_process(train: Train) -> None:
    keys = (*DOUBLE, "algorithm.adv_estimator=gae", f"critic.optim.lr={LR}", "trainer.total_training_steps=3")
    alone = await train(*keys, "trainer.experiment_name=alone")
    ranked = await train(*keys, "trainer.experiment_name=ranked", *on(2))
    assert furthest(alone, ranked) < 1e-6
    assert furthest(alone, ranked, "checkpoints/global_step_3/critic/model/model.safetensors") < 1e-6


async def test_adapters_on_ranks_are_those_in_one_process(train: Train) -> None:
    """The reference is the actor without them; the engine gets them alone."""
    lora = ("model.lora_rank=2", "model.lora_publish=adapter", "actor.use_kl_loss=true")
    keys = (*DOUBLE, *lora, "trainer.total_training_steps=3")
    alone = await train(*keys, "trainer.experiment_name=alone")
    ranked = await train(*keys, "trainer.experiment_name=ranked", *on(2))
    assert furthest(alone, ranked) < 1e-6
    rows = read_metrics(ranked / "metrics.jsonl")
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-12)
    assert rows[-1]["actor/kl_loss"] > 1e-9


def test_a_layout_that_the_model_does_not_allow_is_one_line_and_leaves_no_folder(config: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(config), *on(3, tensor_model_parallel_size=3)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert re.search(r"error: .*tensor_model_parallel_size = 3 .* / 3 = ", done.stderr)
    assert not (config.parent / "runs").exists()


# --- ends -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_update(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[RankedLearners], None]], None]:
    """at_update(number, do): `do(ranks)` before that update of the actor."""

    def arrange(number: int, do: Callable[[RankedLearners], None]) -> None:
        plain, seen = RankedLearners.update, [0]

        def update(self: RankedLearners, method: str, *arguments: Any) -> dict[str, float]:
            seen[0] += method == "update_actor"
            if seen[0] == number and method == "update_actor":
                do(self)
            return plain(self, method, *arguments)

        monkeypatch.setattr(RankedLearners, "update", update)

    return arrange


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("signal_", "error", "says"),
    [
        (signal.SIGKILL, RankDiedError, r"rank 1 .*SIGKILL"),
        (signal.SIGSTOP, RankHungError, r"rank 1"),
    ],
    ids=["killed", "stopped"],
)
async def test_a_rank_that_is_lost_ends_the_step_with_its_name_and_the_run_goes_on(
    train: Train,
    at_update: Callable[[int, Callable[[RankedLearners], None]], None],
    signal_: signal.Signals,
    error: type[Exception],
    says: str,
) -> None:
    pids: list[int] = []

    def lose(ranks: RankedLearners) -> None:
        pids.extend(ranks.group.pids)
        os.kill(pids[1], signal_)

    at_update(3, lose)
    keys = (*DOUBLE, *on(2), "trainer.total_training_steps=4", "trainer.save_freq=1")
    with pytest.raises(error, match=says) as caught:
        await train(*keys, "cluster.rank_timeout_s=3")
    assert "--resume" in str(caught.value)
    assert len(pids) == 2
    assert all(map(is_gone, pids))
    folder = await train(*keys, resume=True)
    assert [row["training/global_step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    whole = await train(*keys, "trainer.experiment_name=whole")
    assert furthest(folder, whole) < 1e-6


def test_sigterm_ends_with_a_checkpoint_and_no_rank_is_left(config: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(config), *on(2), "trainer.total_training_steps=100000"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    stopped = re.search(r"stopping after step (\d+)", err)
    assert stopped, err
    folder = Path(out.split("run folder: ")[1].strip())
    assert (folder / f"checkpoints/global_step_{stopped[1]}/DONE").is_file()
