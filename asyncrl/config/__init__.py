"""Typed configuration: one section a room, one TOML file a run. Unknown keys are errors that suggest the nearest name. No torch.

sections    every key, its default and its help        runs         the sections of a run, rules and sums across keys
learning    the same of [algorithm], [actor], [critic] loading      TOML and overrides to a run, and back
rewards     the same of [reward]                       algorithms   what each estimator and loss reads
rollout     the same of [rollout]                      cluster      how the ranks are cut, and token budgets
idle_keys   keys without effect are errors too         keys         walks over declared and given keys
addresses   of endpoints, without secrets
"""

from asyncrl.config.cluster import topology_of
from asyncrl.config.keys import keys_of
from asyncrl.config.learning import ActorConfig, AlgorithmConfig, FSDPConfig
from asyncrl.config.loading import load_run, parse_run, to_toml
from asyncrl.config.rewards import JudgeConfig, LimitsConfig, RewardConfig
from asyncrl.config.rollout import OpenAIConfig, RolloutConfig, VLLMConfig
from asyncrl.config.runs import SFTRun, TrainRun
from asyncrl.config.sections import (
    AgentConfig,
    ClusterConfig,
    ColumnMapping,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ReplayConfig,
    Section,
    SFTConfig,
    TrainerConfig,
)

__all__ = [
    "TrainRun",
    "SFTRun",
    "load_run",
    "parse_run",
    "to_toml",
    "keys_of",
    "topology_of",
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "ColumnMapping",
    "DataConfig",
    "EvalConfig",
    "FSDPConfig",
    "ModelConfig",
    "OpenAIConfig",
    "OptimConfig",
    "ReplayConfig",
    "JudgeConfig",
    "LimitsConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
    "SFTConfig",
    "TrainerConfig",
    "VLLMConfig",
]
