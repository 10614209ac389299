"""start.json: whole or not there, on disk before it is said to be, and every fact in it is held to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import TrainRun
from asyncrl.errors import CheckpointError, CheckpointFormatError
from asyncrl.training.disk import Disk
from asyncrl.training.start import Start, check_model, facts_of, model_digest, read_start, refuse_changes, write_start

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
ROWS: list[dict[str, Any]] = [{}] * 7
START = Start(facts={"rollout.n": 4, "a critic (algorithm.adv_estimator)": False, "trainer.seed": 0}, model="ab")


def test_what_is_written_comes_back_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for _ in range(2):
        write_start(tmp_path / "start.json", START)
        assert read_start(tmp_path / "start.json") == START
    assert [path.name for path in tmp_path.iterdir()] == ["start.json"]


class Crash(OSError):
    """The process dies here."""


class DyingDisk(Disk):
    """Dies in operation `at`."""

    def __init__(self, at: int) -> None:
        self._left = at

    def _live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Crash

    def write(self, path: Path, content: bytes) -> None:
        if self._left == 0:
            path.write_bytes(content[:3])
        self._live()
        super().write(path, content)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._live()
        super().sync_folder(path)


def test_a_crash_leaves_it_whole_or_away(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    for at in range(3):
        path.unlink(missing_ok=True)
        with pytest.raises(Crash):
            write_start(path, START, DyingDisk(at))
        assert path.is_file() is (at == 2)
        if path.is_file():
            assert read_start(path) == START
    write_start(path, START, DyingDisk(3))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 3}', b'{"format": 3, "facts": 3, "model": ""}', b"\xff"])
def test_one_that_is_not_what_was_written_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "start.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"start\.json cannot be read \(\w+: .*\); start a new run without --resume$"):
        read_start(tmp_path / "start.json")


def test_one_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "start.json").write_text(json.dumps({"format": 99, "facts": {}, "model": ""}))
    with pytest.raises(CheckpointFormatError, match="has format 99; this version reads format 3"):
        read_start(tmp_path / "start.json")


CHANGES: dict[str, dict[str, Any]] = {
    "data.train_batch_size = 8, now it is 4": {"data": {"train_batch_size": 4}},
    "data.shuffle = True, now it is False": {"data": {"shuffle": False}},
    "rollout.n = 2, now it is 4": {"rollout": {"n": 4}},
    "model.lora_rank = 0, now it is 4": {"model": {"lora_rank": 4}},
    "trainer.seed = 1, now it is 2": {"trainer": {"seed": 2}},
    "trainer.publish_freq = 1, now it is 2": {"trainer": {"publish_freq": 2, "save_freq": 2}},
    r"trainer.max_staleness \(0 in sync mode\) = 0, now it is 3": {"trainer": {"mode": "async", "max_staleness": 3}},
    "updates_per_batch = 1, now it is 2": {"actor": {"ppo_epochs": 2}},
    r"a critic \(algorithm.adv_estimator\) = False, now it is True": {"algorithm": {"adv_estimator": "gae"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_cannot_change_what_its_steps_and_its_bound_mean(change: str, make_model: MakeModel, make_run: MakeRun) -> None:
    model = make_model()
    base: dict[str, Any] = {"data": {"train_batch_size": 8}, "rollout": {"n": 2}}
    facts = facts_of(make_run(model, **base), ROWS, "d")
    start = Start(facts=facts, model="")
    refuse_changes(Path("start.json"), start, facts)
    changed = {section: {**base.get(section, {}), **keys} for section, keys in {**base, **CHANGES[change]}.items()}
    with pytest.raises(
        CheckpointError, match=f"start.json says that the run began with {change}; a run cannot change it: put it back, or start"
    ):
        refuse_changes(Path("start.json"), start, facts_of(make_run(model, **changed), ROWS, "d"))


def test_a_run_cannot_change_its_rows(make_model: MakeModel, make_run: MakeRun) -> None:
    run = make_run(make_model())
    start = Start(facts=facts_of(run, ROWS, "d"), model="")
    for rows, digest, text in (
        (ROWS[1:], "d", "rows of data.train_files = 7, now it is 6"),
        (ROWS, "e", "digest .* = d, now it is e"),
    ):
        with pytest.raises(CheckpointError, match=text):
            refuse_changes(Path("start.json"), start, facts_of(run, rows, digest))
    older = Start(facts={name: fact for name, fact in start.facts.items() if name != "rollout.n"}, model="")
    with pytest.raises(CheckpointError, match=r"began with rollout\.n = None"):
        refuse_changes(Path("start.json"), older, start.facts)


def test_what_may_change_does(make_model: MakeModel, make_run: MakeRun) -> None:
    """Learning rates, limits and lengths of a run are not what its records are made of."""
    run = make_run(make_model())
    other = make_run(make_model(), actor={"optim": {"lr": 0.5}}, trainer={"total_training_steps": 99, "save_freq": 7})
    assert facts_of(run, ROWS, "d") == facts_of(other, ROWS, "d")


def test_the_initial_weights_are_those_of_the_files(make_model: MakeModel, make_run: MakeRun, tmp_path: Path) -> None:
    model = make_model()
    run = make_run(model)
    start = Start(facts={}, model=model_digest(run))
    check_model(tmp_path, start, run)
    (model / "README.md").write_text("not a weight")
    check_model(tmp_path, start, run)
    weights = next(model.glob("*.safetensors"))
    for path in (weights, model / "config.json", model / "tokenizer.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=r"other weights, tokenizer or chat template than model\.path = .* has now"):
            check_model(tmp_path, start, run)
        path.write_bytes(content)
    weights.rename(model / "other.safetensors")
    with pytest.raises(CheckpointError, match="other weights"):
        check_model(tmp_path, start, run)


def test_the_critics_weights_count_as_well(make_model: MakeModel, make_run: MakeRun) -> None:
    model, other = make_model(), make_model(seed=3)
    plain = model_digest(make_run(model))
    found = {
        model_digest(make_run(model, algorithm={"adv_estimator": "gae"}, critic={"model_path": str(path)} if path else {}))
        for path in ("", model, other)
    }
    assert len(found | {plain}) == 3, "a critic from the policy's own folder is one of two equal folders"
