"""The watch of the loop: a function that blocks is named in the log, once a block, and the block's length is an incident."""

import asyncio
import logging
import re
import threading
from collections.abc import Iterator

import pytest

from asyncrl.observe.loop_watch import LoopWatch
from asyncrl.ports import Incident, IncidentKind

STACK = "the event loop has not run for"


class Listener(logging.Handler):
    """Sets `told` when the watch has logged a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()
        self.stacks: list[str] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        (self.stacks if text.startswith(STACK) else self.lines).append(text)
        if text.startswith(STACK):
            self.told.set()


@pytest.fixture
def listener() -> Iterator[Listener]:
    logger, listener = logging.getLogger("asyncrl.observe.loop_watch"), Listener()
    logger.addHandler(listener)
    yield listener
    logger.removeHandler(listener)


def the_culprit_itself(listener: Listener) -> None:
    """Blocks until the watch has seen it, and then for a while; were it not seen, the test would fail after all."""
    assert listener.told.wait(30), "nobody noticed"
    listener.told.clear()
    assert not listener.told.wait(0.2), "told twice of one block"


def a_caller_of_it(listener: Listener) -> None:
    the_culprit_itself(listener)


def watch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loop-watch"]


async def test_who_blocks_the_loop_is_named_once_a_block(listener: Listener) -> None:
    incidents: asyncio.Queue[Incident] = asyncio.Queue()
    async with LoopWatch(0.05, incidents.put_nowait), asyncio.timeout(30):
        for _ in (1, 2):
            a_caller_of_it(listener)
            assert incidents.empty(), "it is reported on the loop, which stood"
            incident = await incidents.get()
            assert (incident.kind, incident.what, incident.limit) == (IncidentKind.LAG, "loop", "trainer.max_loop_lag_s")
            said = r"the event loop stood still for \d+\.\d\d s in the_culprit_itself \(.*test_loop_watch\.py:\d+\)"
            assert re.fullmatch(said, incident.text)
    assert len(listener.stacks) == len(listener.lines) == 2
    for stack in listener.stacks:
        assert "in a_caller_of_it\n    the_culprit_itself(listener)" in stack
        assert "in the_culprit_itself\n" in stack


async def test_a_block_right_before_the_close_is_reported_and_the_thread_ends(listener: Listener) -> None:
    incidents: list[Incident] = []
    async with LoopWatch(0.05, incidents.append):
        (thread,) = watch_threads()
        the_culprit_itself(listener)
    assert [incident.kind for incident in incidents] == [IncidentKind.LAG]
    thread.join(30)
    assert watch_threads() == []


async def test_a_loop_that_comes_round_is_left_alone(listener: Listener) -> None:
    """Also one that only waits."""
    incidents: list[Incident] = []
    async with LoopWatch(30.0, incidents.append):
        await asyncio.sleep(0.1)
    assert (incidents, listener.stacks, listener.lines) == ([], [], [])
