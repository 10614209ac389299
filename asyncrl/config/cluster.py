"""Sums over the keys of [cluster], [actor.fsdp_config] and the token budgets: does everything divide, and does a trajectory fit?"""

from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.ports import Topology

if TYPE_CHECKING:
    from asyncrl.config.runs import TrainRun

_KEYS = {
    "world": "cluster.num_ranks",
    "tp": "actor.fsdp_config.tensor_model_parallel_size",
    "sp": "actor.fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_size": "actor.fsdp_config.fsdp_size",
}


def topology_of(run: "TrainRun") -> Topology:
    """How the actor's ranks are cut; the critic's and the reference's are the same. Raises ConfigError with the arithmetic."""
    if run.cluster.kind == "process":
        return Topology()
    fsdp = run.actor.fsdp_config
    try:
        return Topology(
            world=run.cluster.num_ranks,
            tp=fsdp.tensor_model_parallel_size,
            sp=fsdp.ulysses_sequence_parallel_size,
            fsdp_size=fsdp.fsdp_size,
        )
    except ConfigError as error:
        keys = ", ".join(f"{name} is {key}" for name, key in _KEYS.items() if name in str(error))
        raise ConfigError(f"the ranks cannot be cut like that: {error} ({keys})") from None


def check_cluster(run: "TrainRun") -> None:
    """Raises ConfigError for a layout that does not divide or that cannot cut adapters, and for a budget that the longest
    trajectory does not fit."""
    topology = topology_of(run)
    if run.model.lora_rank and topology.tp > 1:
        raise ConfigError(
            f"model.lora_rank = {run.model.lora_rank} with {_KEYS['tp']} = {topology.tp}: tensor parallel does not cut adapters; "
            "set lora_rank = 0, or cut by fsdp_size and ulysses_sequence_parallel_size instead"
        )
    _check_budget(run, "actor.ppo_max_token_len_per_gpu", run.actor.ppo_max_token_len_per_gpu, topology.sp)
    if run.has_critic:
        _check_budget(run, "critic.ppo_max_token_len_per_gpu", run.critic.ppo_max_token_len_per_gpu, topology.sp)


def _check_budget(run: "TrainRun", key: str, tokens: int, sp: int) -> None:
    prompt, response = run.data.max_prompt_length, run.data.max_response_length
    if prompt + response > tokens * sp:
        by, product = (f" x {_KEYS['sp']}", f"{tokens} x {sp} = {tokens * sp}") if sp > 1 else ("", f"{tokens}")
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response} is more than "
            f"{key}{by} = {product}: the longest trajectory must fit a micro-batch; raise the budget or lower the lengths"
        )
