"""The curve: a picture of what is in metrics.jsonl, of one run or several."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from asyncrl.errors import DataError
from asyncrl.observe.curve import draw_curve, draw_curves
from asyncrl.observe.run_folder import RunFolder

LogSteps = Callable[..., RunFolder]


def rising(top: float) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {step: {"critic/score/mean": top * step / 10} for step in range(1, 11)}
    for step in (0, 5, 10):
        steps.setdefault(step, {}).update({"eval/sampled/success": top * step / 10, "eval/greedy/success": top})
    return steps


def test_a_run_is_drawn(log_steps: LogSteps) -> None:
    run = log_steps("run", rising(0.9))
    assert draw_curve(run.path) == run.curve
    image = imread(run.curve)
    assert image.shape[1] > image.shape[0], "two panels side by side"
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 10
    assert sorted(path.name for path in run.path.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_the_picture_shows_the_numbers(log_steps: LogSteps) -> None:
    low, high, same = (log_steps(name, rising(top)) for name, top in (("a", 0.2), ("b", 0.9), ("c", 0.9)))
    pictures = [imread(path) for path in (draw_curve(run.path) for run in (low, high, same)) if path]
    assert not np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[1], pictures[2])


def test_several_runs_are_one_picture(log_steps: LogSteps, tmp_path: Path) -> None:
    runs = [log_steps(f"seed{seed}", rising(0.7 + seed / 10)).path for seed in range(3)]
    out = draw_curves(runs, tmp_path / "seeds.png")
    assert not np.array_equal(imread(out), imread(draw_curves(runs[:1], tmp_path / "one.png")))


def test_runs_of_one_name_in_different_folders_are_all_drawn(log_steps: LogSteps, tmp_path: Path) -> None:
    for parent, top in (("one", 0.2), ("two", 0.9)):
        (tmp_path / parent).mkdir()
        log_steps(f"x{parent}", rising(top)).path.rename(tmp_path / parent / "run")
    both = draw_curves([tmp_path / "one/run", tmp_path / "two/run"], tmp_path / "both.png")
    assert not np.array_equal(imread(both), imread(draw_curves([tmp_path / "two/run"], tmp_path / "last.png")))


def test_nulls_are_left_out(log_steps: LogSteps) -> None:
    run = log_steps("run", {1: {"sft/loss": float("nan")}, 2: {"sft/loss": 1.0}})
    assert draw_curve(run.path) == run.curve


def test_nothing_to_draw_is_no_error_of_a_run_but_one_of_a_request(log_steps: LogSteps, folder: RunFolder, tmp_path: Path) -> None:
    assert draw_curve(folder.path) is None
    run = log_steps("other", {1: {"something": 1.0}})
    assert draw_curve(run.path) is None
    with pytest.raises(DataError, match="no metric to draw"):
        draw_curves([run.path], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_drawing_leaves_no_global_state(log_steps: LogSteps) -> None:
    draw_curve(log_steps("run", rising(0.5)).path)
    assert "matplotlib.pyplot" not in sys.modules
