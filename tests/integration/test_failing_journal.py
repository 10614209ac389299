"""A journal that fails in the middle of a whole run: one reason, and nothing that was learned is lost with it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.errors import EngineError, JournalWriteError
from asyncrl.ports import GenerateRequest, Prompt, WeightSnapshot
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.trainer import Trainer
from asyncrl.training.checkpoint import kept_steps, open_checkpoint
from asyncrl.wiring import Rollout

Opened = Callable[..., AbstractAsyncContextManager[Trainer]]


async def test_a_journal_that_fails_in_a_session_leaves_a_checkpoint_of_the_last_border(
    opened: Opened, config: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "runs/small/journal.db"

    def equip(rollout: Rollout) -> Rollout:
        template = rollout.template
        assert isinstance(template, ChatTemplate)

        async def answer(request: GenerateRequest) -> Sequence[int]:
            if engine.version == 2:
                journal.unlink(missing_ok=True)
            await asyncio.sleep(0)
            return template.encode_assistant(f"it is {request.seed % 7}")

        engine = ScriptedEngine(answer, context_len=400, decode=rollout.template.decode)
        return replace(rollout, engine=engine)

    with pytest.raises(JournalWriteError, match=r"journal\.db cannot be written: it was removed"):
        async with opened(config, equip=equip) as trainer:
            await trainer.fit()
    assert trainer.step == 2
    assert kept_steps(tmp_path / "runs/small/checkpoints", 2) == [0, 2]


class DeafEngine(ScriptedEngine):
    """Takes no other weights than the first ones."""

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        raise EngineError("it takes no weights")


async def test_a_second_failure_does_not_cut_the_checkpoint_of_the_first_one_short(
    opened: Opened, config: Path, tmp_path: Path
) -> None:
    """The journal fails in a group, which cancels the task that is writing the checkpoint."""

    def equip(rollout: Rollout) -> Rollout:
        template = rollout.template
        assert isinstance(template, ChatTemplate)

        async def answer(request: GenerateRequest) -> Sequence[int]:
            return template.encode_assistant(f"it is {request.seed % 7}")

        return replace(rollout, engine=DeafEngine(answer, context_len=400, decode=rollout.template.decode))

    async def run() -> None:
        async with opened(config, equip=equip) as trainer:
            save = trainer.save

            async def save_in_bad_times(step: int) -> list[int]:
                if not trainer.agents.has_failed:
                    (tmp_path / "runs/small/journal.db").unlink()
                    late = Prompt(uid="late", messages=[{"role": "user", "content": "1+1?"}], data_source="sums", number=99)
                    trainer.agents.start(late)
                    await asyncio.Event().wait()
                return await save(step)

            trainer.save = save_in_bad_times
            await trainer.fit()

    with pytest.raises(JournalWriteError, match=r"journal\.db cannot be written: it was removed"):
        await run()
    assert kept_steps(tmp_path / "runs/small/checkpoints", 2) == [0, 1]


async def test_a_checkpoint_that_was_cut_short_is_not_written_by_two_at_once(opened: Opened, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/small/checkpoints"
    async with opened(config) as trainer:
        for step in range(1, 6):
            saving = asyncio.ensure_future(trainer.save(step))
            while not (folder / f".tmp-global_step_{step}").exists():  # noqa: ASYNC110 -- a file sets no event
                await asyncio.sleep(0)
            saving.cancel()
            await trainer.save(step)
            assert open_checkpoint(folder / f"global_step_{step}").step == step
            assert not [path for path in folder.iterdir() if path.name.startswith(".tmp")]
