"""The groups that are under way: what a restart goes on with.

journal -> State -> [under_way] -> recovery, GroupRunner.resume
"""

from dataclasses import dataclass

from asyncrl.fields import Tag
from asyncrl.transfer_queue.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUnderWay:
    """A session of a group that has not settled. `is_open`: the session has not settled itself; `attempt`: the one it is at;
    `num_turns`: turns of it that are kept."""

    session_id: int
    attempt: int
    is_open: bool
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnderWay:
    """A group that is alive: its prompt is there, and no step trains on it. `tag`: its prompt's.

    is_settled: all of it has ended, and its tag is the last one; `sessions` is empty then. Otherwise these are the sessions that
    have begun. keys: of its trajectories, in the order they came; a session that has settled and has none of them has failed.
    """

    uid: str
    tag: Tag
    is_settled: bool
    sessions: tuple[SessionUnderWay, ...]
    keys: tuple[str, ...]


def groups_under_way(state: State, partition_id: str) -> list[GroupUnderWay]:
    """In admission order, which is that of the prompts' rows."""
    partition = state.partition(partition_id)
    alive = [uid for uid in partition.uids if uid in partition.rows and state.ledger.step_of(uid) is None]
    return [_group(state, uid, partition.rows[uid].tag, partition.group_keys(uid)) for uid in alive]


def _group(state: State, uid: str, tag: Tag, keys: list[str]) -> GroupUnderWay:
    sessions = [
        SessionUnderWay(
            session_id=entry.session_id,
            attempt=entry.attempt,
            is_open=entry.is_open,
            num_turns=len(state.ledger.turns(uid, entry.session_id)),
        )
        for entry in state.leases.entries(uid)
        if entry.session_id is not None
    ]
    return GroupUnderWay(
        uid=uid,
        tag=tag,
        is_settled=state.leases.group(uid) is None,
        sessions=tuple(sorted(sessions, key=lambda session: session.session_id)),
        keys=tuple(key for key in keys if key != uid),
    )
