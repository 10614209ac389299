"""Rules 9 to 20 of docs/proofs/recovery.md, as `test_rules.py` has 1 to 8."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    CheckpointError,
    GroupsExhaustedError,
    PoisonedStepError,
)
from asyncrl.feed import Feed
from asyncrl.journal.entries import KeptSteps
from asyncrl.keys import TRAIN
from asyncrl.observe.metrics import MetricsLog, read_metrics
from asyncrl.observe.run_folder import RunFolder
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.rollout.turn_gate import TurnGate
from asyncrl.training.checkpoint import delete_damaged, find_checkpoints, kept_steps
from asyncrl.training.start import Start, facts_of, refuse_changes
from asyncrl.world import RealWorld
from tests.recovery.moments import (
    ASYNC,
    BATCH,
    KEEP_ALL,
    NewLife,
    leaving_at,
    losing_the_engine,
    make_checkpoint,
    prefixes,
    uid,
)


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


async def test_rule_09_a_restart_makes_up_for_a_purge_that_a_crash_has_cut_off(new_life: NewLife) -> None:
    settings = {"trainer": {"save_freq": 1}}
    life = await new_life(settings=settings, at=leaving_at("save", 4)).live()
    again = new_life(journal=life.left["save", 4], step=4, settings=settings, total_steps=5, kept=[3, 4])
    await again.live()
    assert again.first("purged_step", 3) < again.first("record", 5)


async def test_rule_09_lives_that_end_by_a_failure_pile_no_steps_up(new_life: NewLife) -> None:
    """Each leaves a checkpoint of its only step, and its error comes before any other."""
    journal = new_life().journal
    for step in range(6):

        def fail(life: Any, event: tuple[Any, ...], last: int = step + 1) -> None:
            if event == ("publish", last):
                raise OSError(5, "the machine is ill")

        life = new_life(journal=journal, step=step, settings={"trainer": {"save_freq": 1}}, total_steps=12, at=fail)
        with pytest.raises(OSError, match="the machine is ill"):
            await life.live()
        assert life.saved == [step + 1]
        assert len(life.journal.saved.records) <= 3
        journal = life.journal.crash()


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
    "a greedy session (algorithm.adv_estimator)": {"algorithm": {"adv_estimator": "remax"}},
}


@pytest.mark.parametrize("fact", CHANGES)
def test_rule_16_a_resume_refuses_another_meaning_of_a_step_or_bound(new_life: NewLife, fact: str) -> None:
    run, changed = new_life(settings=ASYNC).run_config(), new_life(settings={**ASYNC, **CHANGES[fact]}).run_config()
    rows, path = new_life().rows, Path("start.json")
    start = Start(facts=facts_of(run, rows, "digest"), model="digest")
    refuse_changes(path, start, facts_of(run, rows, "digest"))
    with pytest.raises(CheckpointError, match=re.escape(f"began with {fact} ")):
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
