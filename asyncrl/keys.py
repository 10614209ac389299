"""Names of things in the TransferQueue: group keys, trajectory keys and the leases that allow a write.

A *group* is one prompt (uid); a *session* is one independent rollout of it (uid, session_id); a *trajectory* is one output of a
session (uid, session_id, index). The key of a prompt is its uid; the key of a trajectory is `{uid}_{session_id}_{index}`.
"""

import functools
from dataclasses import dataclass

from asyncrl.errors import KeyFormatError

TRAIN = "train"
"""Partition of the groups that are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TrajectoryKey:
    """(uid, session_id, index) of one agent-loop output; `str()` is its key in the store, `parse` the way back.

    A uid may contain underscores: the two numbers are taken from the right. Raises KeyFormatError for a uid or number that
    `parse` could not restore.
    """

    uid: str
    session_id: int
    index: int

    def __post_init__(self) -> None:
        if not self.uid or self.session_id < 0 or self.index < 0:
            raise KeyFormatError(f"trajectory {(self.uid, self.session_id, self.index)}: needs a uid and numbers from 0")

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"

    @staticmethod
    @functools.lru_cache(maxsize=1 << 15)  # every room asks for the parts of each key a dozen times on its way
    def parse(key: str) -> "TrajectoryKey":
        """Raises KeyFormatError when `key` is not `{uid}_{session_id}_{index}` with plain decimal numbers below 10^18."""
        parts = key.rsplit("_", 2)
        if len(parts) == 3 and parts[0] and all(_is_plain_number(part) for part in parts[1:]):
            return TrajectoryKey(uid=parts[0], session_id=int(parts[1]), index=int(parts[2]))
        raise KeyFormatError(f"trajectory key {key!r} is not of the form uid_session_index, such as 'a1b2_0_0'")


def _is_plain_number(text: str) -> bool:
    return len(text) <= 18 and text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """The right to write the prompt key of one group: held from its admission until its sessions have settled."""

    uid: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLease:
    """The right to write the trajectories of one session. A retry is a higher `attempt`; a restart a higher `incarnation`."""

    uid: str
    session_id: int
    attempt: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLease:
    """The right of one training step to add columns to the trajectories it sampled. A step that is done again after it failed has a
    higher `attempt`, so that a stage of the failed one can write no more."""

    step: int
    attempt: int = 0
    incarnation: int = 0


Lease = GroupLease | SessionLease | StepLease
