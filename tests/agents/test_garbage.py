"""A session leaves no cycles: what it was made of is freed when it ends, and no collection has to stop the loop for it."""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncrl.config import TrainRun
from asyncrl.ports import Prompt
from asyncrl.transfer_queue import TransferQueue


async def test_a_group_that_has_ended_leaves_nothing_to_the_collector(
    rig: Any, queue: TransferQueue, prompt: Prompt, new_run: Callable[..., TrainRun]
) -> None:
    async with rig.runner(queue, rig.engine(rig.call_then_answer), new_run()) as runner:
        await _run(runner, replace(prompt, uid="a1"))  # what is made once is made now
        gc.collect()
        gc.disable()
        try:
            await _run(runner, replace(prompt, uid="a2", number=1))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not [name for name in left if name.startswith(("asyncrl.", "_asyncio."))], left


async def _run(runner: Any, prompt: Prompt) -> None:
    runner.start(prompt)
    await runner.join()
