"""The folder of a run: `<default_local_dir>/<experiment_name>`, the second run of a name `-2`, and so on. Nothing is overwritten.

trainer.experiment_name -> [run folder] -> metrics, trace, trajectories, configuration, curve, checkpoints, export
"""

import itertools
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import SFTRun, TrainRun, to_toml
from asyncrl.errors import CheckpointError, ConfigError, RunFolderError
from asyncrl.wording import nearest

_MAX_NAME = 200
"""Bytes of a name: file systems stop at 255, and `-2` and the like follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def start(self) -> Path:
        """What the run has begun with; a folder without it has nothing to resume."""
        return self.path / "start.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def incidents(self) -> Path:
        """Deadlines, retries, failures, drops: a line each."""
        return self.path / "incidents.jsonl"

    @property
    def trace(self) -> Path:
        """Lineage and spans of a few groups a step."""
        return self.path / "trace.jsonl"

    @property
    def journal(self) -> Path:
        """What the TransferQueue keeps; `store.journal`."""
        return self.path / "journal.db"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def trajectories(self) -> Path:
        """Folder of sampled trajectories, a text file a step."""
        return self.path / "trajectories"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def reward_log(self) -> Path:
        """What reward functions print."""
        return self.path / "reward.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory."""
        return self.path / "hf"

    def write_config(self, run: TrainRun | SFTRun) -> None:
        """Write the resolved configuration: every key that has an effect. It loads again as the configuration of a run."""
        self.config.write_text(to_toml(run), encoding="utf-8")


def create_run_folder(default_local_dir: str | Path, experiment_name: str) -> RunFolder:
    """A new, empty folder: `<name>`, else `<name>-2`, `<name>-3` ... Two runs that start at once get two folders.

    Raises ConfigError when the name cannot be a folder's, or the folder cannot be made.
    """
    check_experiment_name(experiment_name)
    root = Path(default_local_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # After the highest, not in a gap: the highest number is the newest run.
        for number in itertools.count(max(_numbers(root, experiment_name), default=0) + 1):
            path = root / _numbered(experiment_name, number)
            try:
                path.mkdir()  # makes or fails in one step: whoever makes it, owns it
            except FileExistsError:
                continue
            return RunFolder(path=path)
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir = {str(default_local_dir)!r}: no run folder can be made ({error})") from error
    raise AssertionError("itertools.count ended")


def check_place(default_local_dir: str, experiment_name: str) -> None:
    """Raises ConfigError when `create_run_folder` could not make the folder; makes nothing."""
    check_experiment_name(experiment_name)
    if not default_local_dir.strip():
        raise ConfigError(f"trainer.default_local_dir = {default_local_dir!r} is empty; name a folder, such as runs")
    root = Path(default_local_dir).absolute()
    nearest = next(path for path in (root, *root.parents) if os.path.lexists(path))
    reason = "is not a folder" if not nearest.is_dir() else "" if os.access(nearest, os.W_OK | os.X_OK) else "cannot be written to"
    if reason:
        raise ConfigError(f"trainer.default_local_dir = {default_local_dir!r}: no run folder can be made: {nearest} {reason}")


def check_experiment_name(name: str) -> None:
    """Raises ConfigError when `name` is not one plain name of a folder."""
    reason = (
        "is empty" if not name.strip() else
        "is not the name of a folder" if name in (".", "..") else
        "has a path separator; the folder is trainer.default_local_dir" if "/" in name or "\\" in name else
        "has a character that cannot be printed" if not name.isprintable() else
        f"is longer than {_MAX_NAME} bytes" if len(name.encode()) > _MAX_NAME else
        ""
    )  # fmt: skip
    if reason:
        raise ConfigError(f"trainer.experiment_name = {name!r} {reason}")


def run_folders(default_local_dir: str | Path, experiment_name: str) -> list[RunFolder]:
    """The folders of all runs of that name, the last one first, for `--resume`. Raises CheckpointError when there is none."""
    check_experiment_name(experiment_name)
    root = Path(default_local_dir)
    folders = [RunFolder(path=root / _numbered(experiment_name, number)) for number in _numbers(root, experiment_name)]
    # `a-2` may be the first run of a name `a-2`
    found = [folder for folder in folders if _experiment_name(folder) == experiment_name]
    if not found:
        raise CheckpointError(f"there is no run {experiment_name!r} in {root} to resume")
    return found


def newest_run_folder(default_local_dir: str | Path, experiment_name: str) -> RunFolder:
    """The folder of the last run of that name. Raises CheckpointError when there is none."""
    return run_folders(default_local_dir, experiment_name)[0]


def existing_file(folder: Path, name: str, reasons: str) -> Path:
    """The file `name` of the run in `folder`, for a command that shows it.

    reasons: why a run may have none. Raises RunFolderError, which names the runs that have one.
    """
    path = folder / name
    if os.path.isfile(path):
        return path
    try:
        if not folder.exists():
            runs = _with(folder.parent, name) if folder.parent.is_dir() else []
            raise RunFolderError(
                f"{folder} does not exist; with a {name} in {folder.parent}: {_listed(runs)}{nearest(folder.name, runs)}"
            )
        if not folder.is_dir():
            raise RunFolderError(f"{folder} is a file; give the folder of a run, such as {folder.parent}")
        there, runs = sorted(entry.name for entry in folder.iterdir()), _with(folder, name)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be looked at: {error.strerror}") from error
    told = f"folders in it that have one: {_listed(runs)}" if runs else f"there is: {_listed(there)}"
    raise RunFolderError(f"{folder} has no {name}: {reasons}; {told}")


def _with(root: Path, name: str) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if os.path.isfile(entry / name))


def _listed(names: list[str]) -> str:
    return ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])]) or "nothing"


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _numbers(root: Path, name: str) -> list[int]:
    """Numbers that are taken, highest first. There may be gaps: people remove runs."""
    taken = [path.name for path in root.iterdir()] if root.is_dir() else []
    found = [re.fullmatch(rf"{re.escape(name)}(?:-([1-9][0-9]*))?", entry) for entry in taken]
    return sorted({int(match[1] or 1) for match in found if match}, reverse=True)


def _experiment_name(folder: RunFolder) -> object:
    try:
        return tomllib.loads(folder.config.read_text(encoding="utf-8")).get("trainer", {}).get("experiment_name")
    except (OSError, ValueError):  # a run that ended before it had written its configuration has nothing to resume
        return None
