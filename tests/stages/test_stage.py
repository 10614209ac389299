"""run_stage: a stage reads and writes what it declares, in the layout of the catalogue, under its lease."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from tensordict import TensorDict

from asyncrl.errors import DeadlineError, FieldError, MissingColumnError, StaleLeaseError
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged, rows_of
from asyncrl.stages.stage import Stage, StageOutput, StepScope, run_stage
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld


@dataclass
class Bench:
    """A store with two trajectories, and the scope of step 1 over them."""

    scope: StepScope

    async def read(self, name: str) -> list[list[float]]:
        columns = await self.scope.queue.kv_batch_get(self.scope.batch.keys, partition_id=TRAIN, fields=[name])
        return [row.tolist() for row in rows_of(columns[name])]


@pytest.fixture
async def bench() -> Bench:
    queue, group, lease = TransferQueue(), GroupLease(uid="a"), SessionLease(uid="a", session_id=0)
    keys = ("a_0_0", "a_0_1")
    await queue.open_lease(group)
    await queue.open_lease(lease)
    masks = [torch.tensor([True, False, True]), torch.tensor([True])]
    fields = {"response_mask": masks, "rm_scores": [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5])]}
    await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields=fields, tags=[{"status": "finished"}] * 2)
    await queue.close_lease(lease)
    await queue.close_lease(group)
    step = StepLease(step=1)
    await queue.open_lease(step)
    batch = KVBatchMeta(partition_id=TRAIN, keys=keys, tags=({}, {}))
    context = StepContext(step=1, version=0, seed=0)
    return Bench(scope=StepScope(queue=queue, world=RealWorld(), batch=batch, lease=step, context=context, check=False))


def stage(
    compute: Callable[[TensorDict], Mapping[str, torch.Tensor]], *, reads: str = "rm_scores", writes: str = "returns"
) -> Stage:
    return Stage(
        name="under test",
        reads=frozenset(reads.split()),
        writes=frozenset(writes.split()),
        compute=lambda columns, batch, context: StageOutput(columns=compute(columns), metrics={"n": float(len(batch))}),
    )


async def test_what_a_stage_writes_is_in_the_store_and_in_its_report(bench: Bench) -> None:
    result = await run_stage(stage(lambda columns: {"returns": columns["rm_scores"]}, reads="rm_scores response_mask"), bench.scope)
    assert await bench.read("returns") == [[0.0, 0.0, 1.0], [0.5]]
    (report,) = result.reports
    assert (report.field, report.dtype, report.lengths, report.mask_sum) == ("returns", "float32", (3, 1), 3)
    assert result.metrics == {"n": 2.0}


async def test_a_stage_that_works_in_place_cannot_change_the_store(bench: Bench) -> None:
    def spoil(columns: TensorDict) -> dict[str, torch.Tensor]:
        columns["rm_scores"].values().fill_(9)
        return {"returns": columns["rm_scores"]}

    await run_stage(stage(spoil), bench.scope)
    assert await bench.read("rm_scores") == [[0.0, 0.0, 1.0], [0.5]]


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda columns: {}, "declares"),
        (lambda columns: {"returns": columns["rm_scores"], "values": columns["rm_scores"]}, "declares"),
        (
            lambda columns: {"returns": ragged([torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])},
            "float64",
        ),
        (lambda columns: {"returns": torch.zeros(2)}, "layout"),
        (lambda columns: {"returns": ragged([torch.zeros(3)])}, "1 rows"),
    ],
    ids=["nothing", "too much", "dtype", "layout", "rows"],
)
async def test_a_wrong_write_is_refused_and_changes_nothing(
    bench: Bench, write: Callable[[TensorDict], Mapping[str, torch.Tensor]], complaint: str
) -> None:
    with pytest.raises(FieldError, match=complaint):
        await run_stage(stage(write), bench.scope)
    with pytest.raises(MissingColumnError):
        await bench.read("returns")


async def test_a_column_that_nobody_wrote_is_named_with_its_producer(bench: Bench) -> None:
    with pytest.raises(MissingColumnError, match=r"values"):
        await run_stage(stage(lambda columns: {}, reads="values"), bench.scope)


async def test_after_its_step_a_stage_can_write_no_more(bench: Bench) -> None:
    await bench.scope.queue.close_lease(bench.scope.lease)
    with pytest.raises(StaleLeaseError):
        await run_stage(stage(lambda columns: {"returns": columns["rm_scores"]}), bench.scope)


def test_a_stage_cannot_name_a_field_that_is_not_in_the_catalogue() -> None:
    with pytest.raises(FieldError, match="no_such_field"):
        stage(lambda columns: {}, reads="no_such_field")


async def test_a_stage_that_hangs_is_named(bench: Bench) -> None:
    let_go = threading.Event()

    def hang(columns: TensorDict) -> dict[str, torch.Tensor]:
        let_go.wait()
        return {}

    with pytest.raises(DeadlineError, match=r"stage 'under test' of step 1 took longer than trainer\.stage_timeout_s = 0\.01 s"):
        await run_stage(stage(hang), replace(bench.scope, timeout_s=0.01))
    let_go.set()


async def test_invariants_run_at_the_border_when_asked(bench: Bench) -> None:
    def outside_the_mask(columns: TensorDict) -> dict[str, torch.Tensor]:
        return {"advantages": ragged([torch.tensor([1.0, 7.0, 1.0]), torch.tensor([1.0])])}

    checked = replace(bench.scope, check=True)
    with pytest.raises(FieldError, match="advantages"):
        await run_stage(stage(outside_the_mask, reads="response_mask", writes="advantages"), checked)
