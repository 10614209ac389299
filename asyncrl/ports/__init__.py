"""Protocols between rooms, and the plain data that travels through them.

A room sees its neighbours only through these pages, which is what lets the simulator stand in for any edge of the controller:
`World` (time, randomness, blocking work), `RolloutEngine` and `Template` (generation), `RewardScorer` (reward), `Policy` (the
actor), `ValueFunction` (the critic) and `Rows` (the dataset). `Incident` is what they tell of trouble. Nothing here imports torch.
"""

from asyncrl.ports.generation import (
    GenerateRequest,
    Generation,
    RolloutEngine,
    SamplingParams,
    StopReason,
    Template,
    VersionSpan,
    WeightSnapshot,
)
from asyncrl.ports.incidents import Incident, IncidentKind, Report, ignore_incident
from asyncrl.ports.sessions import FailureClass, GroupStatus, Prompt, RewardRequest, RewardResult, RewardScorer, Rows
from asyncrl.ports.topology import Topology
from asyncrl.ports.tracing import SessionSpan, Span, SpanKind
from asyncrl.ports.training import (
    Access,
    FieldReport,
    FieldSchema,
    HeldField,
    Policy,
    Shards,
    StageResult,
    StepContext,
    ValueFunction,
)
from asyncrl.ports.values import Decode, Json, Messages, copied, not_json
from asyncrl.ports.world import World

__all__ = [
    "Access",
    "Decode",
    "FailureClass",
    "FieldReport",
    "FieldSchema",
    "GenerateRequest",
    "Generation",
    "GroupStatus",
    "HeldField",
    "Incident",
    "IncidentKind",
    "Json",
    "Messages",
    "Policy",
    "Prompt",
    "Report",
    "RewardRequest",
    "RewardResult",
    "RewardScorer",
    "RolloutEngine",
    "Rows",
    "SamplingParams",
    "SessionSpan",
    "Shards",
    "Span",
    "SpanKind",
    "StageResult",
    "StepContext",
    "StopReason",
    "Template",
    "Topology",
    "ValueFunction",
    "VersionSpan",
    "WeightSnapshot",
    "World",
    "copied",
    "not_json",
    "ignore_incident",
]
