"""The advantage estimator and the policy loss of a run: by name or as `module:function` of the user, bound to their options.

config -> [chosen] -> stages.advantage, training.actor

The options of a function are its keyword-only parameters. One that is a key of the section has that key's value; any other has its
entry in the section's table of further options, or its default. So a key that the function does not name has no effect, and is
refused: for built-in ones when the configuration is read (`config/algorithms.py`), for the user's own here.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import ESTIMATORS, Estimator
from asyncrl.algorithms.answers import check_advantages, check_loss, check_selected
from asyncrl.algorithms.correction import CorrectionOptions
from asyncrl.algorithms.losses.inputs import LossInputs, PolicyLoss
from asyncrl.algorithms.losses.registry import POLICY_LOSSES, LossSpec
from asyncrl.config import ActorConfig, AlgorithmConfig, Section, TrainRun
from asyncrl.config.algorithms import ESTIMATOR_KEYS, LOSS_KEYS
from asyncrl.errors import AlgorithmError, ConfigError
from asyncrl.ports import Json
from asyncrl.user_code import UserCodeError, import_from_here
from asyncrl.wording import describe_error, message_of, nearest

Options = Mapping[str, Json]
Answer = TypeVar("Answer")
Kind = TypeVar("Kind", Estimator, LossSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEstimator:
    """An estimator with its options. name: `module:function` of the user, whose answers are checked; "": one of ours."""

    estimator: Estimator
    options: Options
    name: str = ""

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Raises AlgorithmError for a function of the user that raises, or answers what cannot be trained on."""
        if not self.name:
            return self.estimator.function(inputs, **self.options)
        found = _asked("estimator", self.name, lambda: self.estimator.function(inputs, **self.options))
        return _checked("estimator", self.name, lambda: check_advantages(found, inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLoss:
    """A policy loss with its options. name: as of ChosenEstimator."""

    spec: LossSpec
    options: Options
    name: str = ""

    def __call__(self, inputs: LossInputs) -> PolicyLoss:
        """Raises AlgorithmError as ChosenEstimator."""
        if not self.name:
            return self.spec.policy_loss(inputs, self.options)
        found = _asked("loss", self.name, lambda: self.spec.policy_loss(inputs, self.options))
        return _checked("loss", self.name, lambda: check_loss(found, inputs))

    def selected(
        self, log_prob_n: torch.Tensor, old_log_prob_n: torch.Tensor, advantages_n: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor | None:
        """As LossSpec.selected. Raises AlgorithmError as ChosenEstimator."""

        def select() -> torch.Tensor | None:
            return self.spec.selected(log_prob_n, old_log_prob_n, advantages_n, self.options, generator)

        if not self.name or self.spec.select is None:
            return select()
        found = _asked("loss", self.name, select)
        return _checked("loss", self.name, lambda: check_selected(found, log_prob_n))


def _asked(kind: str, name: str, call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise AlgorithmError(f"{kind} {name!r} raised {describe_error(error)}") from error


def _checked(kind: str, name: str, check: Callable[[], Answer]) -> Answer:
    try:
        return check()
    except ValueError as error:
        raise AlgorithmError(f"{kind} {name!r} {error}") from error


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
    chosen = ChosenEstimator(estimator=found, options=options, name=_own(config.adv_estimator))
    _try(lambda: chosen(_few_rows(found, config)), key, config.adv_estimator, options)
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
    chosen = ChosenLoss(spec=found, options=options, name=_own(config.loss_mode))
    _try(lambda: _once(chosen), "actor.loss_mode", config.loss_mode, options)
    return chosen


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
    if not _is_spelt(module, attribute):
        raise ConfigError(f"{key} = {name!r} is not of the form module:function, such as my_algorithms:mine")
    try:
        thing = getattr(import_from_here(module), attribute, None)
    except UserCodeError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    if isinstance(thing, kind):
        return thing
    if not callable(thing):
        raise ConfigError(f"{key} = {name!r}: {module} has no function {attribute!r}")
    try:
        inspect.signature(thing)
    except (TypeError, ValueError) as error:  # some of C
        raise ConfigError(f"{key} = {name!r} does not tell its parameters, which are its options; take a plain function") from error
    return kind(function=thing)


def _is_spelt(module: str, attribute: str) -> bool:
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def _own(name: str) -> str:
    return name if ":" in name else ""


def _bound(
    key: str, name: str, found: Estimator | LossSpec, config: Section, keys: frozenset[str], table: Options, table_name: str
) -> dict[str, Json]:
    """Values of the function's options. keys: those of the section that some function reads."""
    section, own = key.partition(".")[0], found.options
    if ":" in name:  # of a built-in one this was said when the file was read
        named = {"gdpo_reward_keys"} if isinstance(found, Estimator) and "components" in found.needs else set[str]()
        _refuse_idle(key, name, config, keys - set(own) - named)
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
    except AlgorithmError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} = {name!r} with {dict(options)}: {message_of(error)}") from error


def _few_rows(estimator: Estimator, config: AlgorithmConfig) -> AdvantageInputs:
    """Two groups of two rows of three tokens, one of them a tool's: what takes rows for tokens cannot pass."""
    row, tokens = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, 3)
    columns = {name: row if name == "reward_baselines" else tokens for name in estimator.needs - {"components"}}
    return AdvantageInputs(
        rewards_BR=torch.stack([torch.zeros(4), torch.zeros(4), row], 1),
        mask_BR=torch.tensor([True, False, True]).expand(4, 3),
        groups_B=torch.tensor([0, 0, 1, 1]),
        components=dict.fromkeys(config.gdpo_reward_keys, row) if "components" in estimator.needs else None,
        **{f"{name}_{'B' if column is row else 'BR'}": column for name, column in columns.items()},
    )


def _once(loss: ChosenLoss) -> None:
    """Its choice of tokens and its loss, on three tokens of two rows."""
    log_prob_n, old_n, advantages_n = torch.tensor([[-1.0, -2.0, -0.5], [-1.1, -1.9, -0.5], [1.0, -1.0, 0.5]])
    selected_n = loss.selected(log_prob_n, old_n, advantages_n, torch.Generator())
    loss(
        LossInputs(
            log_prob_n=log_prob_n.clone().requires_grad_(),
            old_log_prob_n=old_n,
            advantages_n=advantages_n,
            rows_n=torch.tensor([0, 0, 1]),
            selected_n=selected_n,
        )
    )
