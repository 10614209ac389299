"""Each oracle can fail by itself, with its own name: beside it only `Living` runs, which keeps the account of tasks."""

import pytest

from asyncrl.config.simulation import Scenario
from asyncrl.simulation.oracles import oracles
from asyncrl.simulation.oracles.oracle import Oracle
from tests.simulation.planted import search
from tests.simulation.planted.bug import BUGS, replaced

BREAKS = {
    "Living": "finished_one_early",
    "Fencing": "settled_in_pieces",
    "Status": "failure_counts_as_finished",
    "Once": "duplicate_write",
    "WholeGroups": "finish_order",
    "Conservation": "admission_not_counted",
    "TrainedOnce": "record_not_synced",
    "SameRows": "groups_of_other_rows",
    "Fresh": "stale_tokens",
    "Retries": "attempts_unbounded",
    "Recovery": "generation_before_the_repeated_steps",
    "TokenInTokenOut": "mask_on_tool_tokens",
    "InFlight": "publication_does_not_wait",
    "Engines": "sessions_wander",
    "Evaluated": "evaluation_aborted_by_publication",
    "Places": "tool_place_leaks",
    "Bounded": "admission_off_by_one",
    "Deadlines": "tool_without_deadline",
    "Progress": "tags_wake_nobody",
    "Agreement": "cleared_key_stays",
    "Forgotten": "removals_not_told",
    "Emptied": "turns_stay",
}
"""Oracle -> the planted bug that it must catch alone."""


def test_every_oracle_is_broken_here() -> None:
    assert [kind.__name__ for kind in oracles.ORACLES] == list(BREAKS)


@pytest.mark.parametrize("kind", oracles.ORACLES, ids=lambda kind: kind.__name__)
def test_an_oracle_alone_catches_its_bug(kind: type[Oracle]) -> None:
    bug = BUGS[BREAKS[kind.__name__]]
    alone = tuple(one for one in oracles.ORACLES if one is kind or one.__name__ == "Living")
    with replaced(oracles, ORACLES=alone):
        catch = search.first_catch(bug, range(40))
    assert catch is not None
    assert catch.by == kind.name, catch


def test_without_a_journal_the_oracles_see_the_same() -> None:
    sections = search.SCENARIO.model_dump(exclude_unset=True)
    bare = Scenario.model_validate({**sections, "store": {"journal": False}})
    with replaced(search, SCENARIO=bare):
        assert search.run(0) is None
        catch = search.run(0, BUGS["settled_in_pieces"].plant)
    assert catch is not None
    assert catch.by == "I4"
