"""How a run ends when something is wrong, and how the next one goes on from it: the product's own rooms, as in test_rules.py."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncrl.errors import AlgorithmError, EngineError, TooManyFailuresError
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.simulation.edges.template import END, WORDS, SimTemplate
from tests.recovery.moments import uid

NewLife = Callable[..., Any]
ASYNC = {"mode": "async", "max_staleness": 1, "save_freq": 2}
ONCE = {"max_attempts": 1}


def refusing(engine: Any, reason: Callable[[GenerateRequest], str]) -> Any:
    """The same engine, which raises where there is a reason to."""

    class Refusing(type(engine)):  # type: ignore[misc]
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(0.01)
            if why := reason(request):
                raise EngineError(why)
            generation: Generation = await super().generate(request)
            return generation

    return Refusing(engine.note)


async def test_an_engine_that_dies_beside_a_long_step_costs_a_few_groups_and_the_run_is_resumed(new_life: NewLife) -> None:
    """Groups fail and are replaced until the trainer samples again: if nothing ended that, every row would be in quarantine."""
    is_dead = threading.Event()

    class Mortal(new_life):  # type: ignore[misc, valid-type]
        def engine(self) -> Any:
            return refusing(super().engine(), lambda _: "the engine's thread died" if is_dead.is_set() else "")

    def die(life: Any, event: Any) -> None:
        if event[:2] == ("learn", 2) and life.step is None:
            is_dead.set()
            time.sleep(0.5)

    settings = {"trainer": ASYNC, "agent": ONCE, "replay": {"max_failed_groups_in_a_row": 4}}
    life = Mortal(settings=settings, total_steps=4, at=die)
    with pytest.raises(TooManyFailuresError, match="the engine's thread died"):
        await life.live()
    left = life.journal.crash()
    assert left.saved.counters["dropped/failure"] <= 4 + 4, "the limit, and what was alive"
    is_dead.clear()
    after = await Mortal(settings=settings, total_steps=4, journal=left, step=life.saved[-1]).live()
    assert max(after.trained()) == 4


async def test_a_step_that_lacks_sessions_is_repeated_whatever_becomes_of_failed_groups_since(new_life: NewLife) -> None:
    class Partial(new_life):  # type: ignore[misc, valid-type]
        def engine(self) -> Any:
            return refusing(super().engine(), lambda request: "no third session" if "_2_" in request.request_id else "")

    def crash(life: Any, event: Any) -> None:
        if event[:2] == ("learn", 3):
            life.leave(("crash",))
            raise RuntimeError("the process ends")

    def settings(policy: str) -> dict[str, Any]:
        return {"rollout": {"n": 3}, "trainer": ASYNC, "agent": ONCE, "replay": {"failed_groups": policy}}

    before = Partial(settings=settings("train_partial"), at=crash)
    with pytest.raises(RuntimeError, match="the process ends"):
        await before.live()
    after = new_life(settings=settings("refill"), journal=before.left["crash",], step=2)
    await after.live()
    assert after.trained()[3] == before.trained()[3]
    assert len(after.trained()[3]) == 4


async def test_a_disk_that_takes_no_checkpoint_does_not_hide_what_ended_the_run(new_life: NewLife) -> None:
    class Full(new_life):  # type: ignore[misc, valid-type]
        async def _save(self, step: int) -> list[int]:
            raise OSError(28, "No space left on device")

    def fail(life: Any, event: Any) -> None:
        if event[:2] == ("learn", 2):
            raise AlgorithmError("a loss that is no number")

    with pytest.raises(AlgorithmError, match="a loss that is no number"):
        await Full(at=fail).live()


@pytest.mark.parametrize("total_steps", [2, 6])
async def test_a_stop_waits_for_no_evaluation_that_can_be_made_again(new_life: NewLife, total_steps: int) -> None:
    """One beside training, of the weights that the stop leaves a checkpoint of: in the middle of the run, and at its end."""

    class Slow(new_life):  # type: ignore[misc, valid-type]
        @asynccontextmanager
        async def _eval_engine(self) -> AsyncIterator[ScriptedEngine]:
            async def answer(request: GenerateRequest) -> list[int]:
                await asyncio.sleep(3600.0)
                return [WORDS, END]

            self.stop.request()  # in the first turn of the loop: the next version is not trained before
            yield ScriptedEngine(answer, decode=SimTemplate(["ask"]).decode)

    trainer = {"test_freq": 2, "val_before_train": False}
    settings = {"trainer": trainer, "eval": {"where": "snapshot", "sampled": False}}
    life = Slow(settings=settings, total_steps=total_steps, evaluates=True)
    async with asyncio.timeout(20.0):
        await life.live()
    assert life.saved
    assert life.of("evaluated") == []


@pytest.mark.parametrize("quarantine_after", [1, 0])
async def test_a_row_in_quarantine_is_never_asked_again_after_a_restart_either(new_life: NewLife, quarantine_after: int) -> None:
    """Row 0 is prompt 0 of the first pass, 8 of the second and 16 of the third: 17 prompts are read in eight steps of two."""
    bad = [uid(number) for number in (0, 8, 16)]

    class Picky(new_life):  # type: ignore[misc, valid-type]
        def engine(self) -> Any:
            return refusing(super().engine(), lambda request: "a bad row" if request.request_id.split("_")[0] in bad else "")

    settings = {
        "agent": ONCE,
        "data": {"shuffle": False},
        "trainer": {"save_freq": 3},
        "replay": {"quarantine_after": quarantine_after},
    }
    first = await Picky(settings=settings, total_steps=3).live()
    after = await Picky(settings=settings, total_steps=8, journal=first.journal.crash(), step=3).live()
    asked = after.journal.saved.counters
    assert asked["failed_row/0"] == asked["dropped/failure"] == (1 if quarantine_after else 3)
    assert asked["admitted"] == 16 + asked["dropped/failure"]
    assert asked["cursor"] >= 18
