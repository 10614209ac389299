"""I7: no token is older than the bound when it is trained on. And the rows of an update, from both sides."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncrl.journal.entries import StepRecord
from asyncrl.keys import TRAIN
from asyncrl.protocol.ragged import values_of
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.shadow import Shadow

if TYPE_CHECKING:
    from tensordict import TensorDict

FIELDS = ("input_ids", "response_mask", "rollout_log_probs")
"""Columns that tell a row from any other, and that every update reads."""


class RowOf(NamedTuple):
    """One row: its group and the bytes of `FIELDS`."""

    uid: str | None
    values: tuple[bytes, ...]


def rows_given(update: Update) -> list[RowOf]:
    """As the actor was given them."""
    columns = [_split(update.columns, name) for name in FIELDS]
    return [RowOf(uid, values) for uid, values in zip(update.group_ids, zip(*columns, strict=True), strict=True)]


def rows_recorded(shadow: Shadow, record: StepRecord) -> list[RowOf]:
    """As sessions wrote them."""
    rows = [shadow.keys[record.partition_id, key] for key in record.keys if (record.partition_id, key) in shadow.keys]
    return [RowOf(row.entry.uid, tuple(bytes(row.cells[name][1]) for name in FIELDS if name in row.cells)) for row in rows]


def _split(columns: "TensorDict", name: str) -> Sequence[bytes]:
    column = columns[name]
    bounds = column.offsets().tolist()
    values = values_of(column).numpy()
    return [values[start:end].tobytes() for start, end in itertools.pairwise(bounds)]


class Fresh(Oracle):
    """0 <= version - token_version <= max_staleness, with the versions that sessions wrote and the weights' own count of steps."""

    name = "I7"

    def updated(self, update: Update) -> None:
        step = len(update.lineage) + 1
        version, bound = self.ground.version_of(step - 1), self.ground.run.max_staleness
        record = self.ground.shadow.records.get(step)
        for key in record.keys if record is not None else ():
            row = self.ground.shadow.keys.get((TRAIN, key))
            if row is None or "token_versions" not in row.cells:
                continue
            versions = np.frombuffer(row.cells["token_versions"][1], dtype=np.int32)
            mask = np.frombuffer(row.cells["response_mask"][1], dtype=bool)
            sampled = versions[mask]
            if len(sampled) and not (version - bound <= sampled.min() and sampled.max() <= version):
                self.fail(
                    f"key {key!r} has tokens of versions {sampled.min()} to {sampled.max()}; the weights that learn from it are "
                    f"version {version}, and max_staleness is {bound}"
                )
