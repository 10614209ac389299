"""All estimators by the name that `algorithm.adv_estimator` gives them.

One of your own is a function `(inputs: AdvantageInputs, *, option: float = default, ...) -> Advantages`; its keyword-only
parameters are the options that have an effect. When it needs a column beyond rewards, mask and groups, offer an
`Estimator(function=..., needs=...)` instead.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from asyncrl.algorithms.advantages import estimators
from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages

OPTIONAL_COLUMNS = frozenset({"values", "reward_baselines", "components", "old_log_probs", "sum_pi_squared", "rollout_is_weights"})
"""What `needs` may name: the optional columns of `AdvantageInputs`, without their shape suffixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator and what its caller must know of it. Raises ValueError for a need that no column meets."""

    function: Callable[..., Advantages]
    """`function(inputs, *, <options>)`."""
    needs: frozenset[str] = frozenset()
    """The optional columns that it cannot do without, of `OPTIONAL_COLUMNS`."""

    def __post_init__(self) -> None:
        if unknown := self.needs - OPTIONAL_COLUMNS:
            raise ValueError(
                f"an estimator needs {', '.join(sorted(unknown))}; there are only {', '.join(sorted(OPTIONAL_COLUMNS))}"
            )

    @property
    def options(self) -> Mapping[str, object]:
        """The options that have an effect, with their defaults."""
        return estimator_options(self.function)

    @property
    def required(self) -> frozenset[str]:
        """Names of the options without a default."""
        return frozenset(name for name, default in self.options.items() if default is inspect.Parameter.empty)

    def __call__(self, inputs: AdvantageInputs, **options: object) -> Advantages:
        return self.function(inputs, **options)


def estimator_options(function: Callable[..., Advantages]) -> Mapping[str, object]:
    """The keyword-only parameters of the function with their defaults, in its order; `inspect.Parameter.empty` without one."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


_TOKEN_BASELINE = frozenset({"old_log_probs", "sum_pi_squared"})

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": Estimator(function=estimators.gae, needs=frozenset({"values"})),
        "grpo": Estimator(function=estimators.grpo),
        "rloo": Estimator(function=estimators.rloo),
        "reinforce_plus_plus": Estimator(function=estimators.reinforce_plus_plus),
        "reinforce_plus_plus_baseline": Estimator(function=estimators.reinforce_plus_plus_baseline),
        "remax": Estimator(function=estimators.remax, needs=frozenset({"reward_baselines"})),
        "opo": Estimator(function=estimators.opo),
        "grpo_passk": Estimator(function=estimators.grpo_passk),
        "gpg": Estimator(function=estimators.gpg),
        "gdpo": Estimator(function=estimators.gdpo, needs=frozenset({"components"})),
        "optimal_token_baseline": Estimator(function=estimators.optimal_token_baseline, needs=_TOKEN_BASELINE),
        "tir_optimal_token_baseline": Estimator(function=estimators.tir_optimal_token_baseline, needs=_TOKEN_BASELINE),
    }
)
