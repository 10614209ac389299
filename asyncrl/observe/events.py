"""TensorBoard event files, written with TensorBoard's own record format and messages: no torch, no thread.

MetricsLog -> [EventWriter] -> tensorboard/events.out.tfevents.*

Source: the format that `tensorboard.summary.writer` writes; scalars as `simple_value`, which every TensorBoard reads.
"""

import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]


class EventWriter:
    """Appends scalars to a new event file in `folder`; a resumed run adds a file, and TensorBoard reads them as one."""

    def __init__(self, folder: Path, *, started: float) -> None:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(started):010d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(_new_file(folder, name))
        self._write(Event(wall_time=started, file_version="brain.Event:2"))

    def write(self, step: int, wall_time: float, metrics: Mapping[str, float]) -> None:
        """One event with all numbers of a step; flushed."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _new_file(folder: Path, name: str) -> IO[bytes]:
    for number in itertools.count():
        try:
            return (folder / f"{name}.{number}").open("xb")
        except FileExistsError:
            continue
    raise AssertionError
