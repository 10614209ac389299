"""Sharded tensors on disk: each rank writes what it holds, and any number of ranks, cut in any way, read what they hold.

learners -> [dcp] -> safetensors files. It is torch.distributed.checkpoint with its safetensors storage: no pickle on disk, and a
Hugging Face directory is read as if one rank had written it. One file a rank, with the offsets of its pieces in the header; a piece
that several ranks hold is written by one of them.

Every function is a collective, all ranks with the same names in the same order. Damage is not looked for here: a tensor whose last
file is missing looks smaller, so whoever reads has compared all files with their checksums (`checkpoint`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.cluster import beat
from asyncrl.errors import CheckpointError
from asyncrl.training.mesh import Mesh


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The tensors, cut or whole, into `folder`, flushed. Raises OSError, on all ranks, when the disk of one refuses."""
    beat(f"write {folder}")
    try:
        # A copy: it is the library's to change.
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise OSError(f"{folder} cannot be written: {_first(error)}") from error


def read_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Numbers of the files into the tensors, in place. Raises CheckpointError, on all ranks, when those of one cannot be read."""
    if not tensors:
        return
    beat(f"read {folder}")
    try:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_first(error)}") from error


def shapes_in(folder: Path) -> dict[str, torch.Size]:
    """Of the whole tensors in the files, by name. Raises CheckpointError when a file is no safetensors file."""
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return {name: entry.size for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _first(error: CheckpointException) -> str:
    """One rank's failure: the library's message is a page."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def on_rank_0(mesh: Mesh, work: Callable[[], None]) -> None:
    """`work` on rank 0 alone; the others wait. Raises OSError, on all ranks, when the disk refuses."""
    if mesh.is_alone:
        work()
        return
    told: list[str | None] = [None]
    if mesh.rank == 0:
        try:
            work()
        except OSError as error:
            told = [str(error)]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise OSError(told[0])
