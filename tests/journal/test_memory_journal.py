"""The journal in memory and the simulator's keep what journal/port.py promises; what a crash leaves is a first part of the log."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.distribution import Distribution
from asyncrl.config.simulation import SimJournalConfig
from asyncrl.errors import JournalWriteError
from asyncrl.journal.entries import Entry, PutCounters, PutRows, RowEntry, Saved
from asyncrl.journal.model import FOLDED_ENTRIES, JournalDisk, MemoryJournal
from asyncrl.simulation.edges.journal import SimJournal
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.seams import Seams

MakeHistory = Callable[[st.DataObject], Any]
CONFIG = SimJournalConfig(commit_s=Distribution(value=1.0), sync_s=Distribution(value=0.5))


class Failing(Seams):
    """The disk refuses commit number `fails_at`."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._left = fails_at

    def journal_fails(self) -> bool:
        self._left -= 1
        return self._left < 0


def simulated(disk: JournalDisk | None = None, *, seams: Seams | None = None, is_full_sync: bool = False) -> SimJournal:
    return SimJournal(disk or JournalDisk(), CONFIG, seams or Seams(), is_full_sync=is_full_sync)


def meant(entries: Sequence[Entry], *, incarnation: int = 0) -> Saved:
    """What a disk with these entries has."""
    saved = Saved(incarnation=incarnation)
    for entry in entries:
        saved.apply(entry)
    return saved


def loaded(saved: Saved, weights_step: int) -> Saved:
    return JournalDisk(saved=saved.copy()).load(weights_step)


def count(number: int) -> Entry:
    return (PutCounters({"admitted": number}),)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_comes_back_is_what_the_operations_mean(make_history: MakeHistory, data: st.DataObject) -> None:
    history, disk = make_history(data), JournalDisk()
    written: list[Entry] = []

    async def write(entries: Sequence[Entry]) -> None:
        journal = simulated(disk)
        found, weights_step = meant(written, incarnation=life), data.draw(st.integers(0, 5))
        assert disk.steps() == found.steps
        assert journal.load(weights_step) == loaded(found, weights_step)
        await asyncio.gather(*[journal.append(entry, synced=data.draw(st.booleans())) for entry in entries])
        journal.close()

    for life in range(data.draw(st.integers(2, 4))):
        entries = [history.entry() for _ in range(data.draw(st.integers(0, 8)))]
        with closing(VirtualLoop(life)) as loop:  # hypothesis may end an example in the middle of a draw
            loop.run_until_complete(write(entries))
        disk.crash(0.0, power=True)  # closed: nothing of it may go
        written += entries


@given(
    times=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12),
    syncs=st.integers(0, 2**12 - 1),
    at_s=st.floats(0.0, 12.0),
    u=st.floats(0.0, 1.0, exclude_max=True),
    power=st.booleans(),
)
def test_a_crash_keeps_a_first_part_with_all_that_was_promised(
    times: list[float], syncs: int, at_s: float, u: float, power: bool
) -> None:
    """However the entries fall together in commits, and whenever it comes."""
    disk, done = JournalDisk(), dict[int, bool]()

    async def write() -> None:
        journal = simulated(disk)
        for number, pause_s in enumerate(times, 1):
            await asyncio.sleep(pause_s)
            is_synced = bool(syncs >> number & 1)
            note = partial(_note, done, number, is_synced=is_synced)
            journal.append(count(number), synced=is_synced).add_done_callback(note)
        await asyncio.Event().wait()

    async def until() -> None:
        writing = asyncio.create_task(write())
        await asyncio.sleep(at_s)
        writing.cancel()

    loop = VirtualLoop(0, order=Order.STRICT)
    loop.run_until_complete(until())
    loop.abandon()
    num_written = disk.num_entries
    promised = [number for number, is_synced in done.items() if is_synced or not power]
    disk.crash(u, power=power)
    kept = disk.saved.counters.get("admitted", 0)
    assert max(promised, default=0) <= kept <= num_written
    assert list(done) == sorted(done), "acknowledged in the order of the log"


def _note(done: dict[int, bool], number: int, _: object, *, is_synced: bool) -> None:
    done[number] = is_synced


def test_a_crash_may_keep_as_little_as_was_promised_and_as_much_as_was_written() -> None:
    def kept(u: float, *, power: bool) -> int:
        disk = JournalDisk()
        for number in range(1, 8):
            disk.append(count(number))
        disk.acknowledge(2, synced=True)
        disk.acknowledge(3, synced=False)
        disk.crash(u, power=power)
        assert (disk.entries, disk.num_entries, disk.num_acked, disk.num_synced) == ([], 0, 0, 0)
        return disk.saved.counters["admitted"]

    assert {kept(u / 100, power=False) for u in range(100)} == {5, 6, 7}
    assert {kept(u / 100, power=True) for u in range(100)} == {2, 3, 4, 5, 6, 7}


def test_entries_that_are_queued_share_the_next_commit_and_wait_for_it() -> None:
    async def write() -> list[float]:
        journal, loop, ends = simulated(), asyncio.get_running_loop(), []

        async def append(number: int, at_s: float, *, synced: bool) -> None:
            await asyncio.sleep(at_s)
            await journal.append(count(number), synced=synced)
            ends.append(loop.time())

        await asyncio.gather(append(1, 0, synced=False), append(2, 0.1, synced=True), append(3, 0.2, synced=False))
        assert journal.stats() == {"journal_bytes": 0.0, "journal_commits": 2.0, "journal_waiting": 0.0}
        return ends

    loop = VirtualLoop(0)
    assert loop.run_until_complete(write()) == [1.0, 2.5, 2.5]
    loop.close()


def test_after_a_failure_nothing_is_acknowledged_any_more() -> None:
    async def write() -> None:
        journal = simulated(seams=Failing(1))
        await journal.append(count(1))
        waiting = [journal.append(count(2)), journal.append(count(3))]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        found.append(journal.append(count(4)).exception())
        assert [str(error) for error in found] == ["the simulated journal cannot be written: disk full"] * 3
        assert isinstance(journal.failure, JournalWriteError)
        journal.close()
        assert (journal.disk.num_acked, journal.disk.num_entries) == (1, 3)

    loop = VirtualLoop(0)
    loop.run_until_complete(write())
    loop.close()


@pytest.mark.parametrize("is_full_sync", [False, True])
async def test_a_long_log_is_folded_as_far_as_it_is_synced(is_full_sync: bool) -> None:
    journal, rng = MemoryJournal(is_full_sync=is_full_sync), random.Random(0)
    last_synced = 0
    for number in range(1, 3 * FOLDED_ENTRIES):
        synced = rng.random() < 0.01 or number == 2 * FOLDED_ENTRIES + 1
        journal.append(count(number), synced=synced)
        last_synced = number if synced or is_full_sync else last_synced
        assert len(journal.disk.entries) <= 2 * FOLDED_ENTRIES
    assert journal.disk.num_folded >= FOLDED_ENTRIES
    assert journal.lose_power().saved.counters["admitted"] == last_synced
    assert journal.crash().saved.counters["admitted"] == 3 * FOLDED_ENTRIES - 1
    assert journal.disk.copy() == journal.disk


async def test_a_tag_that_changes_after_its_entry_changes_nothing_in_the_log() -> None:
    journal, tag = MemoryJournal(), {"status": "pending"}
    await journal.append([PutRows([RowEntry(1, "train", "a", "a", None, 0, 0, tag)])])
    tag["status"] = "finished"
    assert journal.crash().saved.rows[1].row.tag == {"status": "pending"}
