"""metrics.jsonl: standard JSON whatever the numbers are, safe against kills, and readable after a resume."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from asyncrl.errors import DataError
from asyncrl.observe.metrics import MetricsLog, read_metrics
from asyncrl.observe.run_folder import RunFolder


def no_constants(name: str) -> float:
    raise AssertionError(f"{name} is not standard JSON")


NAMES = st.text().filter(lambda name: name not in ("step", "wall_time"))


@given(metrics=st.dictionaries(NAMES, st.floats() | st.integers(), max_size=5))
def test_any_numbers_make_a_standard_line(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]) -> None:
    folder = RunFolder(path=tmp_path_factory.mktemp("run"))
    with MetricsLog(folder, clock=lambda: 5.0) as log:
        log.log(3, metrics)
    (line,) = folder.metrics.read_text().splitlines()
    expected = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    assert json.loads(line, parse_constant=no_constants) == {"step": 3, "wall_time": 5.0, "incarnation": 0, **expected}
    assert read_metrics(folder.metrics) == [{"step": 3, "wall_time": 5.0, "incarnation": 0, **expected}]


def test_what_an_evaluation_said_outlives_the_machine(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with MetricsLog(folder) as log:
        log.log(1, {"score": 1.0})
        assert not synced
        log.log(1, {"eval/greedy/success": 1.0})
        assert len(synced) == 1


def test_a_line_is_on_disk_when_log_returns(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.log(1, {"a": np.float32(0.5), "b": np.int64(3), "c": True})
        (row,) = read_metrics(folder.metrics)
    assert (row["a"], row["b"], row["c"]) == (0.5, 3, 1)


@pytest.mark.parametrize("value", ["1", None, [1], {}, object()])
def test_what_is_no_number_is_refused_and_nothing_is_written(folder: RunFolder, value: float) -> None:
    with MetricsLog(folder) as log, pytest.raises(TypeError, match="metric 'bad'"):
        log.log(1, {"good": 1.0, "bad": value})
    assert folder.metrics.read_text() == ""


@pytest.mark.parametrize("name", ["step", "wall_time", "incarnation"])
def test_the_own_keys_are_taken(folder: RunFolder, name: str) -> None:
    with MetricsLog(folder) as log, pytest.raises(ValueError, match=name):
        log.log(1, {name: 2.0})


def test_after_a_resume_the_last_value_of_a_step_wins(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": float(step), "only_first": 1.0})
        log.log(2, {"eval/sampled/success": 0.5})
    with MetricsLog(folder) as log:
        log.log(2, {"loss": 20.0})
    rows = read_metrics(folder.metrics)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 20.0), (3, 3.0)]
    assert rows[1]["eval/sampled/success"] == 0.5
    assert len(folder.metrics.read_text().splitlines()) == 5, "an old line was lost"


def test_of_a_step_that_was_trained_again_the_last_time_counts(folder: RunFolder) -> None:
    """What an evaluation said of its weights stays, before the step's own line and after it, and also after a third time."""
    with MetricsLog(folder) as log:
        log.log(2, {"loss": 2.0, "incidents/retry_session": 1.0})
        log.log(2, {"eval/sampled/success": 0.5})
    for incarnation, loss in ((1, 20.0), (2, 200.0)):
        with MetricsLog(folder, incarnation=incarnation) as log:
            log.log(2, {"loss": loss})
            log.log(3, {"loss": 3.0, "only_of_this_time": float(incarnation)})
    with MetricsLog(folder, incarnation=3) as log:
        log.log(3, {"eval/sampled/success": 0.75})
    second, third = read_metrics(folder.metrics)
    own = ("step", "wall_time")
    told = [{name: value for name, value in row.items() if name not in own} for row in (second, third)]
    assert told[0] == {"incarnation": 2, "loss": 200.0, "eval/sampled/success": 0.5}
    assert told[1] == {"incarnation": 3, "loss": 3.0, "only_of_this_time": 2.0, "eval/sampled/success": 0.75}


def test_lines_from_before_there_were_incarnations_are_read(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1, "loss": 1.0}\n{"step": 1, "incarnation": 0, "score": 2.0}\n')
    assert read_metrics(folder.metrics) == [{"step": 1, "incarnation": 0, "loss": 1.0, "score": 2.0}]


def test_a_line_that_a_kill_cut_is_neither_read_nor_grown_into(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.log(1, {"loss": 1.0})
        log.log(2, {"loss": 2.0})
    whole = folder.metrics.read_bytes()
    for end in range(len(whole) // 2 + 1, len(whole)):
        folder.metrics.write_bytes(whole[:end])
        assert [row["step"] for row in read_metrics(folder.metrics)] == [1]
        with MetricsLog(folder) as log:
            log.log(3, {"loss": 3.0})
        assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 3]


@pytest.mark.parametrize("line", ["nonsense", "[]", "1", '{"loss": 1}', '{"step": "1"}', '{"step": 1.5}', '{"step": true}', "\xff"])
def test_a_damaged_line_is_named(folder: RunFolder, line: str) -> None:
    folder.metrics.write_bytes(b'{"step": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
        read_metrics(folder.metrics)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_reads_the_events(folder: RunFolder) -> None:
    for steps in ((1, 2), (3,)):  # the second time as a resumed run
        with MetricsLog(folder, tensorboard=True, clock=lambda: 7.0) as log:
            for step in steps:
                log.log(step, {"critic/score/mean": step / 2, "loss": float("nan")})
    assert len(list(folder.tensorboard.iterdir())) == 2
    seen = []
    for path in sorted(folder.tensorboard.iterdir()):
        events = EventAccumulator(str(path)).Reload()
        assert math.isnan(events.Scalars("loss")[0].value)
        seen += [(event.step, event.value, event.wall_time) for event in events.Scalars("critic/score/mean")]
    assert seen == [(1, 0.5, 7.0), (2, 1.0, 7.0), (3, 1.5, 7.0)]


def test_without_tensorboard_no_events_are_written(folder: RunFolder) -> None:
    MetricsLog(folder).close()
    assert not folder.tensorboard.exists()
