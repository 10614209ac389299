"""`start.json`: what a run has begun with, and may not change. With it step 0 counts as a checkpoint.

assembly -> [start] -> <run folder>/start.json -> --resume

It is written before anything is admitted, so a run folder without it has nothing to go on with. The initial weights are not copied:
they are those of `model.path`, and of the critic's folder, as long as the digest of their files is the same. Tokenizer and chat
template count as well: other ones would give the kept ids another meaning. A folder that was moved is the same.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import TrainRun
from asyncrl.errors import CheckpointError, CheckpointFormatError
from asyncrl.ports import Rows
from asyncrl.training.disk import Disk

FORMAT = 3
"""Rises when an older version could not read what this one writes."""

Fact = int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """facts: what must be the same at a resume. model: digest of the model's files, `model_digest`."""

    facts: Mapping[str, Fact]
    model: str


def facts_of(run: TrainRun, rows: Rows, digest: str) -> dict[str, Fact]:
    """The meaning of a step and of kept adapters, the staleness bound, the order of the feed, and what rows have. digest: of the
    rows."""
    return {
        "data.train_batch_size": run.data.train_batch_size,
        "data.shuffle": run.data.shuffle,
        "model.lora_rank": run.model.lora_rank,
        "model.lora_alpha (0 without adapters)": run.model.lora_alpha if run.model.lora_rank else 0,
        "rollout.n": run.rollout.n,
        "trainer.seed": run.trainer.seed,
        "trainer.publish_freq": run.publish_freq,
        "trainer.max_staleness (0 in sync mode)": run.max_staleness,
        "updates_per_batch": run.updates_per_batch,
        "rows of data.train_files": len(rows),
        "digest of data.train_files": digest,
        "a critic (algorithm.adv_estimator)": run.has_critic,
        "a greedy session (algorithm.adv_estimator)": run.needs_baseline,
    }


_WEIGHTS = ("config.json", "*.safetensors", "*.bin")
_TOKENIZER = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*chat_template*")


def model_digest(run: TrainRun) -> str:
    """32 hex digits over weights, config.json, tokenizer and chat template of the policy, and the critic's weights where there is
    one. Blocking: reads all of it."""
    digest = hashlib.blake2b(digest_size=16)
    for path in _model_files(run):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    return digest.hexdigest()


def _model_files(run: TrainRun) -> list[Path]:
    model = run.model
    folders = [(model.path, _WEIGHTS), (model.tokenizer_path or model.path, _TOKENIZER)]
    folders += [(run.critic_model.path, _WEIGHTS)] if run.has_critic else []
    files = [path for folder, names in folders for path in _found(Path(folder), names)]
    return [*files, *([Path(model.chat_template)] if model.chat_template else [])]


def _found(folder: Path, names: Iterable[str]) -> list[Path]:
    return sorted({path for name in names for path in folder.glob(name) if path.is_file()})


def write_start(path: Path, start: Start, disk: Disk | None = None) -> None:
    """Whole or not at all, and on disk when it returns."""
    disk = disk or Disk()
    draft = path.with_name(path.name + ".new")
    content = {"format": FORMAT, "facts": dict(start.facts), "model": start.model}
    disk.write(draft, json.dumps(content, indent=1).encode())
    disk.rename(draft, path)
    disk.sync_folder(path.parent)


def read_start(path: Path) -> Start:
    """Raises CheckpointError when it is not what was written, CheckpointFormatError when another version wrote it."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise CheckpointFormatError(f"{path}: has format {content['format']}; this version reads format {FORMAT}")
        return Start(facts=dict(content["facts"]), model=str(content["model"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); start a new run without --resume"
        ) from error


def refuse_changes(path: Path, start: Start, facts: Mapping[str, Fact]) -> None:
    """Raises CheckpointError for the first fact that is not what the run began with. path: of start.json."""
    for name, value in facts.items():
        if name not in start.facts or start.facts[name] != value:
            raise CheckpointError(
                f"--resume: {path} says that the run began with {name} = {start.facts.get(name)}, now it is {value}; a run cannot "
                "change it: put it back, or start a new run without --resume"
            )


def check_model(path: Path, start: Start, run: TrainRun) -> None:
    """Raises CheckpointError unless model, tokenizer and chat template are those that the run began with. Blocking."""
    if model_digest(run) != start.model:
        where = f"model.path = {run.model.path!r}" + (f" or the critic's {run.critic_model.path!r}" if run.has_critic else "")
        raise CheckpointError(
            f"--resume: {path} says that the run began with other weights, tokenizer or chat template than {where} has now; "
            "put them back, or start a new run without --resume"
        )
