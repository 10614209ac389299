"""The advantage estimator and the policy loss of a run: by name or as `module:function` of the user, bound to their options.

config -> [chosen] -> stages.advantage, training.actor

The options of a function are its keyword-only parameters. One that is a key of the section has that key's value; any other has its
entry in the section's table of further options, or its default. So a key that the function does not name has no effect, and is
refused: for built-in ones when the configuration is read (`config/algorithms.py`), for the user's own here.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import ESTIMATORS, Estimator
from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.algorithms.losses.inputs import LossInputs
from asyncrl.algorithms.losses.registry import POLICY_LOSSES, LossSpec
from asyncrl.config import ActorConfig, AlgorithmConfig, Section, TrainRun
from asyncrl.config.algorithms import ESTIMATOR_KEYS, LOSS_KEYS
from asyncrl.errors import ConfigError
from asyncrl.ports import Json
from asyncrl.user_code import UserCodeError, import_from_here
from asyncrl.wording import message_of, nearest

Options = Mapping[str, Json]
Kind = TypeVar("Kind", Estimator, LossSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEstimator:
    """An estimator with its options."""

    estimator: Estimator
    options: Options

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        return self.estimator.function(inputs, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLoss:
    """A policy loss with its options."""

    spec: LossSpec
    options: Options


def check_choices(run: TrainRun) -> None:
    """All of a run's choices, for nothing but their ConfigError; and is there every column that the estimator needs?"""
    _check_needs(run, chosen_estimator(run.algorithm).estimator)
    chosen_loss(run)
    chosen_correction(run.algorithm)


def _check_needs(run: TrainRun, estimator: Estimator) -> None:
    made = {
        "components": bool(run.algorithm.gdpo_reward_keys),
        "old_log_probs": run.old_log_probs != "elide",
        "reward_baselines": run.needs_baseline,
        "rollout_is_weights": run.old_log_probs == "recompute" and run.algorithm.rollout_correction.rollout_is != "none",
        "sum_pi_squared": run.needs_sum_pi_squared,
        "values": run.has_critic,
    }
    if missing := sorted(name for name in estimator.needs if not made[name]):
        raise ConfigError(
            f"algorithm.adv_estimator = {run.algorithm.adv_estimator!r} needs {', '.join(missing)}, which nothing in this run "
            'makes; old_log_probs come with algorithm.old_log_probs = "recompute", rollout_is_weights with rollout_is of '
            "algorithm.rollout_correction beside it, components with algorithm.gdpo_reward_keys, the others with the built-in "
            "estimators that need them"
        )


def chosen_estimator(config: AlgorithmConfig) -> ChosenEstimator:
    """Raises ConfigError, one line, for a function that cannot be had or an option that is not its own."""
    key = "algorithm.adv_estimator"
    found = _found(key, config.adv_estimator, ESTIMATORS, Estimator)
    options = _bound(key, config.adv_estimator, found, config, ESTIMATOR_KEYS, config.adv_options, "adv_options")
    chosen = ChosenEstimator(estimator=found, options=options)
    _try(lambda: chosen(_one_row(found, config)), key, config.adv_estimator, options)
    return chosen


def chosen_loss(run: TrainRun) -> ChosenLoss:
    """Raises ConfigError as `chosen_estimator`, and for a value that the loss refuses."""
    if run.reinforces:
        return ChosenLoss(spec=POLICY_LOSSES["reinforce"], options={})
    config: ActorConfig = run.actor
    found = _found("actor.loss_mode", config.loss_mode, POLICY_LOSSES, LossSpec)
    options = _bound("actor.loss_mode", config.loss_mode, found, config, LOSS_KEYS, config.loss_options, "loss_options")
    if ":" in config.loss_mode and found.aggregation:
        _refuse_idle("actor.loss_mode", config.loss_mode, config, {"loss_agg_mode", "loss_scale_factor"})
    _try(lambda: _once(found, options), "actor.loss_mode", config.loss_mode, options)
    return ChosenLoss(spec=found, options=options)


def chosen_correction(config: AlgorithmConfig) -> CorrectionOptions:
    """The off-policy correction. Raises ConfigError for what the options refuse."""
    section = config.rollout_correction
    thresholds = ",".join(map(str, section.rollout_rs_threshold))
    try:
        return CorrectionOptions(
            rollout_is=None if section.rollout_is == "none" else section.rollout_is,
            rollout_is_threshold=section.rollout_is_threshold,
            rollout_is_batch_normalize=section.rollout_is_batch_normalize,
            rollout_rs=",".join(section.rollout_rs) or None,
            rollout_rs_threshold=thresholds or None,
        )
    except ValueError as error:
        raise ConfigError(f"algorithm.rollout_correction: {error}") from error


def _found(key: str, name: str, known: Mapping[str, Kind], kind: type[Kind]) -> Kind:
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    try:
        thing = getattr(import_from_here(module), attribute, None)
    except UserCodeError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    if isinstance(thing, kind):
        return thing
    if not callable(thing):
        raise ConfigError(f"{key} = {name!r}: {module} has no function {attribute!r}")
    return kind(function=thing)


def _bound(
    key: str, name: str, found: Estimator | LossSpec, config: Section, keys: frozenset[str], table: Options, table_name: str
) -> dict[str, Json]:
    """Values of the function's options. keys: those of the section that some function reads."""
    section, own = key.partition(".")[0], found.options
    if ":" in name:  # of a built-in one this was said when the file was read
        _refuse_idle(key, name, config, keys - set(own))
    for option in table:
        if option not in own:
            hint = nearest(option, own)
            raise ConfigError(
                f"{section}.{table_name}.{option} is no option of {name!r}; its own: {', '.join(own) or 'none'}{hint}"
            )
    for option in sorted(found.required - keys - table.keys()):
        raise ConfigError(f"{key} = {name!r} needs {section}.{table_name}.{option}; it has no default")
    from_section = {option: getattr(config, option) for option in own if option in keys}
    if from_section.get("clip_ratio_c") == 0:
        del from_section["clip_ratio_c"]  # the function's own
    return {**from_section, **{option: value for option, value in table.items() if option in own}}


def _refuse_idle(key: str, name: str, config: Section, idle: Collection[str]) -> None:
    """Raises ConfigError for the first of these keys of the section that the user has set."""
    for each in sorted(config.model_fields_set & set(idle)):
        raise ConfigError(f"{key.partition('.')[0]}.{each} has no effect because {name!r} does not read it; remove it")


def _try(call: Callable[[], object], key: str, name: str, options: Options) -> None:
    """Once on nothing much, so that a value which the function refuses is told before the run and not in its first step."""
    try:
        call()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} = {name!r} with {dict(options)}: {message_of(error)}") from error


def _one_row(estimator: Estimator, config: AlgorithmConfig) -> AdvantageInputs:
    row, tokens = torch.zeros(1), torch.zeros(1, 1)
    columns = {name: row if name == "reward_baselines" else tokens for name in estimator.needs - {"components"}}
    return AdvantageInputs(
        rewards_BR=tokens,
        mask_BR=torch.ones(1, 1, dtype=torch.bool),
        groups_B=torch.zeros(1, dtype=torch.int64),
        components=dict.fromkeys(config.gdpo_reward_keys, row) if "components" in estimator.needs else None,
        **{f"{name}_{'B' if column is row else 'BR'}": column for name, column in columns.items()},
    )


def _once(spec: LossSpec, options: Options) -> None:
    """Its choice of tokens and its loss, on one token."""
    inputs = _one_token(spec)
    spec.selected(inputs.log_prob_n, inputs.old_log_prob_n, inputs.advantages_n, options, torch.Generator())
    spec.policy_loss(inputs, options)


def _one_token(spec: LossSpec) -> LossInputs:
    one = torch.zeros(1)
    return LossInputs(
        log_prob_n=one.clone().requires_grad_(),
        old_log_prob_n=one,
        advantages_n=one,
        rows_n=torch.zeros(1, dtype=torch.int64),
        selected_n=None if spec.select is None else torch.zeros(1, dtype=torch.bool),
    )
