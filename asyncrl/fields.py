"""The field catalogue: the one place where the name, dtype, ragged axis, producer and consumers of every column are spelled.

`asyncrl fields` prints it, the tables of docs/data-protocol.md are generated from it, and the stage wrapper checks every read and
write against it. It is in the order of the way, from the dataset's row to the update.
Axes: `prompt` (P tokens), `response` (R tokens, observations included), `sequence` (L = P + R), `none` (one value a trajectory).
Producers and consumers are rooms or stages; `observe` as a consumer stands for people. `not yet`: no code uses the name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.errors import FieldError


class Axis(StrEnum):
    """Which length a row of the field has."""

    PROMPT = "prompt"
    RESPONSE = "response"
    SEQUENCE = "sequence"
    NONE = "none"


class Evidence(StrEnum):
    """Where our knowledge of a field comes from: the data-protocol document, a peer's source, our own tests, or nowhere yet: a name
    that only our design has."""

    SEED = "seed"
    SOURCE = "source"
    TESTED = "tested"
    DESIGN = "design"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column. `dtype` is a torch dtype name, or `object` for JSON-like values."""

    name: str
    dtype: str
    axis: Axis
    producer: str
    consumers: tuple[str, ...]
    when: str
    evidence: Evidence = Evidence.SEED

    @property
    def is_tensor(self) -> bool:
        return self.dtype != "object"

    @property
    def is_built(self) -> bool:
        """False for a name that is only reserved: no code writes it yet."""
        return not self.when.startswith("not yet")

    @property
    def is_of_row(self) -> bool:
        """Every finished trajectory has it: what a stage can read before any stage has run."""
        return self.is_built and self.producer in ("feed", "agents", "rewards") and not self.when.startswith("only ")


def _fields(*rows: tuple[str, str, str, str, str, str, Evidence]) -> dict[str, Field]:
    catalogue = {
        name: Field(
            name=name,
            dtype=dtype,
            axis=Axis(axis),
            producer=producer,
            consumers=tuple(consumers.split()),
            when=when,
            evidence=evidence,
        )
        for name, dtype, axis, producer, consumers, when, evidence in rows
    }
    assert len(catalogue) == len(rows), "a field stands twice in the catalogue"
    return catalogue


_SEED, _SOURCE, _TESTED, _DESIGN = Evidence.SEED, Evidence.SOURCE, Evidence.TESTED, Evidence.DESIGN
_MODELS = "old_log_prob ref_log_prob values update_critic"
"""Stages that run a model over the rows."""

CATALOGUE: dict[str, Field] = _fields(
    # name, dtype, axis, producer, consumers, when it exists, evidence
    ("raw_prompt", "object", "none", "dataset", "agents", "every row", _SEED),
    ("data_source", "object", "none", "dataset", "rewards observe", "every row", _SEED),
    ("reward_model", "object", "none", "dataset", "rewards", "every row that a rule scores", _SEED),
    ("extra_info", "object", "none", "dataset", "agents rewards", "every row", _SEED),
    ("index", "object", "none", "dataset", "observe", "every row: extra_info.index, else the row's number", _SEED),
    ("tools_kwargs", "object", "none", "dataset", "agents", "every row: extra_info.tools_kwargs, or empty", _SEED),
    ("interaction_kwargs", "object", "none", "dataset", "agents", "every row: extra_info.interaction_kwargs, or empty", _SEED),
    ("ground_truth", "object", "none", "dataset", "agents rewards", "every group: reward_model.ground_truth", _TESTED),
    ("row_columns", "object", "none", "dataset", "agents observe", "every group: what else its row has", _TESTED),
    ("dummy_tensor", "uint8", "none", "dataset", "dataset", "every collated batch: keeps an all-object batch countable", _SEED),
    ("uid", "object", "none", "feed", "agents replay", "every group", _SEED),
    ("session_id", "int64", "none", "agents", "protocol observe", "every trajectory", _SEED),
    ("prompts", "int64", "prompt", "agents", f"{_MODELS} update_actor observe", "every trajectory", _SEED),
    ("responses", "int64", "response", "agents", f"{_MODELS} update_actor observe", "every trajectory", _SEED),
    ("response_mask", "bool", "response", "agents", f"{_MODELS} correction advantage update_actor observe", "always", _SEED),
    ("loss_mask", "bool", "response", "agents", "update_critic update_actor", "always: is response_mask, immutable", _SEED),
    ("input_ids", "int64", "sequence", "agents", f"{_MODELS} update_actor", "every trajectory", _SEED),
    ("attention_mask", "bool", "sequence", "protocol", "protocol", "padded layout only", _SEED),
    ("position_ids", "int64", "sequence", "agents", f"{_MODELS} update_actor", "every trajectory", _SEED),
    ("multi_modal_inputs", "object", "none", "agents", "old_log_prob update_actor", "not yet: images and audio are refused", _SEED),
    ("rollout_log_probs", "float32", "response", "agents", "old_log_prob correction update_actor", "always: the engine's", _SEED),
    ("token_versions", "int32", "response", "agents", "protocol batch_metrics observe", "always; -1: of no policy", _TESTED),
    ("reward_score", "float32", "none", "rewards", "batch_metrics observe", "every finished session", _SEED),
    ("rm_scores", "float32", "response", "agents", "advantage", "finished session: score on the last policy token", _SEED),
    ("reward_baselines", "float32", "none", "agents", "advantage", "only with remax: the greedy session's score", _SOURCE),
    ("extra_fields", "object", "none", "agents", "advantage batch_metrics observe", "every trajectory", _SEED),
    ("num_turns", "int64", "none", "agents", "batch_metrics observe", "every trajectory", _SEED),
    ("old_log_probs", "float32", "response", "old_log_prob", "correction advantage update_actor", "unless elided", _SEED),
    ("entropy", "float32", "response", "old_log_prob", "observe", "old log-probs are recomputed", _SEED),
    ("sum_pi_squared", "float32", "response", "old_log_prob", "advantage", "an optimal token baseline asks for it", _SOURCE),
    ("ref_log_prob", "float32", "response", "ref_log_prob", "advantage update_actor", "a KL term is on", _SEED),
    ("values", "float32", "response", "values", "advantage update_critic", "the estimator is gae: the critic's", _SEED),
    ("token_level_scores", "float32", "response", "advantage", "observe", "every step", _SEED),
    ("token_level_rewards", "float32", "response", "advantage", "observe", "every step: scores less the KL in the reward", _SEED),
    ("advantages", "float32", "response", "advantage", "update_actor", "every step", _SEED),
    ("returns", "float32", "response", "advantage", "update_critic observe", "every step", _SEED),
    ("rollout_is_weights", "float32", "response", "correction", "advantage update_actor", "importance weights are on", _SOURCE),
    ("loss_weights", "float32", "response", "correction", "update_critic update_actor observe", "rejection is on: 0 or 1", _TESTED),
)  # fmt: skip

SEVERAL_AXES = frozenset({"position_ids"})
"""Fields whose entries may be several numbers: a row is [L] or [L, A]. An entry of any other ragged field is one number."""

TagValue = bool | int | float | str
Tag = Mapping[str, TagValue]
"""Cheap metadata of one key, under the names of `TAGS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagField:
    """One entry of a tag: cheap metadata that stays on the controller."""

    name: str
    type: type
    on: str
    meaning: str


TAGS: dict[str, TagField] = {
    name: TagField(name=name, type=kind, on=on, meaning=meaning)
    for name, kind, on, meaning in (
        ("is_prompt", bool, "prompt", "true on the key of a group"),
        ("status", str, "both", "prompt: pending, running, finished or failure; trajectory: finished"),
        ("global_steps", int, "both", "weight version when the group was admitted or the session dispatched"),
        ("number", int, "prompt", "number of the prompt in the run, from 0: the feed's cursor before it"),
        ("row", int, "prompt", "position of its row in the dataset; -1: of none"),
        ("failure", str, "prompt", "class and message of the first failed session, once there is one"),
        ("prompt_len", int, "trajectory", "number of prompt tokens"),
        ("response_len", int, "trajectory", "number of response tokens, observations included"),
        ("seq_len", int, "trajectory", "prompt_len + response_len"),
        ("policy_len", int, "trajectory", "response_mask.sum(): tokens that the policy sampled"),
        ("score", float, "trajectory", "the session's reward"),
        ("min_global_steps", int, "trajectory", "oldest weight version among its policy tokens"),
        ("max_global_steps", int, "trajectory", "newest weight version among its policy tokens"),
        ("is_padding", bool, "trajectory", "a row that only fills a mesh: outside every loss, metric and count"),
    )
}


def field(name: str) -> Field:
    """The catalogue's entry. Raises FieldError for a name that is not in it."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise FieldError(f"field {name!r} is not in the catalogue (asyncrl/fields.py); add an entry before writing it") from None
