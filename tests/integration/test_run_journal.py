"""The journal of a whole run: what it says afterwards, and what an end of the process, a second process or a full disk may cost."""

import asyncio
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import assembly
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import CheckpointError, JournalDamagedError, JournalInUseError
from asyncrl.journal import reading
from asyncrl.journal.entries import Saved
from asyncrl.journal.sqlite import open_journal
from asyncrl.observe.metrics import read_metrics
from asyncrl.preflight import check_train


async def train(config: Path, *overrides: str, resume: bool = False) -> Path:
    run = load_run(TrainRun, config, overrides)
    inputs = await asyncio.to_thread(check_train, run)
    return await assembly.run_training(run, inputs, resume=resume)


def kept(folder: Path, weights_step: int = 0) -> Saved:
    return reading.load(folder / "journal.db", weights_step)


def keys_of(saved: Saved) -> dict[int, tuple[str, ...]]:
    return {step: record.keys for step, record in saved.records.items()}


def start(config: Path, *arguments: str, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", "train", str(config), *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=before,
    )


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"the run ended before step {step}: {''.join(seen)}")


async def test_a_run_leaves_a_journal_that_agrees_with_its_counts(config: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=4")
    saved, last = kept(folder, 4), read_metrics(folder / "metrics.jsonl")[-1]
    assert (saved.rows, saved.leases, saved.turns) == ({}, {}, {})
    assert [(step, record.tries, len(record.keys)) for step, record in saved.records.items()] == [(4, 0, 4)]
    assert len(kept(folder, 3).rows) == 6, "four trajectories and two prompts, for the older checkpoint"
    assert saved.counters["admitted"] == saved.counters["cursor"] == last["admission/admitted"] == 8
    assert (saved.counters["purged_step"], saved.counters["purged_groups"]) == (3, 6)


async def test_without_checkpoints_nothing_piles_up(config: Path) -> None:
    folder = await train(config, "trainer.total_training_steps=12", "trainer.save_freq=0")
    rows = read_metrics(folder / "metrics.jsonl")
    assert {row["transfer_queue/records"] for row in rows} == {1}, "its own, which is forgotten when its numbers are written"
    saved = kept(folder, 12)
    assert (saved.rows, saved.turns, saved.leases) == ({}, {}, {})
    assert list(saved.records) == [12], "the last step's, for the checkpoint at the end"
    assert (saved.counters["purged_step"], saved.counters["purged_groups"]) == (11, 22)


async def test_a_run_without_a_journal_leaves_none_and_is_not_resumed(config: Path) -> None:
    folder = await train(config, "store.journal=false", "trainer.total_training_steps=1")
    assert not (folder / "journal.db").exists()
    with pytest.raises(CheckpointError, match=r"--resume needs store\.journal = true"):
        await train(config, "store.journal=false", resume=True)
    with pytest.raises(CheckpointError, match=r"the journal ends with step 0, the newest whole checkpoint is of step 1"):
        await train(config, resume=True)


EXACT = ("rollout.deterministic=true", "trainer.save_freq=1", "trainer.total_training_steps=4")


async def test_a_lost_step_is_done_again_on_its_batch_and_ends_in_the_same_weights(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped for it, and no prompt is admitted twice."""
    folder = await train(config, *EXACT, "trainer.max_ckpt_to_keep=3")
    before, weights = kept(folder), (folder / "hf/model.safetensors").read_bytes()
    (folder / "hf/model.safetensors").unlink()
    for step in (3, 4):
        (folder / f"checkpoints/global_step_{step}/rng.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        await train(config, *EXACT, "trainer.max_ckpt_to_keep=3", resume=True)
    assert [f"global_step_{step}: rng.safetensors has 0 bytes" in caplog.text for step in (2, 3, 4)] == [False, True, True]
    after = kept(folder)
    assert (keys_of(after), after.counters) == (keys_of(before), before.counters)
    assert (folder / "hf/model.safetensors").read_bytes() == weights
    assert [(row["step"], row["incarnation"]) for row in read_metrics(folder / "metrics.jsonl")][-2:] == [(3, 1), (4, 1)]


async def test_a_run_that_left_no_checkpoint_goes_on_from_its_beginning(config: Path) -> None:
    """Step 0 counts as one, so the first two steps are not purged before there are two others."""
    folder = await train(config, *EXACT[:2], "trainer.total_training_steps=1")
    before, weights = kept(folder), (folder / "hf/model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    await train(config, *EXACT[:2], "trainer.total_training_steps=1", resume=True)
    after = kept(folder)
    assert (keys_of(after), after.counters) == (keys_of(before), before.counters)
    assert (folder / "hf/model.safetensors").read_bytes() == weights


async def test_a_run_that_was_killed_before_its_first_group_begins(config: Path) -> None:
    run = load_run(TrainRun, config)
    inputs = await asyncio.to_thread(check_train, run)
    folder = assembly._new_folder(run, inputs.train_rows)
    open_journal(folder.journal).close()  # there is a journal, and nothing in it
    assert await train(config, "trainer.total_training_steps=1", resume=True) == folder.path
    assert kept(folder.path).counters["admitted"] == 2


async def test_a_run_folder_without_a_start_is_passed_over(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = await train(config, "trainer.total_training_steps=1")
    second = await train(config, "trainer.total_training_steps=1")
    (second / "start.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert await train(config, "trainer.total_training_steps=2", resume=True) == first
    assert "small-2 has no start.json, so its run never began" in caplog.text
    (first / "start.json").unlink()
    with pytest.raises(CheckpointError, match=r"--resume: no run in .*small-2, .*small has begun; start a new run"):
        await train(config, resume=True)


async def test_another_model_is_refused_and_a_moved_one_is_not(config: Path, tmp_path: Path) -> None:
    model = Path(load_run(TrainRun, config).model.path)
    shutil.copytree(model, tmp_path / "mine")
    await train(config, f"model.path={tmp_path}/mine", "trainer.total_training_steps=1")
    (tmp_path / "mine").rename(tmp_path / "moved")
    moved = (f"model.path={tmp_path}/moved", "trainer.total_training_steps=2")
    await train(config, *moved, resume=True)
    weights = tmp_path / "moved/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"began with other weights, tokenizer or chat template than model\.path = '.*moved' has"
    ):
        await train(config, *moved, resume=True)


async def test_a_checkpoint_older_than_the_journal_is_refused(config: Path, tmp_path: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=1")
    shutil.copytree(folder / "checkpoints/global_step_1", tmp_path / "old")
    await train(config, "trainer.save_freq=1", "trainer.total_training_steps=4", resume=True)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match=r"begins after step 3, the newest whole checkpoint is of step 0 \(there is none\)"):
        await train(config, "trainer.total_training_steps=5", resume=True)
    shutil.copytree(tmp_path / "old", folder / "checkpoints/global_step_1")
    (folder / "checkpoints/global_step_4").mkdir()
    text = r"small: the journal begins after step 3, the newest whole checkpoint is of step 1; .*; damaged: .*_step_4: not finished"
    with pytest.raises(CheckpointError, match=text):
        await train(config, "trainer.total_training_steps=5", resume=True)
    assert (folder / "checkpoints/global_step_4").is_dir(), "a run that is refused changes nothing"


async def test_a_journal_that_was_removed_is_missed(config: Path) -> None:
    """Without it nobody knows what the weights have learned: prompts would be trained on twice."""
    folder = await train(config, "trainer.total_training_steps=2")
    (folder / "journal.db").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"ends with step 0, the newest whole checkpoint is of step 2: the steps between"):
            await train(config, "trainer.total_training_steps=3", resume=True)
    assert (folder / "checkpoints/global_step_2/DONE").is_file()


@pytest.mark.long
def test_a_killed_run_is_resumed_as_if_it_had_not_been(config: Path) -> None:
    """kill -9 in the middle; the weights in the end are those of a run that nobody killed."""
    whole = asyncio.run(train(config, "trainer.total_training_steps=8", "rollout.deterministic=true", "trainer.save_freq=2"))
    arguments = ["trainer.total_training_steps=8", "rollout.deterministic=true", "trainer.save_freq=2"]
    process = start(config, "trainer.experiment_name=killed", *arguments)
    try:
        wait_for_step(process, 5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    folder = whole.with_name("killed")
    before = kept(folder)
    assert before.counters["admitted"] >= 10
    assert max(before.records) >= 5
    asyncio.run(train(config, "trainer.experiment_name=killed", *arguments, resume=True))
    assert (whole / "hf/model.safetensors").read_bytes() == (folder / "hf/model.safetensors").read_bytes()
    after = kept(folder)
    groups = after.counters["purged_groups"] + sum(len(record.uids) for record in after.records.values())
    assert (groups, after.counters["admitted"], after.counters["cursor"]) == (16, 16, 16)
    assert not [name for name in after.counters if name.startswith("dropped/")]
    assert {step: keys for step, keys in keys_of(before).items() if step in after.records}.items() <= keys_of(after).items()


@pytest.mark.long
def test_a_second_process_on_the_run_is_refused(config: Path) -> None:
    process = start(config, "trainer.total_training_steps=100000", "trainer.save_freq=1")
    try:
        wait_for_step(process, 2)
        with pytest.raises(JournalInUseError, match=r"small/journal\.db is in use"):
            asyncio.run(train(config, resume=True))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err


async def test_a_refused_second_process_forgets_no_checkpoint(config: Path) -> None:
    """It found one that the run had not finished yet; when it goes on from an older one, the run is further."""
    folder = await train(config, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3", "trainer.total_training_steps=3")
    newest = folder / "checkpoints/global_step_3"
    manifest = newest / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    running = open_journal(folder / "journal.db")
    with pytest.raises(JournalInUseError):
        await train(config, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3", "trainer.total_training_steps=4", resume=True)
    running.close()
    manifest.write_bytes(whole)
    assert (newest / "DONE").is_file()


@pytest.mark.long
def test_a_full_disk_ends_the_run_with_its_reason_and_what_was_kept_is_whole(config: Path) -> None:
    def no_large_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

    arguments = ["trainer.total_training_steps=100000", "trainer.log_trajectories=0", "trainer.trace_groups=0"]
    process = start(config, *arguments, before=no_large_files)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 3, err
    (error,) = re.findall(r"^error: .*$", err, re.MULTILINE)
    assert "journal.db" in error
    saved = kept(config.parent / "runs/small")
    assert saved.counters["admitted"] > 0


async def test_a_damaged_journal_is_one_line_and_keeps_the_checkpoints(config: Path) -> None:
    folder = await train(config, "trainer.total_training_steps=2")
    journal = folder / "journal.db"
    journal.write_bytes(journal.read_bytes()[:20_000])
    with pytest.raises(JournalDamagedError, match=r"small/journal\.db"):
        await train(config, "trainer.total_training_steps=3", resume=True)
    assert (folder / "checkpoints/global_step_2/DONE").is_file()
