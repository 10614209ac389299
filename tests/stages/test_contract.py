"""The contract of a run's stages: the way as a whole, the sample before the first of them, the store after the last."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.agents.loop import AgentLoopOutput
from asyncrl.agents.rows import rows_of as session_rows
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE, Tag
from asyncrl.keys import TRAIN, GroupLease, SessionLease, StepLease
from asyncrl.ports import GroupStatus, Prompt, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.advantage import advantage_stage
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.contract import ROW_FIELDS, check_cleanup, check_sample, check_stages
from asyncrl.stages.old_log_prob import bypass_stage, recompute_stage
from asyncrl.stages.ref_log_prob import ref_log_prob_stage
from asyncrl.stages.stage import Stage, StageOutput, StepScope
from asyncrl.stages.update_actor import update_actor_stage
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

ADVANTAGE = advantage_stage(AlgorithmConfig())
BYPASS, RECOMPUTE = bypass_stage(), recompute_stage(lambda columns, shards: (columns["x"], columns["x"]))
REFERENCE = ref_log_prob_stage(lambda columns, shards: (columns["x"], columns["x"]))
METRICS = batch_metrics_stage()


def update(*, old: bool = False, reference: bool = False) -> Stage:
    names = {name for name, is_there in (("old_log_probs", old), ("ref_log_prob", reference)) if is_there}
    return update_actor_stage(lambda columns, group_ids, session_ids, *, seed, shards: {}, columns=names)


def odd(name: str, *, reads: str = "", writes: str = "") -> Stage:
    reading, writing = (frozenset(text.split()) for text in (reads, writes))
    return Stage(name=name, reads=reading, writes=writing, compute=lambda columns, batch, context: StageOutput())


# --- the way as a whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (ADVANTAGE, update(), METRICS),
        (BYPASS, ADVANTAGE, update(old=True), METRICS),
        (RECOMPUTE, REFERENCE, ADVANTAGE, update(old=True, reference=True), METRICS),
        (METRICS, ADVANTAGE, REFERENCE, update(reference=True)),
    ],
    ids=lambda stages: " ".join(stage.name for stage in stages) or "none",
)
def test_ways_that_a_run_can_take(stages: tuple[Stage, ...]) -> None:
    check_stages(stages)


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ((update(), ADVANTAGE), "'update_actor' reads field 'advantages', .* nobody .* 'advantage' writes it .*every step"),
        ((METRICS, update(), ADVANTAGE), "'update_actor' reads field 'advantages', .* nobody"),
        ((ADVANTAGE, update(reference=True)), "'update_actor' reads field 'ref_log_prob', .* 'ref_log_prob' writes it .*KL"),
        ((BYPASS, RECOMPUTE), "stage 'old_log_prob' stands twice: .*'entropy', 'old_log_probs'.* would have two writers"),
        ((ADVANTAGE, odd("advantage2", writes="returns")), "'advantage2' writes field 'returns', .* is 'advantage'"),
        ((odd("old_log_prob", writes="response_mask"),), "'old_log_prob' writes field 'response_mask', .* is 'agents'"),
        ((odd("advantage", reads="responses"),), "'advantage' reads field 'responses' of 'agents', .* consumers old_log_prob, ref"),
        ((odd("advantage", reads="values"),), "'advantage' reads field 'values', which nobody .* 'values' writes it .*gae"),
        ((odd("rewards", reads="extra_info"),), "'rewards' reads field 'extra_info', which nobody .* 'dataset' writes it"),
    ],
    ids=["first", "early", "switched off", "twice", "another's", "the agents'", "not a consumer", "not built", "not in a row"],
)  # fmt: skip
def test_a_way_that_cannot_work_is_refused_before_it_begins(stages: tuple[Stage, ...], complaint: str) -> None:
    with pytest.raises(FieldError, match=complaint):
        check_stages(stages)


def test_a_stage_that_would_write_what_it_reads_cannot_be_made() -> None:
    with pytest.raises(FieldError, match=r"stage 'advantage' reads and writes \['returns'\]; a column has one writer"):
        odd("advantage", reads="returns rm_scores", writes="returns")


# --- a sample ---------------------------------------------------------------------------------------------------------------------

VERSION = 4


def session(uid: str, session_id: int, versions: tuple[int, int] = (VERSION, VERSION)) -> tuple[Any, ...]:
    """Keys, columns and tags of one session with a tool's answer between two sampled tokens, made by the agents' own code."""
    prompt = Prompt(uid=uid, messages=[], data_source="test")
    output = AgentLoopOutput(
        prompt_ids=(1, 2),
        response_ids=(3, 4, 5),
        response_mask=(1, 0, 1),
        response_logprobs=(-0.5, 0.0, -0.25),
        token_versions=(versions[0], -1, versions[1]),
        num_turns=2,
        reward_score=0.5,
    )
    rows = session_rows(prompt, session_id, [output], version=VERSION)
    return rows.keys, rows.fields, rows.tags


async def sampled(
    *sessions: tuple[str, int, tuple[int, int]], check: bool = True, damage: Callable[[Any], None] | None = None
) -> StepScope:
    """A store with these sessions as the agents write them, and the scope of the step that sampled all of them."""
    queue, batch_keys, batch_tags = TransferQueue(), list[str](), list[Tag]()
    for uid in dict.fromkeys(uid for uid, _, _ in sessions):
        group = GroupLease(uid=uid)
        await queue.open_lease(group)
        await queue.kv_put(uid, partition_id=TRAIN, lease=group, tag={"is_prompt": True, "status": GroupStatus.FINISHED})
    for uid, session_id, versions in sessions:
        keys, fields, tags = session(uid, session_id, versions)
        if damage is not None:
            damage(fields)
        lease = SessionLease(uid=uid, session_id=session_id)
        await queue.open_lease(lease)
        await queue.kv_batch_put(keys, partition_id=TRAIN, lease=lease, fields=fields, tags=tags)
        batch_keys += keys
        batch_tags += tags
    step = StepLease(step=VERSION + 1)
    await queue.open_lease(step)
    batch = KVBatchMeta(partition_id=TRAIN, keys=tuple(batch_keys), tags=tuple(batch_tags))
    context = StepContext(step=VERSION + 1, version=VERSION, seed=0)
    return StepScope(queue=queue, world=RealWorld(), batch=batch, lease=step, context=context, check=check)


FRESH, OLD, FUTURE = (VERSION, VERSION), (VERSION - 1, VERSION), (VERSION, VERSION + 1)


@pytest.mark.parametrize("check", [False, True], ids=["tags", "values"])
async def test_what_the_agents_wrote_passes(check: bool) -> None:
    scope = await sampled(("a", 0, FRESH), ("a", 1, FRESH), ("b", 1, FRESH), ("b", 0, FRESH), check=check)
    await check_sample(scope, group_size=2, max_staleness=0)


def test_the_fields_of_a_row_are_those_that_the_agents_write() -> None:
    """Two more columns of the dataset ride along for people; no stage reads them."""
    _, fields, _ = session("a", 0)
    assert set(fields) - set(ROW_FIELDS) == {"data_source", "raw_prompt"}
    assert set(ROW_FIELDS) - set(fields) == set()
    assert [name for name in ROW_FIELDS if not CATALOGUE[name].is_built] == []


@pytest.mark.parametrize("check", [False, True], ids=["tags", "values"])
async def test_a_token_older_than_the_bound_is_never_trained_on(check: bool) -> None:
    scope = await sampled(("a", 0, FRESH), ("a", 1, OLD), check=check)
    await check_sample(scope, group_size=2, max_staleness=1)
    with pytest.raises(FieldError, match="a_1_0: tag 'min_global_steps' is 3; allowed: 4 to 4, for weights of version 4"):
        await check_sample(scope, group_size=2, max_staleness=0)


async def test_a_token_of_weights_to_come_is_never_trained_on() -> None:
    scope = await sampled(("a", 0, FUTURE), check=False)
    with pytest.raises(FieldError, match="a_0_0: tag 'max_global_steps' is 5; allowed: 0 to 4"):
        await check_sample(scope, group_size=1, max_staleness=9)


async def test_the_values_are_asked_where_the_tags_lie() -> None:
    """At the level `off` the tags are believed; above it nothing is."""

    def age(fields: Any) -> None:
        fields["token_versions"] = [(VERSION - 2, -1, VERSION)]

    lying = await sampled(("a", 0, FRESH), damage=age)
    await check_sample(replace(lying, check=False), group_size=1, max_staleness=0)
    with pytest.raises(FieldError, match="a_0_0: tag 'min_global_steps' is 4, but what 'token_versions' of the actions says"):
        await check_sample(lying, group_size=1, max_staleness=2)
    silent = replace(lying, batch=replace(lying.batch, tags=({},)))
    with pytest.raises(FieldError, match="a_0_0: field 'token_versions' is 2 at position 0; allowed: 3 to 4"):
        await check_sample(silent, group_size=1, max_staleness=1)


async def test_columns_that_no_stage_reads_are_checked_too() -> None:
    def mislay(fields: Any) -> None:
        fields["token_versions"] = [(VERSION, VERSION, VERSION)]

    with pytest.raises(FieldError, match="a_0_0: field 'token_versions' is 4 at position 1, where 'response_mask' is False"):
        await check_sample(await sampled(("a", 0, FRESH), damage=mislay), group_size=1, max_staleness=0)


@pytest.mark.parametrize("check", [False, True], ids=["tags", "values"])
async def test_a_part_of_a_group_is_no_sample(check: bool) -> None:
    scope = await sampled(("a", 0, FRESH), ("a", 2, FRESH), check=check)
    with pytest.raises(FieldError, match=r"group 'a' has rows of the sessions \[0, 2\]; allowed: each of 0 to 2"):
        await check_sample(scope, group_size=3, max_staleness=0)
    other = replace(scope, batch=replace(scope.batch, partition_id="val"))
    with pytest.raises(FieldError, match="a_0_0: from partition 'val'; allowed: 'train'"):
        await check_sample(other, group_size=3, max_staleness=0)


async def test_a_key_that_outlives_its_step_is_found() -> None:
    scope = await sampled(("a", 0, FRESH), ("a", 1, FRESH), ("b", 0, FRESH))
    with pytest.raises(FieldError, match="a: still in partition 'train' after its group was cleaned up, one of 2"):
        await check_cleanup(scope)
    await scope.queue.retire(scope.batch.keys[:1], partition_id=TRAIN, step=VERSION + 1, lease=scope.lease)
    with pytest.raises(FieldError, match="still in partition 'train'"):
        await check_cleanup(scope)
    await scope.queue.retire(scope.batch.keys[1:], partition_id=TRAIN, step=VERSION + 1, lease=scope.lease)
    await check_cleanup(scope)
