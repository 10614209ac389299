"""Which weights a journal can be gone on from: purged <= their step <= last record, the newest of those that are whole."""

import itertools

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.journal.entries import KeptSteps, PutCounters, PutRecord, Saved, StepRecord

STEPS = KeptSteps(purged=4, last=9)


@pytest.mark.parametrize(("whole", "step"), [([0, 4], 4), ([0, 4, 8], 8), ([0, 9], 9), ([0, 2, 6], 6)])
def test_the_newest_whole_checkpoint_in_the_journal_is_gone_on_from(whole: list[int], step: int) -> None:
    assert STEPS.newest_of(whole) == step


def test_step_0_counts_until_it_is_purged() -> None:
    assert KeptSteps(purged=0, last=9).newest_of([0]) == KeptSteps(purged=0, last=0).newest_of([0]) == 0


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        ([0], r"begins after step 4, the newest whole checkpoint is of step 0 \(there is none\); put the newer checkpoint back"),
        (
            [0, 2],
            r"begins after step 4, the newest whole checkpoint is of step 2; put the newer checkpoint back, or start a new run",
        ),
        ([0, 4, 10], r"ends with step 9, the newest whole checkpoint is of step 10: the steps between were trained without this"),
    ],
)
def test_anything_else_is_refused_and_said(whole: list[int], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        STEPS.newest_of(whole)


def test_what_is_chosen_is_always_within_the_journal() -> None:
    for purged, last, first, second in itertools.product(range(4), repeat=4):
        steps = KeptSteps(purged=purged, last=max(purged, last))
        try:
            found = steps.newest_of([0, first, second])
        except CheckpointError:
            assert not steps.purged <= max(first, second) <= steps.last
        else:
            assert (found, steps.purged <= found <= steps.last) == (max(first, second), True)


def test_the_steps_are_those_of_records_and_of_what_was_purged() -> None:
    record = StepRecord(step=3, partition_id="train", uids=(), keys=(), row_ids=())
    saved = Saved()
    assert saved.steps == KeptSteps(purged=0, last=0)
    saved.apply([PutCounters({"purged_step": 2})])
    assert saved.steps == KeptSteps(purged=2, last=2)
    saved.apply([PutRecord(record)])
    assert saved.steps == KeptSteps(purged=2, last=3)
