"""Prompt groups: their states, and what replay knows of each.

runner (prompt tag) -> kv_watch -> [PromptGroup] -> ReplayBuffer.sample

    pending ──> running ──> finished
                   └──────> failure

A group is terminal only when every session of it has settled, so nobody writes to it afterwards. The runner writes each state;
a watch coalesces, so replay may see `finished` straight after `pending` and walks the states in between.
"""

from dataclasses import dataclass, field

from asyncrl.errors import TransitionError
from asyncrl.fields import Tag
from asyncrl.keys import TrajectoryKey
from asyncrl.ports import GroupStatus

NEXT: dict[GroupStatus, tuple[GroupStatus, ...]] = {
    GroupStatus.PENDING: (GroupStatus.RUNNING,),
    GroupStatus.RUNNING: (GroupStatus.FINISHED, GroupStatus.FAILURE),
    GroupStatus.FINISHED: (),
    GroupStatus.FAILURE: (),
}
"""The picture above, which docs/data-protocol.md draws from here."""


@dataclass(slots=True, kw_only=True)
class PromptGroup:
    """What replay has seen of one group. `since`: the loop's time when it was first seen, in seconds; `row`: the position of its
    prompt in the dataset, -1 where nobody said."""

    uid: str
    since: float
    status: GroupStatus = GroupStatus.PENDING
    failure: str = ""
    row: int = -1
    trajectories: dict[str, Tag] = field(default_factory=dict)

    @property
    def sessions(self) -> list[int]:
        """Sessions whose trajectories are in the store, in order."""
        return sorted({TrajectoryKey.parse(key).session_id for key in self.trajectories})

    @property
    def has_signal(self) -> bool:
        """Do two of its sessions have different rewards, so that there is something to learn? max == min decides, not a std, which
        rounding defeats. A session's reward is that of its last trajectory, as the advantages take it."""
        rewards = {TrajectoryKey.parse(key).session_id: self.trajectories[key]["score"] for key in self.keys}
        return len(set(rewards.values())) > 1

    @property
    def keys(self) -> list[str]:
        """Trajectory keys by session and index."""
        return sorted(self.trajectories, key=TrajectoryKey.parse)


def transition(group: PromptGroup, to: GroupStatus) -> None:
    """Move a group by one edge of the picture above; the only writer of `status`. Raises TransitionError for any other move."""
    if to not in NEXT[group.status]:
        allowed = " or ".join(NEXT[group.status]) or "nothing, it is terminal"
        raise TransitionError(f"group {group.uid!r} cannot go from {group.status} to {to}; allowed: {allowed}")
    group.status = to


def follow(group: PromptGroup, seen: GroupStatus) -> None:
    """Bring a group to the state that a coalesced watch shows. Raises TransitionError when there is no way forward to it."""
    if seen is group.status:
        return
    if group.status is GroupStatus.PENDING and seen is not GroupStatus.RUNNING:
        transition(group, GroupStatus.RUNNING)
    transition(group, seen)
