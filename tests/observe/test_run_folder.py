"""Run folders: nothing is overwritten, two runs never share one, and a resume finds the right one."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.config import SFTRun, TrainRun, load_run, parse_run
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.observe.run_folder import RunFolder, check_place, create_run_folder, newest_run_folder, run_folders
from asyncrl.ports import Json


def make_run(name: str, **sections: dict[str, Json]) -> TrainRun:
    minimum = {"data": {"train_files": ["a"]}, "model": {"path": "m"}, "trainer": {"experiment_name": name}}
    return parse_run(TrainRun, {**minimum, **sections})


def test_a_second_run_of_a_name_gets_a_number(tmp_path: Path) -> None:
    names = [create_run_folder(tmp_path / "new" / "runs", "a").path.name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    (tmp_path / "new/runs/b").write_text("a file in the way")
    assert create_run_folder(tmp_path / "new" / "runs", "b").path.name == "b-2"


def test_runs_that_start_at_once_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        folders = list(threads.map(lambda _: create_run_folder(tmp_path, "a").path, range(64)))
    assert len(set(folders)) == 64


NO_FOLDER_NAMES = ["", "  ", ".", "..", "a/b", "/a", "../a", "a\\b", "a\nb", "a\0b", "a\x1b[2J", "x" * 201, "\u00fc" * 101]


@pytest.mark.parametrize("name", NO_FOLDER_NAMES, ids=ascii)
def test_a_name_that_is_no_plain_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name = "):
        create_run_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir = .*file"):
        create_run_folder(tmp_path / "file" / "runs", "a")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"agent": {"name": "tool_agent", "tools": ["calculator"], "max_turns": 3}},
        {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.5, "optim": {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}}},
        {"trainer": {"total_training_steps": 7}, "data": {"train_files": ["a"], "val_files": ["b"]}, "eval": {"sampled": False}},
        {"model": {"path": "m", "chat_template_kwargs": {"enable_thinking": False, "n": 1}}},
        {"data": {"train_files": ["a"], "mapping": {"prompt": "{q}", "system": 'quote " and \\ \u00e9', "data_source": "s"}}},
    ],
)
def test_the_resolved_configuration_loads_again(folder: RunFolder, sections: dict[str, dict[str, Json]]) -> None:
    run = make_run("run", **sections)
    folder.write_config(run)
    assert load_run(TrainRun, folder.config) == run


def test_a_warm_starts_configuration_loads_again(folder: RunFolder) -> None:
    run = parse_run(SFTRun, {"data": {"train_files": ["a"]}, "model": {"path": "m"}})
    folder.write_config(run)
    assert load_run(SFTRun, folder.config) == run


def test_the_newest_run_of_exactly_that_name_is_found(tmp_path: Path) -> None:
    for name in ("a", "a", "a", "a-2"):
        create_run_folder(tmp_path, name).write_config(make_run(name))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "a-2", "a-2-2", "a-3"]
    assert newest_run_folder(tmp_path, "a").path.name == "a-3"
    assert newest_run_folder(tmp_path, "a-2").path.name == "a-2-2"
    create_run_folder(tmp_path, "a")  # ended before it had written anything
    assert newest_run_folder(tmp_path, "a").path.name == "a-3"


def test_a_missing_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no run 'a' in .* to resume"):
        newest_run_folder(tmp_path, "a")


def test_a_removed_run_leaves_a_gap_that_misleads_nobody(tmp_path: Path) -> None:
    for _ in range(3):
        create_run_folder(tmp_path, "a").write_config(make_run("a"))
    shutil.rmtree(tmp_path / "a-2")
    assert [folder.path.name for folder in run_folders(tmp_path, "a")] == ["a-3", "a"]
    assert create_run_folder(tmp_path, "a").path.name == "a-4"


def test_a_place_is_checked_without_making_it(tmp_path: Path) -> None:
    check_place(str(tmp_path / "new" / "runs"), "a")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir = .*file is not a folder"):
        check_place(str(tmp_path / "file" / "runs"), "a")
    with pytest.raises(ConfigError, match="is empty"):
        check_place("", "a")
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name = "):
        check_place(str(tmp_path), "a/b")
