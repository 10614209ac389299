"""The tables that are read off declarations leave nothing out, and say of stages and errors what a run would do."""

import inspect
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl import errors
from asyncrl.config import TrainRun
from asyncrl.errors import TransitionError
from asyncrl.fields import CATALOGUE
from asyncrl.ports import GroupStatus
from asyncrl.protocol import invariants
from asyncrl.protocol_page import tables
from asyncrl.protocol_page.tables import data_errors, meaning_and_remedy, run_stages
from asyncrl.replay.groups import PromptGroup, transition
from asyncrl.stages.stage import Stage
from asyncrl.wiring import stages_of


def first_column(table: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


# --- fields -----------------------------------------------------------------------------------------------------------------------


def test_every_field_is_in_one_of_the_four_tables() -> None:
    parts = (tables.fields_of_a_row(), tables.fields_of_a_session(), tables.fields_of_a_step(), tables.fields_reserved())
    assert sorted(name for part in parts for name in first_column(part)) == sorted(CATALOGUE)


def test_what_no_code_uses_is_not_called_tested() -> None:
    assert [entry.name for entry in CATALOGUE.values() if not entry.is_built and entry.evidence == "tested"] == []
    assert [entry.name for entry in CATALOGUE.values() if entry.is_built and entry.evidence == "design"] == []


# --- groups -----------------------------------------------------------------------------------------------------------------------


def test_the_diagram_of_a_group_shows_the_moves_that_are_allowed() -> None:
    drawn = set(re.findall(r"(\w+) --> (\w+)", tables.group_states()))
    for start in GroupStatus:
        for to in GroupStatus:
            group = PromptGroup(uid="a", since=0.0, status=start)
            try:
                transition(group, to)
            except TransitionError:
                assert (start, to) not in drawn
            else:
                assert (start, to) in drawn


# --- stages -----------------------------------------------------------------------------------------------------------------------


def told(stage: Stage) -> tuple[str, frozenset[str], frozenset[str]]:
    return stage.name, stage.reads, stage.writes


@pytest.mark.parametrize("kind", ["recompute", "bypass"])
def test_the_stages_are_those_that_a_run_has(kind: str) -> None:
    """All of them together; update_actor reads the reference's log-probs only beside a reference."""
    run = TrainRun.model_validate({"data": {"train_files": ["x"]}, "model": {"path": "x"}, "algorithm": {"old_log_probs": kind}})
    actor = SimpleNamespace(log_probs=None, update=None)
    of_run = {told(stage) for stage in stages_of(run, cast(Any, actor), reference=actor.log_probs)}
    here = [(when, told(stage)) for when, stage in run_stages()]
    name, reads, writes = next(each for each in of_run if each[0] == "update_actor")
    of_run = of_run - {(name, reads, writes)} | {(name, reads | {"ref_log_prob"}, writes)}
    assert of_run == {each for when, each in here if when == "always" or kind in when}


# --- invariants -------------------------------------------------------------------------------------------------------------------


def test_every_invariant_has_a_line() -> None:
    named = [name for name in invariants.__all__ if inspect.isfunction(getattr(invariants, name)) and not name.startswith("check_")]
    assert sorted(first_column(tables.invariants())) == sorted(named)


# --- errors -----------------------------------------------------------------------------------------------------------------------


def test_every_error_of_the_protocol_page_says_what_to_do() -> None:
    for kind in data_errors():
        meaning, remedy = meaning_and_remedy(kind)
        assert meaning.endswith((".", ":")), kind
        assert remedy.endswith("."), kind
        assert "\n" not in meaning + remedy


def test_an_error_that_does_not_say_what_to_do_is_named() -> None:
    class SilentError(errors.StoreError):
        """It says nothing."""

    with pytest.raises(ValueError, match="SilentError does not say what to do"):
        meaning_and_remedy(SilentError)


def test_whatever_is_below_a_root_is_in_the_table() -> None:
    shown = set(first_column(tables.errors_table()))
    assert {"StoreError", "JournalError", "FieldError"} <= shown
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, (errors.StoreError, errors.JournalError, errors.ReplayError)):
            assert kind.__name__ in shown


def test_the_exit_code_is_2_for_what_the_user_can_mend() -> None:
    for kind in data_errors():
        assert kind.exit_code == (2 if issubclass(kind, errors.UserError) else 3)
