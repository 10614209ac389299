"""Tensors in directories of safetensors, each written whole under another name first; those that nobody uses go with the next."""

import shutil
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from asyncrl.errors import EngineError
from asyncrl.rollout.publication.placed import Tensors

PATTERN = "asyncrl-weights-*"
"""All that is there of this name is ours to remove; the folder may hold other things."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Written:
    """Tensors in `path`/model.safetensors, for as long as this object lives."""

    path: Path


class Directories:
    """Below `folder`, or a temporary one. Its methods are called from one thread at a time."""

    def __init__(self, folder: Path | None) -> None:
        self._given = folder
        self._folder: Path | None = None
        self._number = 0
        self._unused: deque[Path] = deque()

    def write(self, tensors: Tensors) -> Written:
        """Raises EngineError when it cannot be written."""
        try:
            path = self._write(self._folder or self._open(), tensors)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"weights cannot be written for the engines: {error}") from error
        written = Written(path=path)
        weakref.finalize(written, self._unused.append, path).atexit = False
        return written

    def _open(self) -> Path:
        if self._given is None:
            self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-"))
        else:
            self._given.mkdir(parents=True, exist_ok=True)
            self._folder = self._given.resolve()
            self._unused.extend(self._folder.glob(PATTERN))  # of a process that was killed
        return self._folder

    def _write(self, folder: Path, tensors: Tensors) -> Path:
        self._remove_unused()
        self._number += 1
        path = folder / PATTERN.replace("*", f"{self._number:06d}")
        unfinished = path.with_suffix(".tmp")
        unfinished.mkdir()
        try:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, unfinished / "model.safetensors")
            unfinished.rename(path)
        except (OSError, SafetensorError):
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full of it
            raise
        return path

    def _remove_unused(self) -> None:
        while self._unused:
            shutil.rmtree(self._unused.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Remove what is there, and the folder where it was ours."""
        self._remove_unused()
        if self._folder is not None and self._given is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
