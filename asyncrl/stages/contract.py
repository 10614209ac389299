"""The contract of a run's stages: what is checked once before it begins, and at the two ends of every step.

    stages_of -> [check_stages]        replay.sample -> [check_sample] -> run_stage ... -> retire -> [check_cleanup]

The borders in between belong to `run_stage`. Named invariants only; the numbers that they need come from the run.
"""

from collections.abc import Iterable, Sequence

from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE, Field
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import TRAIN
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import actions_are_fresh, check_batch, cleanup_leaves_nothing, groups_are_whole, tags_are_fresh
from asyncrl.stages.stage import Stage, StepScope

ROW_FIELDS = tuple(entry.name for entry in CATALOGUE.values() if entry.is_of_row)
"""What every row has when it is sampled."""


def check_stages(stages: Sequence[Stage], *, row_fields: Iterable[str] = ()) -> None:
    """The way as a whole, before anything runs: every column has one writer, the catalogue's, and is there when it is read.
    row_fields: what the rows of this run have beside ROW_FIELDS.

    Raises FieldError, with stage, field and producer, when a stage reads a field of which the catalogue does not name it as a
    consumer, writes one that another stage should write, or reads what no stage before it has written.
    """
    written = {*ROW_FIELDS, *row_fields}
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen:
            raise FieldError(f"stage {stage.name!r} stands twice: {sorted(stage.writes)} would have two writers")
        seen.add(stage.name)
        for name in sorted(stage.reads):
            _check_read(stage, catalogue_field(name), written)
        for name in sorted(stage.writes):
            _check_write(stage, catalogue_field(name))
        written |= stage.writes


def _check_read(stage: Stage, entry: Field, written: set[str]) -> None:
    if stage.name not in entry.consumers:
        raise FieldError(
            f"stage {stage.name!r} reads field {entry.name!r} of {entry.producer!r}, but the catalogue (asyncrl/fields.py) names "
            f"as its consumers {', '.join(entry.consumers)}; add the stage there, or read another field"
        )
    if entry.name not in written:
        raise FieldError(
            f"stage {stage.name!r} reads field {entry.name!r}, which nobody before it has written; {entry.producer!r} writes it "
            f"({entry.when}), and must stand before {stage.name!r}"
        )


def _check_write(stage: Stage, entry: Field) -> None:
    if stage.name != entry.producer:
        raise FieldError(
            f"stage {stage.name!r} writes field {entry.name!r}, but its producer in the catalogue (asyncrl/fields.py) is "
            f"{entry.producer!r}; a column has one writer"
        )


async def check_sample(scope: StepScope, *, group_size: int, max_staleness: int, may_lack_sessions: bool = False) -> None:
    """What replay sampled, before the first stage sees it: whole groups of one partition, and no token older than the bound.
    may_lack_sessions: replay.failed_groups = "train_partial".

    From keys and tags in every step; where `scope.check` is set, from every column of the rows, with every field invariant.
    Raises FieldError.
    """
    batch, version = scope.batch, scope.context.version
    groups_are_whole(batch, group_size=group_size, partition_id=TRAIN, may_lack_sessions=may_lack_sessions)
    tags_are_fresh(batch, version=version, max_staleness=max_staleness)
    if scope.check:
        columns = await scope.queue.kv_batch_get(batch.keys, partition_id=batch.partition_id, fields=ROW_FIELDS)
        await scope.world.offload(_check_values, batch, columns, version, max_staleness, pool="model", timeout_s=scope.timeout_s)


def _check_values(batch: KVBatchMeta, columns: TensorDict, version: int, max_staleness: int) -> None:
    check_batch(batch, columns)
    actions_are_fresh(batch, columns, version=version, max_staleness=max_staleness)


async def check_cleanup(scope: StepScope) -> None:
    """After the batch was retired: where `scope.check` is set, no key of its groups is visible any more. Raises FieldError."""
    if scope.check:
        partition_id = scope.batch.partition_id
        cleanup_leaves_nothing(scope.batch, (await scope.queue.kv_list(partition_id))[partition_id])
