"""What each estimator and policy loss reads of the configuration, so that a key without effect is refused by name. No torch.

The tables repeat the keyword parameters of the functions in `asyncrl/algorithms/` (a test compares them): keys of the section, and
names of its table of further options. A `module:function` of the user is asked for its own when it is loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config.learning import ActorConfig, AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.wording import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """keys: of the section; options: of its table of further ones; required: those of them without a default."""

    keys: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()


def _reads(keys: str = "", options: str = "", *, required: str = "") -> Reads:
    return Reads(keys=frozenset(keys.split()), options=frozenset(options.split()), required=frozenset(required.split()))


ESTIMATORS: Mapping[str, Reads] = {
    "grpo": _reads("norm_adv_by_std_in_grpo"),
    "gae": _reads("gamma lam"),
    "rloo": _reads(),
    "reinforce_plus_plus": _reads("gamma"),
    "reinforce_plus_plus_baseline": _reads(),
    "remax": _reads(),
    "opo": _reads(),
    "grpo_passk": _reads("norm_adv_by_std_in_grpo"),
    "gpg": _reads(options="gpg_f_norm"),
    "gdpo": _reads("norm_adv_by_std_in_grpo gdpo_reward_keys", "gdpo_reward_weights"),
    "optimal_token_baseline": _reads(options="otb_handle_zero_tail"),
    "tir_optimal_token_baseline": _reads(options="otb_handle_zero_tail"),
}
"""What each `algorithm.adv_estimator` reads of `[algorithm]` and of `algorithm.adv_options`."""

TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Estimators that want the sum of squared probabilities at each token, from a forward pass of the actor."""

_CLIP = "clip_ratio_low clip_ratio_high"
LOSSES: Mapping[str, Reads] = {
    "vanilla": _reads(f"{_CLIP} clip_ratio_c"),
    "gspo": _reads(_CLIP),
    "sapo": _reads(options="tau_pos tau_neg"),
    "gpg": _reads(),
    "clip_cov": _reads(_CLIP, "clip_cov_ratio clip_cov_lb clip_cov_ub"),
    "kl_cov": _reads(options="kl_cov_ratio ppo_kl_coef"),
    "geo_mean": _reads(_CLIP),
    "cispo": _reads(_CLIP),
    "dppo_tv": _reads(f"{_CLIP} clip_ratio_c"),
    "dppo_kl": _reads(f"{_CLIP} clip_ratio_c"),
    "dro": _reads(options="dro_beta", required="dro_beta"),
}
"""What each `actor.loss_mode` reads of `[actor]` and of `actor.loss_options`."""

FIXED_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Losses that are defined with one way to become a number; `actor.loss_agg_mode` does not reach them."""
ESTIMATOR_KEYS = frozenset().union(*(reads.keys for reads in ESTIMATORS.values()))
LOSS_KEYS = frozenset().union(*(reads.keys for reads in LOSSES.values()))


def check_algorithms(algorithm: AlgorithmConfig, actor: ActorConfig, *, group_size: int) -> None:
    """Names exist, options belong to them, and what they need is there. Raises ConfigError."""
    _check_choice("algorithm.adv_estimator", algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_options", algorithm.adv_options)
    if not reinforces(algorithm):  # which takes the place of the loss
        _check_choice("actor.loss_mode", actor.loss_mode, LOSSES, "actor.loss_options", actor.loss_options)
    if algorithm.adv_estimator == "gdpo" and not algorithm.gdpo_reward_keys:
        raise ConfigError(
            'algorithm.adv_estimator = "gdpo" needs algorithm.gdpo_reward_keys: the components, by their names in what the reward '
            "function returns"
        )
    if len(set(algorithm.gdpo_reward_keys)) < len(algorithm.gdpo_reward_keys):
        raise ConfigError(f"algorithm.gdpo_reward_keys = {algorithm.gdpo_reward_keys}: name each component once")
    if algorithm.adv_estimator in TOKEN_BASELINES and algorithm.old_log_probs == "bypass":
        raise ConfigError(
            f'algorithm.old_log_probs = "bypass" leaves out the forward pass that {algorithm.adv_estimator!r} takes probabilities '
            'from; set it to "recompute"'
        )
    if algorithm.filter_groups and group_size == 1:
        raise ConfigError("algorithm.filter_groups with rollout.n = 1 drops every group: one session has nothing to differ from")


def _check_choice(key: str, name: str, known: Mapping[str, Reads], table: str, options: Mapping[str, object]) -> None:
    if ":" in name:
        return
    if name not in known:
        raise ConfigError(f"{key} = {name!r} is neither one of {', '.join(known)} nor module:function{nearest(name, known)}")
    for option in options:
        if option not in known[name].options:
            own = ", ".join(sorted(known[name].options)) or "none"
            raise ConfigError(f"{table}.{option} is no option of {name!r}; its own: {own}{nearest(option, known[name].options)}")
    for option in sorted(known[name].required - options.keys()):
        raise ConfigError(f"{key} = {name!r} needs {table}.{option}; it has no default")


def reinforces(algorithm: AlgorithmConfig) -> bool:
    """Is the loss -A log p with weights against the engine, in place of `actor.loss_mode`?"""
    return algorithm.old_log_probs == "bypass" and algorithm.rollout_correction.loss_type == "reinforce"


def idle_algorithm_keys(algorithm: AlgorithmConfig, actor: ActorConfig) -> Iterator[tuple[str, list[str]]]:
    """Reason and keys of what the chosen estimator and loss do not read."""
    if reads := ESTIMATORS.get(algorithm.adv_estimator):
        idle = sorted(f"algorithm.{key}" for key in ESTIMATOR_KEYS - reads.keys)
        yield f'algorithm.adv_estimator is "{algorithm.adv_estimator}"', idle
    if reinforces(algorithm):
        because = 'algorithm.rollout_correction.loss_type is "reinforce"'
        yield because, [f"actor.{key}" for key in ("loss_mode", "loss_options", *sorted(LOSS_KEYS))]
        return
    if reads := LOSSES.get(actor.loss_mode):
        yield f'actor.loss_mode is "{actor.loss_mode}"', sorted(f"actor.{key}" for key in LOSS_KEYS - reads.keys)
    if actor.loss_mode in FIXED_AGGREGATION:
        yield f'actor.loss_mode is "{actor.loss_mode}"', ["actor.loss_agg_mode", "actor.loss_scale_factor"]
