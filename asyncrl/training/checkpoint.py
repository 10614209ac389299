"""Checkpoints: one directory a step border, atomic, without pickle. What is inside is written by `learners`, on all ranks at once.

    <folder>/global_step_12/
        model/                 Hugging Face directory: `asyncrl eval` loads it as any model
        actor/                 AdamW's moments and step counts (and adapters), a file a rank: any other number of ranks reads them
        critic/                of a run with a critic: the same, and model/ (a token classifier with one label)
        rng.safetensors        torch's random generator
        manifest.json          format, step, version, counters, coefficients of controllers, size and checksum of every file
        DONE                   checksum of manifest.json, written last

Invariants:
1. A folder counts only with a DONE that fits its manifest, and a manifest that fits its files. Everything is written and flushed
   under another name, renamed, the parent flushed, and only then DONE is written: a crash at any operation, of the run or a rank,
   leaves the older ones whole.
2. The newest whole checkpoint is never removed before a newer one has its DONE.
3. It has what training computes with, and nothing that the journal has: no cursor, count or key. So with an older one nothing
   changes that is recorded.

Not covered: a disk that lies about fsync; a checkpoint changed on purpose (the checksums are no signatures).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from asyncrl.errors import CheckpointError, CheckpointFormatError
from asyncrl.ports import Json
from asyncrl.training.disk import Disk

Counters = dict[str, dict[str, int]]
"""By role (`actor`, `critic`): its learner's, from which it goes on."""

FORMAT = 3
"""Rises when an older version could not read what this one writes; a manifest of another format is refused."""
_NAME = re.compile(r"global_step_(\d+)(\.old)?")
_TMP = ".tmp-"
_BLOCK_BYTES = 1 << 20
"""Read at once while a file is hashed: large beside the cost of a call, small beside a weights file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint. step: training steps done; version: weight version; controllers: their coefficients."""

    path: Path
    step: int
    version: int
    controllers: dict[str, float]
    counters: Counters

    @property
    def model_path(self) -> Path:
        """The Hugging Face directory inside."""
        return self.path / "model"


def save_checkpoint(
    folder: Path,
    write: Callable[[Path], Counters],
    *,
    step: int,
    version: int,
    keep: int,
    controllers: Mapping[str, float] = MappingProxyType({}),
    disk: Disk | None = None,
) -> Path:
    """Write `folder/global_step_<step>`, then remove what is older than the newest `keep`. Blocking: call it off the loop.

    write: `Learners.write` to a folder; it returns once everything in there is flushed. controllers: coefficients that training
    adapts. A checkpoint of the same step is replaced. Raises OSError when the disk refuses, and what `write` raises; older
    checkpoints are whole then.
    """
    disk = disk or Disk()
    target, temporary = folder / f"global_step_{step}", folder / f"{_TMP}global_step_{step}"
    disk.make_folder(folder)
    disk.remove(temporary)
    disk.make_folder(temporary)
    counters = write(temporary)
    facts = {"format": FORMAT, "step": step, "version": version, "counters": dict(counters), "controllers": dict(controllers)}
    manifest = json.dumps({**facts, "files": _fingerprints(temporary)}, indent=1, sort_keys=True).encode()
    disk.write(temporary / "manifest.json", manifest)
    disk.sync_folder(temporary)
    if target.exists():
        _set_aside(target, disk)
    disk.rename(temporary, target)
    disk.sync_folder(folder)
    disk.write(target / "DONE", _checksum(manifest).encode())
    disk.sync_folder(target)
    _prune(folder, keep, disk)
    return target


def _set_aside(target: Path, disk: Disk) -> None:
    """Move a checkpoint of the same step away; it stays loadable under its second name until the new one is done."""
    aside = target.with_name(target.name + ".old")
    disk.remove(aside)
    disk.rename(target, aside)


def _prune(folder: Path, keep: int, disk: Disk) -> None:
    """Keep the newest `keep` with a DONE; remove the others, and what crashed writes left behind."""
    whole = [path for path in _candidates(folder) if (path / "DONE").is_file()]
    replaced = [path for path in whole if path.suffix == ".old" and path.with_suffix("") in whole]
    kept = [path for path in whole if path not in replaced][:keep]
    leftovers = [path for path in folder.iterdir() if path.name.startswith(_TMP)]
    for path in [path for path in _candidates(folder) if path not in kept] + leftovers:
        _remove(path, disk)


def _remove(path: Path, disk: Disk) -> None:
    disk.remove(path / "DONE")  # first, so that half a removal is no checkpoint
    disk.remove(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is in a folder of checkpoints. whole: newest first, one a step. damaged, or half written: path -> what is wrong."""

    whole: tuple[Checkpoint, ...]
    damaged: Mapping[Path, str]


def find_checkpoints(folder: Path) -> Found:
    """Checks every file of every checkpoint. Raises CheckpointFormatError for one that another version wrote."""
    whole: dict[int, Checkpoint] = {}
    damaged: dict[Path, str] = {}
    for path in _candidates(folder):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointFormatError:
            raise
        except CheckpointError as error:
            damaged[path] = str(error)
        else:
            whole.setdefault(checkpoint.step, checkpoint)  # of a step that was being replaced both may be whole
    return Found(whole=tuple(whole.values()), damaged=damaged)


def delete_damaged(found: Found, say: Callable[[str], None], disk: Disk | None = None) -> None:
    """So that none of them counts as kept; `say` gets a line about each. For whoever owns the run: another process may be writing
    one."""
    for path, reason in found.damaged.items():
        say(f"checkpoint {reason}; it is deleted")
        _remove(path, disk or Disk())


def kept_steps(folder: Path, keep: int) -> list[int]:
    """The newest `keep` steps that one can go back to, oldest first: those of checkpoints that were written whole, and 0, whose
    weights the run's model has."""
    steps = sorted({int(path.stem.rpartition("_")[2]) for path in _candidates(folder) if (path / "DONE").is_file()})
    return [0, *steps][-keep:]


def open_checkpoint(path: Path) -> Checkpoint:
    """Check every file against the manifest. Raises CheckpointError, naming path and defect, when it is not whole."""
    manifest = _read_manifest(path)
    for name, known in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if file.stat().st_size != known["size_bytes"]:
            raise CheckpointError(f"{path}: {name} has {file.stat().st_size} bytes instead of {known['size_bytes']}")
        if _file_checksum(file) != known["blake2b"]:
            raise CheckpointError(f"{path}: {name} is damaged (its checksum differs)")
    return Checkpoint(
        path=path,
        step=manifest["step"],
        version=manifest["version"],
        controllers=manifest["controllers"],
        counters=manifest["counters"],
    )


def _read_manifest(path: Path) -> dict[str, Json]:
    try:
        done = (path / "DONE").read_text(encoding="utf-8")
        content = (path / "manifest.json").read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not finished ({error})") from error
    if done != _checksum(content):
        raise CheckpointError(f"{path}: manifest.json is damaged (DONE names another checksum)")
    manifest: dict[str, Json] = json.loads(content)
    if manifest["format"] != FORMAT:
        raise CheckpointFormatError(f"{path}: has format {manifest['format']}; this version reads format {FORMAT}")
    return manifest


def _candidates(folder: Path) -> list[Path]:
    """Folders named like a checkpoint, newest first; the replaced one of a step after its successor."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda item: (-int(item[0][1]), item[0][2] is not None))]


def _fingerprints(folder: Path) -> dict[str, dict[str, Json]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size_bytes": path.stat().st_size, "blake2b": _file_checksum(path)} for path in files
    }


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _file_checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
