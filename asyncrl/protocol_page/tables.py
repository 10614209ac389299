"""Tables and the state diagram that are read off declarations: catalogue, leases, transitions, stages, invariants, errors.

fields, keys, errors, replay.groups, stages, protocol.invariants -> [tables] -> docs/data-protocol.md
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

from tensordict import TensorDict

from asyncrl import errors
from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.config import AlgorithmConfig, TrainRun
from asyncrl.config.algorithms import ESTIMATORS
from asyncrl.fields import CATALOGUE, Field
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.ports import GroupStatus
from asyncrl.protocol import invariants as protocol_invariants
from asyncrl.protocol.invariants import BATCH_INVARIANTS, SHAPE_INVARIANTS
from asyncrl.reference import FIELD_COLUMNS, KEY_COLUMNS, TAG_COLUMNS, field_row, key_rows, markdown, tag_rows
from asyncrl.replay.groups import NEXT
from asyncrl.stages.advantage import advantage_stage, kl_coefficient
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.correction import correction_stage
from asyncrl.stages.old_log_prob import bypass_stage, recompute_stage
from asyncrl.stages.ref_log_prob import ref_log_prob_stage
from asyncrl.stages.stage import Stage
from asyncrl.stages.update_actor import LOSS_COLUMNS, update_actor_stage
from asyncrl.stages.update_critic import update_critic_stage
from asyncrl.stages.values import values_stage

# --- fields and tags --------------------------------------------------------------------------------------------------------------


def fields_of_a_row() -> str:
    return _fields(lambda entry: entry.is_built and entry.producer == "dataset")


def fields_of_a_session() -> str:
    return _fields(lambda entry: entry.is_of_row)


def fields_of_a_step() -> str:
    return _fields(lambda entry: entry.is_built and not entry.is_of_row and entry.producer != "dataset")


def fields_reserved() -> str:
    return _fields(lambda entry: not entry.is_built)


def _fields(belongs: Callable[[Field], bool]) -> str:
    return markdown(FIELD_COLUMNS, [field_row(entry) for entry in CATALOGUE.values() if belongs(entry)])


def tags() -> str:
    return markdown(TAG_COLUMNS, tag_rows())


def leases() -> str:
    """Name, parts and docstring of each kind."""
    kinds = (GroupLease, SessionLease, StepLease)
    return markdown(
        ("lease", "parts", "meaning"), [(kind.__name__, ", ".join(kind.__dataclass_fields__), docstring_of(kind)) for kind in kinds]
    )


def settings() -> str:
    """The configuration keys that decide what is checked and what survives."""
    chosen = [row for row in key_rows(TrainRun) if row[0].startswith("store.") or row[0] == "trainer.invariants"]
    return markdown(KEY_COLUMNS, chosen)


# --- states of a group ------------------------------------------------------------------------------------------------------------


def group_states() -> str:
    edges = [(str(state), str(to)) for state, others in NEXT.items() for to in others]
    ends = [(str(state), "[*]") for state in NEXT if state.is_terminal]
    return mermaid([("[*]", str(GroupStatus.PENDING)), *edges, *ends])


def mermaid(edges: Iterable[tuple[str, str] | tuple[str, str, str]]) -> str:
    """A state diagram of (from, to) or (from, to, label)."""
    lines = [f"    {start} --> {end}{f' : {label[0]}' if label else ''}" for start, end, *label in edges]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


# --- stages -----------------------------------------------------------------------------------------------------------------------


def _never(columns: TensorDict, *rest: object, **named: object) -> NoReturn:
    raise AssertionError("a stage of the documentation does not run")


def run_stages() -> list[tuple[str, Stage]]:
    """(when it is part of a run, the stage with all that it may read and write), in the order of a step."""
    correction = CorrectionOptions(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1.0)
    return [
        ('`algorithm.old_log_probs = "recompute"`', recompute_stage(_never, with_squares=True)),
        ('`algorithm.old_log_probs = "bypass"`', bypass_stage()),
        ("`actor.use_kl_loss` or `algorithm.use_kl_in_reward`", ref_log_prob_stage(_never)),
        ('`algorithm.adv_estimator = "gae"`', values_stage(_never)),
        ("old log-probs are recomputed", correction_stage(correction)),
        ("always", _advantage()),
        ('`algorithm.adv_estimator = "gae"`', update_critic_stage(_never, has_loss_weights=True)),
        ("always", update_actor_stage(_never, columns=LOSS_COLUMNS)),
        ("always", batch_metrics_stage()),
    ]


def _advantage() -> Stage:
    """With what any estimator reads."""
    kl = kl_coefficient(AlgorithmConfig(use_kl_in_reward=True))
    needed = {"gdpo": {"gdpo_reward_keys": ["x"]}}
    configs = [AlgorithmConfig.model_validate({"adv_estimator": name, **needed.get(name, {})}) for name in ESTIMATORS]
    stages = [advantage_stage(config, kl=kl, has_is_weights=True) for config in configs]
    return replace(stages[0], reads=frozenset[str]().union(*(stage.reads for stage in stages)))


def stages_table() -> str:
    return markdown(
        ("stage", "part of a run", "reads", "writes"),
        [(stage.name, when, _in_order(stage.reads), _in_order(stage.writes)) for when, stage in run_stages()],
    )


def _in_order(names: Iterable[str]) -> str:
    chosen = frozenset(names)
    return " ".join(f"`{name}`" for name in CATALOGUE if name in chosen) or "nothing"


# --- invariants -------------------------------------------------------------------------------------------------------------------

_SHAPES = tuple(invariant.check.__name__ for invariant in SHAPE_INVARIANTS)
_BATCH = tuple(invariant.check.__name__ for invariant in BATCH_INVARIANTS)

ALWAYS: dict[str, tuple[str, ...]] = {
    "sample": ("groups_are_whole", "tags_are_fresh"),
    "stage": (*_SHAPES, "one_writer_a_column", "repeats_are_equal"),
}
"""Border -> the invariants that run there in every step, whatever the level.

`sample`: `contract.check_sample`; `balance`: `balance.Dispatch.check`; `stage`: both ends of `stage.run_stage`; `cleanup`:
`contract.check_cleanup`; all in stages. A test sees which run where."""
CHECKED: dict[str, tuple[str, ...]] = {
    "sample": (*_BATCH, "actions_are_fresh"),
    "balance": ("parts_make_up_the_whole", "groups_stay_together"),
    "stage": _BATCH,
    "cleanup": ("cleanup_leaves_nothing",),
}
"""The same for those that come on top in a step whose values are checked."""


def invariants() -> str:
    """Those of the package's docstring, in its order and words, with their borders."""
    listed = re.findall(r"^(\d+)\. `(\w+)` +(.+)$", inspect.getdoc(protocol_invariants) or "", re.MULTILINE)
    rows = [(name, number, re.sub(r" \(I\d+\)$", "", meaning), *_borders(name)) for number, name, meaning in listed]
    return markdown(("invariant", "no.", "what holds", "in every step at", "where values are checked, also at"), rows)


def _borders(name: str) -> tuple[str, str]:
    always = [border for border, names in ALWAYS.items() if name in names]
    checked = [border for border, names in CHECKED.items() if name in names and border not in always]
    return ", ".join(always) or "-", ", ".join(checked) or ("-" if always else "tests")


# --- errors -----------------------------------------------------------------------------------------------------------------------

ROOTS = (
    errors.StoreError,
    errors.JournalError,
    errors.KeyFormatError,
    errors.FieldError,
    errors.TransitionError,
    errors.AdmissionError,
    errors.ReplayError,
    errors.GroupsExhaustedError,
    errors.DeadlineError,
)
"""The errors of the data protocol: these and what is below them."""


def errors_table() -> str:
    rows = [(kind.__name__, _parent(kind), *meaning_and_remedy(kind), str(kind.exit_code)) for kind in data_errors()]
    return markdown(("error", "is a", "meaning", "to do", "exit code"), rows)


def data_errors() -> list[type[errors.AsyncRLError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ROOTS)]
    return sorted(kinds, key=lambda kind: next(number for number, root in enumerate(ROOTS) if issubclass(kind, root)))


def meaning_and_remedy(kind: type[errors.AsyncRLError]) -> tuple[str, str]:
    """The two paragraphs of its docstring. Raises ValueError when it has no line `To do: ...`."""
    meaning, found, remedy = docstring_of(kind).partition(" To do: ")
    if not found:
        raise ValueError(f"the docstring of {kind.__name__} does not say what to do: add a paragraph `To do: ...`")
    return meaning, remedy[0].upper() + remedy[1:]


def _parent(kind: type[errors.AsyncRLError]) -> str:
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.AsyncRLError) or "-"


def docstring_of(thing: object, paragraph: int | None = None) -> str:
    """A docstring on one line, or a paragraph of it."""
    text = inspect.getdoc(thing) or ""
    return " ".join((text if paragraph is None else text.split("\n\n")[paragraph]).split())
