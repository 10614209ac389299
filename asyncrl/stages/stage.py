"""A stage and the one wrapper that runs it.

replay.sample -> [stages] -> retire

A stage is data plus a function: what it reads, what it writes, and `compute`, which sees only columns. The wrapper `run_stage` is
the only code that touches the TransferQueue: it gets `reads` for the batch's keys, runs `compute`, checks the result against the
catalogue, puts `writes` under the step's lease, and reports the schema of traced rows. The controller never keeps the payload. A
get copies, so a stage that works in place cannot change the store, nor what the checks compare its result with.

What is checked when, by `trainer.invariants` (the sample before the first stage and the way as a whole: `contract.py`):

| level     | of every stage, in every step                                              | besides                               |
|-----------|----------------------------------------------------------------------------|---------------------------------------|
| `off`     | what it declares is what it writes, in the catalogue's dtype and layout    |                                       |
|           | and in its rows' lengths; no other stage wrote it; what it reads is there  |                                       |
| `sampled` | the same                                                                   | all invariants, in one step of ten    |
| `all`     | the same                                                                   | all invariants, in every step         |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from asyncrl.errors import DeadlineError, FieldError, MissingColumnError, RankHungError
from asyncrl.fields import Axis
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import StepLease
from asyncrl.ports import Access, StageResult, StepContext, World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch, check_shapes, one_writer_a_column, repeats_are_equal
from asyncrl.protocol.ragged import is_ragged
from asyncrl.stages.reports import mask_sums, reports_of
from asyncrl.transfer_queue import TransferQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What `compute` returns: one ragged or [B] tensor a written field, and metrics."""

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One box of the way. `compute` runs in the world's `model` pool: even the small ones take milliseconds for a large batch.

    Raises FieldError for a name that is not in the catalogue, and for a field that it would read and write.
    """

    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    compute: Callable[[TensorDict, KVBatchMeta, StepContext], StageOutput]
    learns: bool = False
    """Does it change weights?"""

    def __post_init__(self) -> None:
        for name in self.reads | self.writes:
            catalogue_field(name)
        if both := sorted(self.reads & self.writes):
            raise FieldError(
                f"stage {self.name!r} reads and writes {both}; a column has one writer, so give the result a name of its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScope:
    """What all stages of one step share. `check`: read values, too, at every border of this step; names and lengths always are."""

    queue: TransferQueue
    world: World
    batch: KVBatchMeta
    lease: StepLease
    context: StepContext
    check: bool
    timeout_s: float | None = None
    """Of each stage: trainer.stage_timeout_s. None: no deadline."""
    traced: tuple[int, ...] = ()
    """Rows of the batch whose columns are reported for the lineage."""
    writers: dict[str, str] = field(default_factory=dict)
    """Field -> the stage of this step that wrote it; `run_stage` keeps it."""


async def run_stage(stage: Stage, scope: StepScope) -> StageResult:
    """Raises MissingColumnError, with stage, key and producer, when a column that it reads is not there.
    Raises FieldError when the stage writes other fields than it declares, what another stage wrote, or a column that breaks the
    catalogue or an invariant; nothing is written then.
    Raises DeadlineError, with the stage's name, when its compute takes longer than the scope allows; its thread is left behind.
    """
    one_writer_a_column(scope.batch, sorted(stage.writes), writer=stage.name, writers=scope.writers)
    columns = await _read(stage, scope, stage.reads)
    sums = mask_sums(columns, scope.traced)  # before the stage: it may work in place
    reads = reports_of(stage.name, Access.READ, columns, scope.traced, sums)
    output = await _offloaded(stage, scope, columns)
    if not output.columns:
        return StageResult(metrics=output.metrics, reports=reads)
    await _write(stage, scope, output.columns)
    return StageResult(
        metrics=output.metrics, reports=reads + reports_of(stage.name, Access.WRITE, output.columns, scope.traced, sums)
    )


async def _read(stage: Stage, scope: StepScope, fields: Iterable[str]) -> TensorDict:
    try:
        return await scope.queue.kv_batch_get(scope.batch.keys, partition_id=scope.batch.partition_id, fields=sorted(fields))
    except MissingColumnError as error:
        raise MissingColumnError(f"stage {stage.name!r} of step {scope.context.step} cannot read: {error}") from error


async def _write(stage: Stage, scope: StepScope, columns: Mapping[str, torch.Tensor]) -> None:
    written = TensorDict(dict(columns), batch_size=[len(scope.batch)])
    if again := scope.writers.keys() & columns.keys():
        repeats_are_equal(scope.batch, await _read(stage, scope, again), written, writer=stage.name)
    await scope.queue.kv_batch_put(scope.batch.keys, partition_id=scope.batch.partition_id, lease=scope.lease, fields=written)
    scope.writers.update(dict.fromkeys(columns, stage.name))


async def _offloaded(stage: Stage, scope: StepScope, columns: TensorDict) -> StageOutput:
    try:
        return await scope.world.offload(_compute, stage, scope, columns, pool="model", timeout_s=scope.timeout_s)
    except RankHungError:  # a deadline of its own, with words of its own
        raise
    except DeadlineError as error:
        raise DeadlineError(
            f"stage {stage.name!r} of step {scope.context.step} took longer than trainer.stage_timeout_s = {scope.timeout_s} s"
        ) from error


def _compute(stage: Stage, scope: StepScope, columns: TensorDict) -> StageOutput:
    """The stage's own work between the checks of its border."""
    _check_border(f"what stage {stage.name!r} reads", scope, columns)
    # The stage may change values (they are copied where they are checked) and put other columns in its TensorDict (never kept).
    given = columns.clone(recurse=scope.check and bool(stage.writes))
    output = stage.compute(columns, scope.batch, scope.context)
    _check_writes(stage, output, len(scope.batch))
    if output.columns:
        both = TensorDict({**dict(given.items()), **output.columns}, batch_size=[len(scope.batch)])
        _check_border(f"what stage {stage.name!r} wrote", scope, both)
    return output


def _check_border(what: str, scope: StepScope, columns: TensorDict) -> None:
    check = check_batch if scope.check else check_shapes
    try:
        check(scope.batch, columns)
    except FieldError as error:
        raise FieldError(f"{what} in step {scope.context.step}: {error}") from error


def _check_writes(stage: Stage, output: StageOutput, num_rows: int) -> None:
    if set(output.columns) != stage.writes:
        raise FieldError(f"stage {stage.name!r} declares {sorted(stage.writes)} but wrote {sorted(output.columns)}")
    for name, column in output.columns.items():
        entry = catalogue_field(name)
        dtype = str(column.dtype).removeprefix("torch.")
        if dtype != entry.dtype:
            raise FieldError(f"stage {stage.name!r} wrote {name!r} as {dtype}; the catalogue says {entry.dtype}")
        if is_ragged(column) == (entry.axis is Axis.NONE):
            raise FieldError(f"stage {stage.name!r} wrote {name!r} with the wrong layout; the catalogue says axis {entry.axis}")
        if column.size(0) != num_rows:  # len() of a jagged one is slow
            raise FieldError(f"stage {stage.name!r} wrote {column.size(0)} rows of {name!r} for a batch of {num_rows}")
