"""A stage and the one wrapper that runs it.

replay.sample -> [stages] -> retire

A stage is data plus a function: what it reads, what it writes, and `compute`, which sees only columns. The wrapper `run_stage` is
the only code that touches the TransferQueue: it gets `reads` for the batch's keys, runs `compute`, checks the result against the
catalogue, puts `writes` under the step's lease, and reports the schema of traced rows. The controller never keeps the payload. A
get copies, so a stage that works in place cannot change the store.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from asyncrl.errors import DeadlineError, FieldError
from asyncrl.fields import Axis
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import StepLease
from asyncrl.ports import Access, StageResult, StepContext, World
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch
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
    """One box of the way. `compute` runs in the world's `model` pool: even the small ones take milliseconds for a large batch."""

    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    compute: Callable[[TensorDict, KVBatchMeta, StepContext], StageOutput]

    def __post_init__(self) -> None:
        for name in self.reads | self.writes:
            catalogue_field(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScope:
    """What all stages of one step share. `check`: run the field invariants at every border of this step."""

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


async def run_stage(stage: Stage, scope: StepScope) -> StageResult:
    """Raises FieldError when the stage writes other fields than it declares, or a column that breaks the catalogue or an invariant.
    Raises DeadlineError, with the stage's name, when its compute takes longer than the scope allows; its thread is left behind.
    """
    batch = scope.batch
    columns = await scope.queue.kv_batch_get(batch.keys, partition_id=batch.partition_id, fields=sorted(stage.reads))
    sums = mask_sums(columns, scope.traced)  # before the stage: it may work in place
    reads = reports_of(stage.name, Access.READ, columns, scope.traced, sums)
    output = await _offloaded(stage, scope, columns)
    if not output.columns:
        return StageResult(metrics=output.metrics, reports=reads)
    await scope.queue.kv_batch_put(
        batch.keys,
        partition_id=batch.partition_id,
        lease=scope.lease,
        fields=TensorDict(dict(output.columns), batch_size=[len(batch)]),
    )
    return StageResult(
        metrics=output.metrics, reports=reads + reports_of(stage.name, Access.WRITE, output.columns, scope.traced, sums)
    )


async def _offloaded(stage: Stage, scope: StepScope, columns: TensorDict) -> StageOutput:
    try:
        return await scope.world.offload(_compute, stage, scope, columns, pool="model", timeout_s=scope.timeout_s)
    except DeadlineError as error:
        raise DeadlineError(
            f"stage {stage.name!r} of step {scope.context.step} took longer than trainer.stage_timeout_s = {scope.timeout_s} s"
        ) from error


def _compute(stage: Stage, scope: StepScope, columns: TensorDict) -> StageOutput:
    """The stage's own work between the checks of its border."""
    batch = scope.batch
    if scope.check:
        check_batch(batch, columns)
    output = stage.compute(columns, batch, scope.context)
    _check_writes(stage, output, len(batch))
    if scope.check and output.columns:
        check_batch(batch, TensorDict({**dict(columns.items()), **output.columns}, batch_size=[len(batch)]))
    return output


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
        if len(column) != num_rows:
            raise FieldError(f"stage {stage.name!r} wrote {len(column)} rows of {name!r} for a batch of {num_rows}")
