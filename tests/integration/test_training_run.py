"""Whole runs of the real trainer on a tiny model: what a user finds afterwards, and what a failure may cost."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncrl import assembly, cli
from asyncrl.config import TrainRun, load_run
from asyncrl.errors import CheckpointError, DataError, ModelError, TooManyFailuresError
from asyncrl.observe.metrics import read_metrics
from asyncrl.preflight import check_train
from asyncrl.training.actor import Actor


async def train(config: Path, *overrides: str, resume: bool = False) -> Path:
    run = load_run(TrainRun, config, overrides)
    # The checks run a loop of their own, so they need a thread here; the command line has no loop yet when it calls them.
    inputs = await asyncio.to_thread(check_train, run)
    return await assembly.run_training(run, inputs, resume=resume)


async def test_a_run_leaves_everything_a_user_looks_for(config: Path) -> None:
    folder = await train(config, "trainer.save_freq=2", "trainer.tensorboard=true")
    names = {path.name for path in folder.iterdir()}
    assert {"config.toml", "metrics.jsonl", "curve.png", "checkpoints", "hf", "tensorboard", "trajectories"} <= names
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"global_step_2", "global_step_3"}
    assert "--- policy" in (folder / "trajectories" / "step_000001.txt").read_text()
    steps = read_metrics(folder / "metrics.jsonl")
    assert [row["training/global_step"] for row in steps] == [1, 2, 3]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
    assert all(row["global_seqlen/mean"] == row["global_seqlen/balanced_max"] > 0 for row in steps)  # one rank has all tokens
    load_run(TrainRun, folder / "config.toml")


async def test_a_second_run_of_the_name_overwrites_nothing(config: Path) -> None:
    first = await train(config, "trainer.total_training_steps=1")
    before = (first / "metrics.jsonl").read_text()
    second = await train(config, "trainer.total_training_steps=1")
    assert (first.name, second.name) == ("small", "small-2")
    assert (first / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.ppo_mini_batch_size=1"],
        ["actor.ppo_epochs=2", "actor.loss_agg_mode=seq-mean-token-mean"],
        ["algorithm.old_log_probs=bypass", "algorithm.norm_adv_by_std_in_grpo=false"],
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.01"],
        ["actor.entropy_coeff=0.01", "rollout.deterministic=true"],
        ["rollout.temperature=0.7", "actor.ppo_max_token_len_per_gpu=80"],
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
async def test_every_way_through_the_stages_runs(config: Path, overrides: list[str]) -> None:
    folder = await train(config, "trainer.total_training_steps=2", *overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 2
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    if "actor.use_kl_loss=true" in overrides:
        assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-5)  # the policy is still its reference


async def test_a_resumed_run_ends_with_the_same_weights_as_one_that_never_stopped(config: Path) -> None:
    whole = await train(config, "trainer.total_training_steps=4", "rollout.deterministic=true", "trainer.experiment_name=whole")
    begun = await train(config, "trainer.total_training_steps=2", "rollout.deterministic=true", "trainer.experiment_name=halves")
    resumed = await train(
        config, "trainer.total_training_steps=4", "rollout.deterministic=true", "trainer.experiment_name=halves", resume=True
    )
    assert resumed == begun
    assert (whole / "hf/model.safetensors").read_bytes() == (resumed / "hf/model.safetensors").read_bytes()
    assert [row["step"] for row in read_metrics(resumed / "metrics.jsonl")] == [1, 2, 3, 4]
    start = load_file(Path(load_run(TrainRun, config).model.path) / "model.safetensors")
    end = load_file(resumed / "hf/model.safetensors")
    assert any(not start[name].equal(end[name]) for name in end), "nothing was learned, so the comparison proves nothing"


async def test_resume_refuses_a_changed_batch(config: Path) -> None:
    await train(config, "trainer.total_training_steps=1")
    with pytest.raises(CheckpointError, match=r"data\.train_batch_size = 2, now it is 3"):
        await train(config, "data.train_batch_size=3", resume=True)


def _replace_in(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


async def test_resume_refuses_rows_that_changed(config: Path, rows: Path) -> None:
    await train(config, "trainer.total_training_steps=1")
    _replace_in(rows, "what is 3+0?", "what is 4+0?")
    with pytest.raises(CheckpointError, match=r"digest of data\.train_files"):
        await train(config, "trainer.total_training_steps=2", resume=True)


async def test_resume_without_a_run_says_so(config: Path) -> None:
    with pytest.raises(CheckpointError, match="no run 'small'"):
        await train(config, resume=True)


async def test_a_damaged_checkpoint_costs_its_steps_and_no_whole_checkpoint(config: Path) -> None:
    folder = await train(config, "trainer.save_freq=1", "trainer.total_training_steps=2")
    (folder / "checkpoints/global_step_2/rng.safetensors").write_bytes(b"")
    await train(config, "trainer.total_training_steps=3", resume=True)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"global_step_1", "global_step_3"}
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]


async def test_a_run_that_failed_before_its_first_checkpoint_is_resumed(config: Path, tmp_path: Path) -> None:
    _reward_module(tmp_path, "raise ValueError('the grader is broken')")
    with pytest.raises(TooManyFailuresError):
        await train(config, "reward.function=my_reward:score", "replay.max_failed_groups_in_a_row=2")
    folder = await train(config, "trainer.total_training_steps=2", resume=True)
    assert folder.name == "small"
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["admission/admitted"] == rows[-1]["admission/trained"] + rows[-1]["admission/dropped/failure"]
    assert rows[-1]["admission/dropped/failure"] >= 2


async def test_a_model_that_cannot_be_used_leaves_no_run_folder(config: Path, tmp_path: Path) -> None:
    (tmp_path / "no_end.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    with pytest.raises(ModelError, match="writes no end token"):
        await train(config, f"model.chat_template={tmp_path}/no_end.jinja")
    with pytest.raises(DataError, match=r"all 12 prompts are longer than data\.max_prompt_length"):
        await train(config, "data.max_prompt_length=1")
    assert not (tmp_path / "runs").exists()


def _reward_module(tmp_path: Path, body: str) -> None:
    (tmp_path / "my_reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n" + textwrap.indent(textwrap.dedent(body), "    "),
        encoding="utf-8",
    )


async def test_a_failed_session_costs_its_group_and_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    _reward_module(tmp_path, "if ground_truth == '3':\n    raise ValueError('cannot grade 3')\nreturn float(len(solution_str) % 2)")
    folder = await train(config, "reward.function=my_reward:score", "trainer.total_training_steps=6")
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["groups/failure"] >= 1
    assert rows[-1]["admission/dropped/failure"] == rows[-1]["groups/failure"] == rows[-1]["agents/groups_failure"]
    assert rows[-1]["admission/trained"] == 12


async def test_a_reward_that_always_fails_ends_the_run_with_its_reason(config: Path, tmp_path: Path) -> None:
    _reward_module(tmp_path, "raise ValueError('the grader is broken')")
    with pytest.raises(TooManyFailuresError, match="the grader is broken"):
        await train(config, "reward.function=my_reward:score", "replay.max_failed_groups_in_a_row=3")


async def test_a_run_that_fails_later_loses_nothing_it_has_learned(config: Path, tmp_path: Path) -> None:
    _reward_module(
        tmp_path,
        """
        import os
        with open("calls", "a") as calls:
            calls.write(".")
        if os.path.getsize("calls") > 12:
            raise ValueError('the grader is broken')
        return float(len(solution_str) % 2)
        """,
    )
    with pytest.raises(TooManyFailuresError, match="the grader is broken"):
        await train(
            config, "reward.function=my_reward:score", "trainer.total_training_steps=9", "replay.max_failed_groups_in_a_row=2"
        )
    done = len(read_metrics(tmp_path / "runs/small/metrics.jsonl"))
    assert done >= 2
    assert [path.name for path in (tmp_path / "runs/small/checkpoints").iterdir()] == [f"global_step_{done}"]
    await train(config, f"trainer.total_training_steps={done + 1}", resume=True)
    assert [row["step"] for row in read_metrics(tmp_path / "runs/small/metrics.jsonl")] == list(range(1, done + 2))


async def test_a_step_that_fails_half_way_is_no_checkpoint(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, calls = Actor.update, []

    def failing(self: Actor, *args: Any, **kwargs: Any) -> dict[str, float]:
        numbers = update(self, *args, **kwargs)
        calls.append(numbers)
        if len(calls) == 4:
            raise OSError(5, "the machine is ill")
        return numbers

    monkeypatch.setattr(Actor, "update", failing)
    with pytest.raises(OSError, match="the machine is ill"):
        await train(config, "trainer.save_freq=2", "trainer.total_training_steps=4")
    checkpoints = config.parent / "runs/small/checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"global_step_2"}, "step 3 had the weights of step 4"
    await train(config, resume=True)
    assert (checkpoints / "global_step_3").is_dir()


@pytest.mark.long
async def test_200_steps_leave_the_queue_flat(config: Path) -> None:
    folder = await train(config, "trainer.total_training_steps=200", "data.max_response_length=4", "trainer.log_trajectories=0")
    rows = read_metrics(folder / "metrics.jsonl")
    assert len(rows) == 200
    assert {row["transfer_queue/keys"] for row in rows} == {0}
    assert max(row["transfer_queue/bytes"] for row in rows[100:]) <= max(row["transfer_queue/bytes"] for row in rows[:100])
    assert rows[-1]["admission/admitted"] == rows[-1]["admission/trained"] == 400


@pytest.mark.long
def test_ctrl_c_ends_with_exit_code_0_and_a_checkpoint_to_resume(config: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(config), "trainer.total_training_steps=100000"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    stopped = re.search(r"stopping after step (\d+)", err)
    assert stopped, err
    folder = Path(out.split("run folder: ")[1].strip())
    assert (folder / f"checkpoints/global_step_{stopped[1]}/DONE").is_file()


def test_an_evaluation_of_a_checkpoint_needs_no_configuration_and_prints_json(
    config: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = asyncio.run(train(config, "trainer.total_training_steps=1"))
    cli.evaluate(folder / "checkpoints/global_step_1", rows)
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["eval/sampled/failed"] == 0
    assert 0 <= numbers["eval/greedy/success"] <= 1
