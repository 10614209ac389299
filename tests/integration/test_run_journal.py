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
from asyncrl.journal.entries import Saved
from asyncrl.journal.sqlite import open_journal
from asyncrl.observe.metrics import read_metrics
from asyncrl.preflight import check_train


async def train(config: Path, *overrides: str, resume: bool = False) -> Path:
    run = load_run(TrainRun, config, overrides)
    inputs = await asyncio.to_thread(check_train, run)
    return await assembly.run_training(run, inputs, resume=resume)


def kept(folder: Path) -> Saved:
    journal = open_journal(folder / "journal.db")
    saved = journal.load()
    journal.close()
    return saved


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
    saved, last = kept(folder), read_metrics(folder / "metrics.jsonl")[-1]
    assert (saved.rows, saved.leases, saved.turns) == ({}, {}, {})
    assert [(step, record.is_retired, len(record.keys)) for step, record in saved.records.items()] == [(4, True, 4)]
    assert saved.counters["admitted"] == saved.counters["cursor"] == last["admission/admitted"] == 8
    assert (saved.counters["purged_step"], saved.counters["purged_groups"]) == (3, 6)


async def test_without_checkpoints_nothing_piles_up(config: Path) -> None:
    folder = await train(config, "trainer.total_training_steps=12")
    rows = read_metrics(folder / "metrics.jsonl")
    assert {row["transfer_queue/records"] for row in rows[:-1]} == {0}
    saved = kept(folder)
    assert (saved.rows, saved.turns, saved.leases) == ({}, {}, {})
    assert list(saved.records) == [12], "the last step's, for the checkpoint at the end"
    assert (saved.counters["purged_step"], saved.counters["purged_groups"]) == (11, 22)


async def test_a_run_without_a_journal_leaves_none(config: Path) -> None:
    folder = await train(config, "store.journal=false", "trainer.total_training_steps=1")
    assert not (folder / "journal.db").exists()


async def test_a_resumed_run_drops_and_counts_what_was_under_way(config: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=2")
    (folder / "checkpoints/global_step_2/optimizer.safetensors").write_bytes(b"")
    await train(config, "trainer.total_training_steps=3", resume=True)
    saved = kept(folder)
    assert saved.counters["dropped/restart"] == 2, "the two groups of step 2 were trained for nothing"
    assert saved.counters["admitted"] == 8
    assert saved.counters["cursor"] == 6
    assert list(saved.records) == [2, 3], "step 2 again, and step 3"


async def test_after_a_resume_the_older_checkpoint_can_still_be_gone_on_from(config: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=3")
    await train(config, "trainer.total_training_steps=3", resume=True)  # ends where it begins, before any other checkpoint
    (folder / "checkpoints/global_step_3/optimizer.safetensors").write_bytes(b"")
    await train(config, "trainer.total_training_steps=4", resume=True)
    saved = kept(folder)
    groups = saved.counters.get("purged_groups", 0) + sum(len(record.uids) for record in saved.records.values())
    assert (groups, saved.counters["dropped/restart"], saved.counters["admitted"]) == (8, 2, 10)


async def test_a_checkpoint_older_than_the_journal_is_refused(config: Path, tmp_path: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=1")
    shutil.copytree(folder / "checkpoints/global_step_1", tmp_path / "old")
    await train(config, "trainer.save_freq=1", "trainer.total_training_steps=4", resume=True)
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(tmp_path / "old", folder / "checkpoints/global_step_1")
    with pytest.raises(CheckpointError, match=r"journal\.db begins after step 3, the newest whole checkpoint is of step 1; put "):
        await train(config, "trainer.total_training_steps=5", resume=True)


async def test_a_journal_that_was_not_kept_for_some_steps_is_refused_until_it_is_removed(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it counts would be wrong from then on, and what it says of steps would be of others."""
    folder = await train(config, "trainer.total_training_steps=2")
    await train(config, "trainer.total_training_steps=4", "store.journal=false", resume=True)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"journal\.db ends with step 2, the newest whole checkpoint is of step 4"):
            await train(config, "trainer.total_training_steps=5", resume=True)
    (folder / "journal.db").unlink()
    with caplog.at_level(logging.WARNING):
        await train(config, "trainer.total_training_steps=5", resume=True)
    assert f"{folder}/journal.db holds nothing yet: its counts of groups begin after step 4" in caplog.text
    counters = kept(folder).counters
    assert (counters["admitted"], counters["cursor"], counters["purged_step"]) == (2, 10, 4)


async def test_a_journal_that_ended_before_its_first_group_may_be_gone_on_with(config: Path) -> None:
    folder = await train(config, "trainer.total_training_steps=1", "store.journal=false")
    kept(folder)  # makes one, as a process that is killed just then does
    await train(config, "trainer.total_training_steps=2", resume=True)
    assert kept(folder).counters["admitted"] == 2


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
    dropped = sum(count for name, count in after.counters.items() if name.startswith("dropped/"))
    assert (groups, after.counters["admitted"]) == (16, 16 + dropped)


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
