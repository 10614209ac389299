"""The tables that are read off declarations leave nothing out, and say of stages and errors what a run would do."""

import inspect
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl import errors
from asyncrl.config import TrainRun
from asyncrl.errors import TransitionError
from asyncrl.fields import CATALOGUE
from asyncrl.ports import GroupStatus, Shards
from asyncrl.protocol import invariants
from asyncrl.protocol_page import tables
from asyncrl.protocol_page.tables import data_errors, meaning_and_remedy, run_stages
from asyncrl.replay.groups import PromptGroup, transition
from asyncrl.stages.advantage import kl_coefficient
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


CORRECTION = {"rollout_is": "token", "rollout_rs": ["token_k2"], "rollout_rs_threshold": [1.0]}
RUNS: dict[str, dict[str, Any]] = {
    "elided": {},
    "recomputed": {"old_log_probs": "recompute", "rollout_correction": CORRECTION, "adv_estimator": "optimal_token_baseline"},
    "bypass": {"old_log_probs": "bypass"},
    "critic": {"old_log_probs": "recompute", "rollout_correction": CORRECTION, "adv_estimator": "gae"},
    "baseline": {"adv_estimator": "remax"},
    "components": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["x"]},
    "kl": {"old_log_probs": "recompute", "use_kl_in_reward": True},
}
"""`algorithm` of runs that have, together, every stage with all that it may read and write."""


def _no_forward(columns: TensorDict, shards: Shards) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("no stage runs here")


def stages_of_run(algorithm: dict[str, Any]) -> tuple[Stage, ...]:
    run = TrainRun.model_validate({"data": {"train_files": ["x"]}, "model": {"path": "x"}, "algorithm": algorithm})
    model: Any = SimpleNamespace(log_probs=None, log_probs_and_squares=None, update=None, values=None)
    reference = None if algorithm == {} else _no_forward
    kl = kl_coefficient(run.algorithm)
    return stages_of(run, model, reference=reference, critic=model if run.has_critic else None, kl=kl)


def _all(stages: Iterable[Stage]) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Name of each stage -> what any of this name reads, and what it writes."""
    found: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    for stage in stages:
        reads, writes = found.get(stage.name, (frozenset[str](), frozenset[str]()))
        found[stage.name] = (reads | stage.reads, writes | stage.writes)
    return found


def test_the_stages_are_those_that_runs_have() -> None:
    """All of them together, and no more."""
    assert _all(stage for algorithm in RUNS.values() for stage in stages_of_run(algorithm)) == _all(
        stage for _, stage in run_stages()
    )


@pytest.mark.parametrize("kind", RUNS)
def test_the_stages_stand_in_the_order_of_a_run(kind: str) -> None:
    names = list(dict.fromkeys(stage.name for _, stage in run_stages()))
    own = [stage.name for stage in stages_of_run(RUNS[kind])]
    assert own == [name for name in names if name in own]
    assert {stage.name for when, stage in run_stages() if when == "always"} <= set(own)


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
