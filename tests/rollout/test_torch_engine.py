"""What only the embedded engine has to keep: a thread of its own, which may hang."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest
from asyncrl.rollout.torch_engine import TorchEngine


async def test_leaving_does_not_wait_for_a_thread_that_hangs(
    tiny_model: Callable[..., PreTrainedModel], request_of: Callable[..., GenerateRequest], caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    with caplog.at_level(logging.ERROR):
        async with TorchEngine(tiny_model("llama", 0), max_num_seqs=2, context_len=32, close_timeout_s=0.01) as engine:
            engine._commands.put(lambda: list(iter(let_go.wait, True)).clear())
            task = asyncio.create_task(engine.generate(request_of()))
            await asyncio.sleep(0)
    assert "left behind" in caplog.text
    with pytest.raises(EngineError, match="closed"):
        await task
    let_go.set()
