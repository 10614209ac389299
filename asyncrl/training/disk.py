"""The file operations of checkpoints and exports, in one place, so that a test can make each of them fail."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from asyncrl.training.dcp import write_shards


class Disk:
    """Real files. Every write is flushed to the device before it returns; a rename is durable after `sync_folder` of the parent."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def copy(self, source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        self._sync(target)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises OSError when the disk refuses, as every write here does; the library has a class of its own for that."""
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        self._sync(path)

    def write_shards(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `dcp.write_shards`; every rank calls it."""
        write_shards(folder, tensors)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def sync_folder(self, path: Path) -> None:
        self._sync(path)

    def remove(self, path: Path) -> None:
        """A file or a whole folder; nothing happens when it is not there."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @staticmethod
    def _sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
