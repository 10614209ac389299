"""run_stage: a stage reads and writes what it declares, in the layout of the catalogue, under its lease."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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


async def test_what_a_stage_writes_is_in_the_store(bench: Bench) -> None:
    result = await run_stage(stage(lambda columns: {"returns": columns["rm_scores"]}, reads="rm_scores response_mask"), bench.scope)
    assert await bench.read("returns") == [[0.0, 0.0, 1.0], [0.5]]
    assert result.metrics == {"n": 2.0}
    assert result.reports == (), "nobody traces a row"


@pytest.mark.parametrize(("traced", "lengths", "sums"), [((0, 1), (3, 1), (2, 1)), ((1,), (1,), (1,))])
async def test_what_a_stage_reads_and_writes_of_traced_rows_is_reported(
    bench: Bench, traced: tuple[int, ...], lengths: tuple[int, ...], sums: tuple[int, ...]
) -> None:
    def spoil_mask(columns: TensorDict) -> dict[str, torch.Tensor]:
        columns["response_mask"].values().fill_(False)
        return {"returns": columns["rm_scores"]}

    result = await run_stage(stage(spoil_mask, reads="rm_scores response_mask"), replace(bench.scope, traced=traced))
    told = [(report.stage, report.access, report.field, report.dtype, report.layout) for report in result.reports]
    assert told == [
        ("under test", "read", "response_mask", "bool", "ragged"),
        ("under test", "read", "rm_scores", "float32", "ragged"),
        ("under test", "write", "returns", "float32", "ragged"),
    ]
    assert {(report.lengths, report.mask_sums, report.device, report.shape) for report in result.reports} == {
        (lengths, sums, "cpu", ())
    }


async def test_a_report_knows_a_mask_only_from_the_stages_own_columns(bench: Bench) -> None:
    result = await run_stage(stage(lambda columns: {"returns": columns["rm_scores"]}), replace(bench.scope, traced=(0,)))
    assert [report.mask_sums for report in result.reports] == [None, None]


async def test_objects_and_numbers_a_row_are_reported_in_their_layout(bench: Bench) -> None:
    lease = SessionLease(uid="b", session_id=0)
    queue = bench.scope.queue
    await queue.open_lease(GroupLease(uid="b"))
    await queue.open_lease(lease)
    fields: dict[str, list[Any]] = {"num_turns": [2], "extra_fields": [{"a": [1, 2]}]}
    await queue.kv_batch_put(["b_0_0"], partition_id=TRAIN, lease=lease, fields=fields, tags=[{"status": "finished"}])
    batch = KVBatchMeta(partition_id=TRAIN, keys=("b_0_0",), tags=({},))
    result = await run_stage(
        stage(lambda columns: {}, reads="num_turns extra_fields", writes=""), replace(bench.scope, batch=batch, traced=(0,))
    )
    told = [(report.field, report.dtype, report.layout, report.shape, report.lengths) for report in result.reports]
    assert told == [("extra_fields", "object", "object", (), (1,)), ("num_turns", "int64", "stacked", (), (1,))]


@pytest.mark.parametrize("check", [False, True], ids=["off", "all"])
async def test_a_stage_that_works_in_place_cannot_change_the_store(bench: Bench, check: bool) -> None:
    """Every column that it was given is zeroed, replaced or hidden: the store and the checks see them as they were."""

    def spoil(columns: TensorDict) -> dict[str, torch.Tensor]:
        returns = columns["rm_scores"].clone()
        for name in ("rm_scores", "response_mask"):
            columns[name].values().zero_()
        columns["returns"] = ragged([torch.full((3,), 9.0), torch.full((1,), 9.0)])
        del columns["response_mask"]
        return {"returns": returns}

    await run_stage(stage(spoil, reads="rm_scores response_mask"), replace(bench.scope, check=check))
    assert await bench.read("rm_scores") == [[0.0, 0.0, 1.0], [0.5]]
    assert await bench.read("response_mask") == [[True, False, True], [True]]
    assert await bench.read("returns") == [[0.0, 0.0, 1.0], [0.5]]


async def test_what_a_stage_did_in_place_hides_no_broken_result(bench: Bench) -> None:
    """The mask that it opened for itself is not the mask that its advantages are held against."""

    def open_the_mask(columns: TensorDict) -> dict[str, torch.Tensor]:
        columns["response_mask"].values().fill_(True)
        return {"advantages": ragged([torch.ones(3), torch.ones(1)])}

    with pytest.raises(
        FieldError, match=r"what stage 'under test' wrote in step 1: a_0_0: field 'advantages' is 1.0 at position 1"
    ):
        await run_stage(stage(open_the_mask, reads="response_mask", writes="advantages"), replace(bench.scope, check=True))


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
    missing = r"stage 'under test' of step 1 cannot read: key 'a_0_0' .* has no field 'values'; 'values' writes it"
    with pytest.raises(MissingColumnError, match=missing):
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


@pytest.mark.parametrize("check", [False, True], ids=["off", "all"])
async def test_lengths_are_checked_whatever_the_level(bench: Bench, check: bool) -> None:
    """Against the columns that the stage read, and where it read none of that axis against the tags."""
    short = stage(lambda columns: {"returns": ragged([torch.zeros(2), torch.zeros(1)])})
    with pytest.raises(FieldError, match=r"what stage 'under test' wrote in step 1: a_0_0: field 'returns' has 2 entries, but 'rm"):
        await run_stage(short, replace(bench.scope, check=check))
    tagged = replace(bench.scope.batch, tags=({"response_len": 3}, {"response_len": 1}))
    blind = stage(lambda columns: {"returns": ragged([torch.zeros(3), torch.zeros(2)])}, reads="")
    with pytest.raises(FieldError, match="a_0_1: tag 'response_len' is 1, but the length of 'returns' is 2"):
        await run_stage(blind, replace(bench.scope, batch=tagged, check=check))
    with pytest.raises(MissingColumnError):
        await bench.read("returns")


async def test_what_a_stage_reads_is_checked_before_it_runs(bench: Bench) -> None:
    ran = []
    lying = replace(bench.scope.batch, tags=({}, {"response_len": 2}))
    with pytest.raises(FieldError, match="what stage 'under test' reads in step 1: a_0_1: tag 'response_len' is 2, but the length"):
        await run_stage(stage(lambda columns: ran.append(1) or {}), replace(bench.scope, batch=lying))  # type: ignore[func-returns-value]
    assert ran == []


async def test_a_column_has_one_writer_and_an_equal_repeat_is_fine(bench: Bench) -> None:
    values = {"returns": ragged([torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([2.0])])}
    first = stage(lambda columns: values)
    await run_stage(first, bench.scope)
    await run_stage(first, replace(bench.scope))
    other = replace(first, name="another")
    with pytest.raises(FieldError, match="a_0_0: field 'returns' of its 2 rows is written by 'another', but 'under test' has"):
        await run_stage(other, bench.scope)
    values["returns"] = ragged([torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([7.0])])
    with pytest.raises(FieldError, match=r"a_0_1: field 'returns' written again by 'under test' is 7.0 at position 0, but it was"):
        await run_stage(first, bench.scope)
    assert (await bench.read("returns"))[1] == [2.0]
