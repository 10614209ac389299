"""Resuming: the kept turns of a session become what its loop goes on from.

Place: TransferQueue.kv_turns -> [resuming] -> SessionContext.kept -> AgentLoop. What a loop keeps of a turn is its tokens and its
own state (`SessionContext.keep`); a session that is resumed after turn k samples turn k + 1 with the seed it would have had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.ports import Json
from asyncrl.tools import Tool

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTurn:
    """One turn, with the answers to its calls. Columns of one length, as in TokenBuilder; `state`: what the loop kept beside."""

    ids: Sequence[int]
    mask: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    state: dict[str, Json]


def kept_turns(turns: "Sequence[TensorDict]") -> tuple[KeptTurn, ...]:
    """turns: as the store gives them, one TensorDict [1] a turn. Raises KeyError for what `SessionContext.keep` did not write."""
    return tuple(map(_kept_turn, turns))


def _kept_turn(turn: "TensorDict") -> KeptTurn:
    return KeptTurn(
        ids=turn["responses"].values().tolist(),
        mask=[int(bit) for bit in turn["response_mask"].values().tolist()],
        log_probs=turn["rollout_log_probs"].values().tolist(),
        versions=turn["token_versions"].values().tolist(),
        state=turn["extra_fields"].tolist()[0],
    )


def goes_on(loop: object, tools: Mapping[str, Tool], turns: "Sequence[TensorDict]") -> bool:
    """Can a session of `loop` go on after these turns? A loop says so by `can_resume = True`. A tool says by `is_stateful = True`
    that sessions have something in its own memory, which a restart has lost; one that had ended asks no tool any more."""
    if not getattr(loop, "can_resume", False):
        return False
    return _has_ended(turns) or not any(getattr(tool, "is_stateful", False) for tool in tools.values())


def _has_ended(turns: "Sequence[TensorDict]") -> bool:
    state = turns[-1].get("extra_fields", None)
    return state is not None and bool(state.tolist()[0].get("stop_reason"))
