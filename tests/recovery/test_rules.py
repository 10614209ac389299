"""The twenty rules of docs/proofs/recovery.md, on the product: each test fails when the line that is the rule is taken away.

Lives of the real controller end at a chosen event (conftest.py), and the next one goes on from what the journal has then. What
rules come to together is tested by tests/endurance/kill_training.py, and by the simulator.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    GroupsExhaustedError,
    PoisonedStepError,
    RecordError,
    StaleLeaseError,
)
from asyncrl.feed import Feed
from asyncrl.journal.entries import KeptSteps, PutColumn, Saved
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.observe.metrics import MetricsLog, read_metrics
from asyncrl.observe.run_folder import RunFolder
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.rollout.turn_gate import TurnGate
from asyncrl.training.checkpoint import FORMAT, delete_damaged, find_checkpoints, kept_steps
from asyncrl.training.start import Start, facts_of, refuse_changes
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

NewLife = Callable[..., Any]
"""Of conftest.py."""

BATCH = 2
KEEP_ALL = {"trainer": {"save_freq": 1000}}
"""No checkpoint before the last step: nothing is purged."""
ASYNC = {"trainer": {"save_freq": 1000, "mode": "async", "max_staleness": 1}}


def prefixes(journal: MemoryJournal) -> Iterator[Saved]:
    """What a crash may leave of a journal: after each of its entries."""
    saved = Saved()
    yield saved.copy()
    for entry in journal.disk.entries:
        saved.apply(entry)
        yield saved.copy()


def leaving_at(*event: Any) -> Callable[[Any, tuple[Any, ...]], None]:
    """Puts the journal away at the first event that begins so, under `event`."""

    def at(life: Any, seen: tuple[Any, ...]) -> None:
        if seen[: len(event)] == event:
            life.leave(event)

    return at


def losing_the_engine(*request_ids: str) -> Callable[[Any, tuple[Any, ...]], None]:
    """The first call of these requests is lost."""
    lost = set(request_ids)

    def at(life: Any, seen: tuple[Any, ...]) -> None:
        if seen[0] == "generate" and seen[1] in lost:
            lost.discard(seen[1])
            raise EngineError("the engine was lost")

    return at


def uid(number: int) -> str:
    return RealWorld(run_seed=1).uid(number)


def num_admitted_rows(saved: Saved) -> int:
    return sum(saved_row.row.session_id is None for saved_row in saved.rows.values())


def num_dropped(saved: Saved) -> int:
    return sum(count for name, count in saved.counters.items() if name.startswith("dropped/"))


# --- 1 to 4: what is one transaction ----------------------------------------------------------------------------------------------


async def test_rule_01_an_admission_is_one_transaction(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC).live()
    seen = list(prefixes(life.journal))
    assert seen[-1].counters["admitted"] == 8
    for saved in seen:
        admitted = saved.counters.get("admitted", 0)
        assert saved.counters.get("cursor", 0) == admitted == num_admitted_rows(saved)
        assert {row.row.uid for row in saved.rows.values() if row.row.session_id is None} == {uid(n) for n in range(admitted)}
        assert all("raw_prompt" in row.cells for row in saved.rows.values() if row.row.session_id is None)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_rule_01_a_place_is_freed_by_a_publication_only(new_life: NewLife, max_staleness: int) -> None:
    settings = {"trainer": {**KEEP_ALL["trainer"], "mode": "async", "max_staleness": max_staleness}}
    life = await new_life(settings=settings).live()
    published, most = 0, 0
    for what, number, *_ in (event for event in life.events if event[0] in ("publish", "admitted")):
        published = number if what == "publish" else published
        held = number - BATCH * published if what == "admitted" else 0
        most = max(most, held)
    assert most == (max_staleness + 1) * BATCH


async def test_rule_02_a_turn_is_kept_with_its_tools_answers(new_life: NewLife) -> None:
    life = await new_life(settings=KEEP_ALL).live()
    kept = [turns for saved in prefixes(life.journal) for turns in saved.turns.values() if turns]
    assert kept
    for turns in kept:
        mask = torch.frombuffer(bytearray(turns[0]["response_mask"][1]), dtype=getattr(torch, turns[0]["response_mask"][0].dtype))
        assert mask[-1] == 0, "the answer of the tool is missing"


async def test_rule_02_a_session_settles_with_its_rows_and_the_groups_status(new_life: NewLife) -> None:
    life = await new_life(settings=KEEP_ALL).live()
    for saved in prefixes(life.journal):
        rows = {(row.row.uid, row.row.session_id) for row in saved.rows.values()}
        settled = {key for key, lease in saved.leases.items() if key[1] is not None and not lease.is_open}
        terminal = [
            row.row for row in saved.rows.values() if row.row.tag.get("status") == "finished" and row.row.session_id is None
        ]
        assert settled <= rows
        assert all({(prompt.uid, 0), (prompt.uid, 1)} <= rows for prompt in terminal)
        assert not any((prompt.uid, None) in saved.leases for prompt in terminal)


async def test_rule_02_a_drop_is_counted_with_its_rows_and_no_fallback_undoes_it(new_life: NewLife) -> None:
    lost = f"{uid(1)}_0_1"
    settings = {**KEEP_ALL, "agent": {"max_attempts": 1}}
    life = await new_life(settings=settings, at=losing_the_engine(lost)).live()
    for saved in prefixes(life.journal):
        assert saved.counters.get("admitted", 0) == num_admitted_rows(saved) + num_dropped(saved)
    assert num_dropped(life.journal.saved) == 1
    again = await new_life(journal=life.journal.crash(), step=0, settings=settings).live()
    assert num_dropped(again.journal.saved) == 1
    assert again.trained() == life.trained()
    assert not any(uid(1) in key for keys in again.trained().values() for key in keys)


async def test_rule_03_a_retry_is_one_transaction_with_the_end_of_the_attempt_before(new_life: NewLife) -> None:
    session = (uid(0), 0)
    life = await new_life(settings=KEEP_ALL, at=losing_the_engine(f"{uid(0)}_0_1")).live()
    begun = [saved for saved in prefixes(life.journal) if session in saved.leases]
    attempts = [(saved.leases[session].attempt, len(saved.turns.get(session, []))) for saved in begun]
    assert (0, 1) in attempts, "no turn of the first attempt was kept, so nothing is shown"
    assert next(turns for attempt, turns in attempts if attempt == 1) == 0
    assert max(attempts)[0] == 1


async def test_rule_03_who_writes_for_a_dead_attempt_changes_nothing() -> None:
    journal = MemoryJournal()
    async with TransferQueue(journal, journal.load()) as queue:
        await queue.open_lease(GroupLease(uid="a"))
        first = SessionLease(uid="a", session_id=0)
        await queue.open_lease(first)
        await queue.open_lease(replace(first, attempt=1))
        before = journal.saved
        with pytest.raises(StaleLeaseError):
            await queue.put_turn(first, 0, {"responses": [1]})
        with pytest.raises(StaleLeaseError):
            await queue.settle_session(first, partition_id=TRAIN, keys=["a_0_0"], fields={"responses": [[1]]})
        assert journal.saved == before


async def test_rule_04_a_restart_keeps_attempts_and_turns_and_has_a_new_incarnation(new_life: NewLife) -> None:
    first, second = f"{uid(0)}_0_0", f"{uid(0)}_0_1"
    life = await new_life(settings=KEEP_ALL, at=leaving_at("generate", second)).live()
    left = life.left["generate", second]
    before = left.saved
    again = await new_life(journal=left, step=0, settings=KEEP_ALL).live()
    calls = [event[1] for event in again.of("generate")]
    assert second in calls
    assert first not in calls, "the kept turn was lost"
    taken_over = next(saved for saved in prefixes(again.journal) if saved.leases)
    assert again.journal.disk.saved.incarnation == before.incarnation + 1
    assert {lease.attempt for lease in taken_over.leases.values()} == {0}
    assert again.trained() == life.trained()


# --- 5 and 6: steps ---------------------------------------------------------------------------------------------------------------


async def test_rule_05_a_record_is_synced_before_any_stage_runs(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC).live()
    for step in range(1, 5):
        assert life.first("record", step, True) < life.first("learn", step)


@pytest.mark.parametrize("mode", [KEEP_ALL, ASYNC], ids=["sync", "async"])
async def test_rule_05_a_repeated_step_takes_the_keys_of_its_record(new_life: NewLife, mode: dict[str, Any]) -> None:
    life = await new_life(settings=mode, at=leaving_at("learn", 3)).live()
    again = await new_life(journal=life.left["learn", 3], step=0, settings=mode).live()
    assert [event[1] for event in again.of("learn")] == [1, 2, 3, 4]
    assert {step: again.trained()[step] for step in (1, 2, 3)} == {step: life.trained()[step] for step in (1, 2, 3)}
    groups = [key.partition("_")[0] for keys in again.trained().values() for key in keys]
    assert len(set(groups)) == 4 * BATCH, "a group was trained on twice"


async def test_rule_05_a_record_stays_as_it_is(new_life: NewLife) -> None:
    life = await new_life(settings=KEEP_ALL, at=leaving_at("learn", 2)).live()
    journal = life.left["learn", 2]
    async with TransferQueue(journal, journal.load()) as queue:
        kept = queue.recorded(2)
        assert kept is not None
        with pytest.raises(RecordError, match="they stay"):
            await queue.record(2, kept.keys[:2], partition_id=TRAIN)


async def test_rule_06_record_update_retire_publish(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC).live()
    for step in range(1, 5):
        order = [life.first(what, step) for what in ("record", "learn", "retire", "publish")]
        assert order == sorted(order)


async def test_rule_06_what_a_row_is_follows_from_its_record_and_the_weights(new_life: NewLife) -> None:
    life = await new_life(settings=KEEP_ALL).live()
    for weights in range(5):
        journal = life.journal.crash()
        async with TransferQueue(journal, journal.load(weights), weights_step=weights) as queue:
            there = {key for key in (await queue.kv_list(TRAIN))[TRAIN] if "_" in key}
        assert there == {key for step, keys in life.trained().items() if step > weights for key in keys}
    written = {op.field for entry in life.journal.disk.entries for op in entry if isinstance(op, PutColumn)}
    assert "responses" in written
    assert "advantages" not in written, "what a stage wrote is in the journal"


# --- 7 to 10: checkpoints ---------------------------------------------------------------------------------------------------------

TWO_STEPS = {"trainer": {"mode": "async", "max_staleness": 1, "publish_freq": 2, "save_freq": 2}}


async def test_rule_07_checkpoints_end_a_version(new_life: NewLife) -> None:
    life = await new_life(settings=TWO_STEPS, total_steps=6).live()
    assert life.saved == [2, 4, 6]
    with pytest.raises(ConfigError, match=r"trainer\.save_freq = 3 is not a multiple of trainer\.publish_freq = 2"):
        await new_life(settings={"trainer": {**TWO_STEPS["trainer"], "save_freq": 3}}).live()


async def test_rule_07_a_failure_inside_a_version_leaves_no_checkpoint_of_it(new_life: NewLife) -> None:
    def fail_after_step_3(life: Any, event: tuple[Any, ...]) -> None:
        if event == ("retire", 3):
            raise OSError(5, "the machine is ill")

    life = new_life(settings=TWO_STEPS, total_steps=6, at=fail_after_step_3)
    with pytest.raises(OSError, match="the machine is ill"):
        await life.live()
    assert life.saved == [2]


def test_rule_07_step_0_counts_as_a_checkpoint(tmp_path: Path) -> None:
    seen = []
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
        seen.append(kept_steps(tmp_path, 2))
    assert seen == [[0, 2], [2, 4], [4, 6]]
    assert KeptSteps(purged=0, last=3).newest_of([0]) == 0


async def test_rule_07_a_stop_waits_for_the_end_of_a_version(new_life: NewLife) -> None:
    def stop_in_step_3(life: Any, event: tuple[Any, ...]) -> None:
        if event == ("retire", 3):
            life.stop.request()

    life = await new_life(settings=TWO_STEPS, total_steps=6, at=stop_in_step_3).live()
    assert (life.saved, [event[1] for event in life.of("learn")]) == ([2, 4], [1, 2, 3, 4])


async def test_rule_08_what_a_checkpoint_takes_for_granted_is_synced_before_it(new_life: NewLife) -> None:
    settings = {"trainer": {"save_freq": 1, "test_freq": 1}, "eval": {"where": "snapshot", "sampled": False}}
    life = await new_life(settings=settings, evaluates=True).live()
    assert life.saved == [1, 2, 3, 4]
    for step in life.saved:
        save = life.first("save", step)
        evaluated = life.first("evaluated", step - 1)
        assert evaluated < save
        assert any(event == ("synced",) for event in life.events[max(evaluated, life.first("learn", step)) : save])


async def test_rule_09_purged_up_to_the_older_checkpoint_so_the_journal_does_not_grow(new_life: NewLife) -> None:
    life = await new_life(settings={"trainer": {"save_freq": 2}}, total_steps=12).live()
    kept = [0]
    for event in life.events:
        if event[0] == "save":
            kept = [*kept, event[1]][-2:]
        elif event[0] == "purged_step":
            assert event[1] == kept[0]
    assert max(event[1] for event in life.of("purged_step")) == 10
    assert max(len(saved.records) for saved in prefixes(life.journal)) <= 3 * 2


def make_checkpoint(folder: Path, step: int, *, is_whole: bool = True) -> Path:
    """As far as its manifest and DONE go."""
    path = folder / f"global_step_{step}"
    path.mkdir(parents=True)
    facts = {"format": FORMAT, "step": step, "version": step, "controllers": {}, "counters": {}, "files": {}}
    content = json.dumps(facts).encode()
    (path / "manifest.json").write_bytes(content if is_whole else content[:-1])
    (path / "DONE").write_text(hashlib.blake2b(content, digest_size=16).hexdigest(), encoding="utf-8")
    return path


def test_rule_10_damaged_checkpoints_are_deleted_and_said(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    damaged, said = make_checkpoint(tmp_path, 4, is_whole=False), list[str]()
    found = find_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in found.whole] == [2]
    delete_damaged(found, said.append)
    assert not damaged.exists()
    assert kept_steps(tmp_path, 2) == [0, 2]
    assert len(said) == 1
    assert "global_step_4" in said[0]


def test_rule_10_the_newest_weights_that_fit_the_journal_or_none() -> None:
    steps = KeptSteps(purged=2, last=5)
    assert [steps.newest_of([0, 2, 4]), steps.newest_of([0, 2]), steps.newest_of([5])] == [4, 2, 5]
    with pytest.raises(CheckpointError, match="the journal begins after step 2, the newest whole checkpoint is of step 0"):
        steps.newest_of([0])
    with pytest.raises(CheckpointError, match="the journal ends with step 5, the newest whole checkpoint is of step 6"):
        steps.newest_of([0, 2, 6])


async def test_rule_10_a_restart_publishes_the_loaded_version_and_goes_on_by_the_records(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC, at=leaving_at("learn", 4)).live()
    again = await new_life(journal=life.left["learn", 4], step=2, settings=ASYNC).live()
    assert again.events.index(("publish", 2)) < again.first("learn")
    assert again.trained() == {step: life.trained()[step] for step in (3, 4)}


# --- 11 to 14: after a restart ----------------------------------------------------------------------------------------------------


async def test_rule_11_nothing_is_generated_before_the_last_recorded_step_is_published(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC, total_steps=6, at=leaving_at("learn", 3)).live()
    again = await new_life(journal=life.left["learn", 3], step=0, settings=ASYNC, total_steps=6).live()
    assert again.first("generate") > again.first("publish", 3)


async def test_rule_12_trained_falls_with_the_weights_and_nothing_is_lost(new_life: NewLife) -> None:
    life = await new_life(settings=ASYNC, at=leaving_at("learn", 3)).live()
    for weights in (0, 1, 2):
        async with new_life(journal=life.left["learn", 3].crash(), step=weights, settings=ASYNC).opened() as trainer:
            counts = trainer.admission.counters()
            alive = len(trainer.queue.groups_under_way(TRAIN))
            assert counts["trained"] == trainer.queue.num_trained == BATCH * weights
            assert counts["open"] == alive + BATCH * (3 - weights)
            assert counts["admitted"] == trainer.queue.counters()["admitted"] == counts["trained"] + counts["open"]


EVALUATES = {"trainer": {"save_freq": 1, "test_freq": 1}, "eval": {"sampled": False}}


async def test_rule_13_an_evaluation_is_due_at_the_load_of_its_version_until_it_has_a_result(new_life: NewLife) -> None:
    life = await new_life(settings=EVALUATES, evaluates=True, at=leaving_at("publish", 2)).live()
    assert [event[1] for event in life.of("evaluated")] == [0, 1, 2, 3, 4]
    again = await new_life(journal=life.left["publish", 2], step=2, settings=EVALUATES, evaluates=True).live()
    assert [event[1] for event in again.of("evaluated")] == [2, 3, 4]
    done = await new_life(journal=life.journal.crash(), step=4, settings=EVALUATES, evaluates=True).live()
    assert done.of("generate") == []


async def test_rule_13_between_means_that_nothing_is_published_meanwhile(new_life: NewLife) -> None:
    life = await new_life(settings=EVALUATES, evaluates=True).live()
    beside = [number for number, event in enumerate(life.events) if event[0] == "generate" and event[1].startswith("val-")]
    assert beside
    for number in beside:
        until = next(after for after, event in enumerate(life.events) if after > number and event[0] == "evaluated")
        assert not [event for event in life.events[number:until] if event[0] == "publish"]


async def test_rule_14_after_the_end_of_the_feed_what_fills_no_batch_is_dropped(new_life: NewLife) -> None:
    life = new_life(settings=ASYNC)
    async with life.opened() as trainer:
        trainer.feed = Feed(life.rows, trainer.world, seed=1, shuffle=True, epochs=1, cursor=3)  # five are left
        with pytest.raises(GroupsExhaustedError):
            await trainer.fit()
        counts = trainer.admission.counters()
    assert (counts["admitted"], counts["trained"], counts["dropped/feed_end"], counts["open"]) == (5, 4, 1, 0)


# --- 15 to 20: reasoned -----------------------------------------------------------------------------------------------------------


async def test_rule_15_order_and_seeds_are_functions_of_numbers(new_life: NewLife) -> None:
    world, rows = RealWorld(run_seed=1), new_life().rows
    whole = Feed(rows, world, seed=1, shuffle=True, epochs=None)
    prompts = [whole.take(0) for _ in range(20)]
    later = Feed(rows, world, seed=1, shuffle=True, epochs=None, cursor=13)
    assert [later.take(0) for _ in range(7)] == prompts[13:]
    life = await new_life(settings=KEEP_ALL, at=leaving_at("learn", 2)).live()
    lost = losing_the_engine(*(event[1] for event in life.of("generate")))
    again = await new_life(journal=life.left["learn", 2], step=0, settings=KEEP_ALL, at=lost).live()
    retried = [(request, seed) for _, request, seed in again.of("generate")]
    assert len(retried) > len(set(retried)) > 0
    assert set(retried) <= {(request, seed) for _, request, seed in life.of("generate")}


CHANGES: dict[str, dict[str, Any]] = {
    "data.train_batch_size": {"data": {"train_batch_size": 4}},
    "rollout.n": {"rollout": {"n": 3}},
    "trainer.max_staleness": {"trainer": {"mode": "async", "max_staleness": 2, "save_freq": 1000}},
    "trainer.publish_freq": {"trainer": {"mode": "async", "max_staleness": 1, "publish_freq": 2, "save_freq": 1000}},
    "updates_per_batch": {"actor": {"ppo_epochs": 2}, **ASYNC},
    "a greedy session": {"algorithm": {"adv_estimator": "remax"}},
}


@pytest.mark.parametrize("fact", CHANGES)
def test_rule_16_a_resume_refuses_another_meaning_of_a_step_or_bound(new_life: NewLife, fact: str) -> None:
    run, changed = new_life(settings=ASYNC).run_config(), new_life(settings={**ASYNC, **CHANGES[fact]}).run_config()
    rows, path = new_life().rows, Path("start.json")
    start = Start(facts=facts_of(run, rows, "digest"), weights="digest")
    refuse_changes(path, start, facts_of(run, rows, "digest"))
    with pytest.raises(CheckpointError, match=f"began with {fact} "):
        refuse_changes(path, start, facts_of(changed, rows, "digest"))


async def test_rule_17_a_step_that_never_ends_ends_the_run_with_its_keys(new_life: NewLife) -> None:
    settings = {"trainer": {**KEEP_ALL["trainer"], "max_step_tries": 3}}
    life = await new_life(settings=settings, at=leaving_at("learn", 2)).live()
    for _ in range(2):
        life = await new_life(journal=life.left["learn", 2], step=0, settings=settings, at=leaving_at("learn", 2)).live()
    with pytest.raises(PoisonedStepError, match=f"step 2 .*{life.trained()[2][0]}"):
        await new_life(journal=life.left["learn", 2], step=0, settings=settings).live()


async def test_rule_18_a_session_whose_tool_remembers_begins_again_in_a_higher_attempt(
    new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = f"{uid(0)}_0_0", f"{uid(0)}_0_1"
    life = await new_life(settings=KEEP_ALL, at=leaving_at("generate", second)).live()
    again = new_life(journal=life.left["generate", second], step=0, settings=KEEP_ALL, is_stateful=True)
    await again.live()
    assert first in [event[1] for event in again.of("generate")]
    attempts = [saved.leases[uid(0), 0].attempt for saved in prefixes(again.journal) if (uid(0), 0) in saved.leases]
    assert max(attempts) == 1
    assert again.trained() == life.trained()


async def test_rule_19_new_calls_queue_while_a_publication_waits() -> None:
    let_go, begun = asyncio.Event(), []

    async def answer(request: GenerateRequest) -> list[int]:
        begun.append(request.request_id)
        await let_go.wait()
        return [1]

    def request(name: str) -> GenerateRequest:
        return GenerateRequest(request_id=name, prompt_ids=[1], sampling=SamplingParams(max_tokens=1), seed=1)

    engine = ScriptedEngine(answer)
    gate = TurnGate(engine, publish_timeout_s=20.0, report=lambda incident: None)
    async with asyncio.TaskGroup() as together:
        before = together.create_task(gate.generate(request("before")))
        await asyncio.sleep(0)
        publishing = together.create_task(gate.publish(1, Weights()))
        await asyncio.sleep(0)
        after = together.create_task(gate.generate(request("after")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun == ["before"], "a call went past the publication that waits"
        let_go.set()
        await publishing
    assert [span.version for span in before.result().version_spans] == [0]
    assert [span.version for span in after.result().version_spans] == [1]


class Weights:
    tensors: dict[str, torch.Tensor] = {}  # noqa: RUF012 -- of no tensor


async def test_rule_20_the_numbers_of_a_step_are_written_before_its_checkpoint(new_life: NewLife) -> None:
    """Whoever goes on from the checkpoint does not train the step again."""
    life = await new_life(settings={"trainer": {"save_freq": 1}}).live()
    assert all(life.first("numbers", step) < life.first("save", step) for step in range(1, 5))


def test_rule_20_the_last_incarnation_of_a_step_counts(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    for incarnation, score in ((0, 0.1), (1, 0.9)):
        with MetricsLog(folder, incarnation=incarnation) as log:
            log.log(1, {"critic/score/mean": score, **({"only/before": 1.0} if incarnation == 0 else {})})
    [row] = read_metrics(folder.metrics)
    assert (row["critic/score/mean"], row["incarnation"]) == (0.9, 1)
    assert "only/before" not in row
