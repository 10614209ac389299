"""Rules 1 to 8 of docs/proofs/recovery.md, on the product: each test fails when the line that is the rule is taken away. The others
are in `test_later_rules.py`.

Lives of the real controller end at a chosen event (conftest.py), and the next one goes on from what the journal has then. What
rules come to together is tested by tests/endurance/kill_training.py, and by the simulator.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    ConfigError,
    RecordError,
    StaleLeaseError,
)
from asyncrl.journal.entries import KeptSteps, PutColumn
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, GroupLease, SessionLease
from asyncrl.training.checkpoint import kept_steps
from asyncrl.transfer_queue import TransferQueue
from tests.recovery.moments import (
    ASYNC,
    BATCH,
    KEEP_ALL,
    NewLife,
    leaving_at,
    losing_the_engine,
    make_checkpoint,
    num_admitted_rows,
    num_dropped,
    prefixes,
    uid,
)

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
