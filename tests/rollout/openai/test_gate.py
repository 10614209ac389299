"""Nobody is inside of a gate that is held shut, and nobody waits at one that is not."""

import asyncio

from asyncrl.rollout.openai.gate import Gate


async def come(gate: Gate, leave: asyncio.Event) -> None:
    async with gate:
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_shutting_waits_for_those_inside_and_not_for_those_who_come() -> None:
    gate, leave = Gate(), asyncio.Event()
    inside = [asyncio.create_task(come(gate, leave)) for _ in range(3)]
    await settle()
    shutting = asyncio.create_task(gate.shut())
    await settle()
    late = asyncio.create_task(come(gate, leave))
    await settle()
    assert not shutting.done()
    leave.set()
    await shutting
    assert all(task.done() for task in inside)
    assert not late.done()
    gate.open()
    await late


async def test_it_opens_when_all_who_hold_it_have_let_go() -> None:
    gate, leave = Gate(), asyncio.Event()
    leave.set()
    await gate.shut()
    await gate.shut()
    late = asyncio.create_task(come(gate, leave))
    gate.open()
    await settle()
    assert not late.done()
    gate.open()
    await late


async def test_one_who_is_woken_looks_again() -> None:
    gate, leave = Gate(), asyncio.Event()
    leave.set()
    await gate.shut()
    late = asyncio.create_task(come(gate, leave))
    await settle()
    gate.open()
    await gate.shut()  # before the one who waits has had its turn
    await settle()
    assert not late.done()
    gate.open()
    await late


async def test_a_wait_that_is_cancelled_holds_until_it_lets_go() -> None:
    gate, leave = Gate(), asyncio.Event()
    inside = asyncio.create_task(come(gate, leave))
    await settle()
    shutting = asyncio.create_task(gate.shut())
    await settle()
    shutting.cancel()
    await asyncio.gather(shutting, return_exceptions=True)
    late = asyncio.create_task(come(gate, leave))
    leave.set()
    await inside
    await settle()
    assert not late.done()
    gate.open()
    await late
