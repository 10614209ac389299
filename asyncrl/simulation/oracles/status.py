"""I2: the status of a group only moves forward, as it is written and as replay sees it."""

import itertools

from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, RowPut

RANK = {"pending": 0, "running": 1, "finished": 2, "failure": 2}
TERMINAL = ("finished", "failure")
MOST = 32
"""Groups that are looked at in a turn."""


class Status(Oracle):
    """pending -> running -> finished | failure; a group whose sessions never began may go from pending to failure."""

    name = "I2"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._known: dict[str, str] = {}
        """Group -> its status as replay saw it last."""

    def entry(self, changes: Changes) -> None:
        for put in changes.put:
            if put.row.is_prompt:
                self._check_move(put)
                self._known.setdefault(put.row.entry.uid, "pending")
        for row in changes.removed:
            self._known.pop(row.entry.uid, None)
        for record in changes.retired:
            for uid in record.uids:
                self._known.pop(uid, None)

    def _check_move(self, put: RowPut) -> None:
        uid, after = put.row.entry.uid, put.row.status
        before = "" if put.tag_before is None else str(put.tag_before.get("status", ""))
        if after not in RANK:
            self.fail(f"group {uid!r} was given the status {after!r}")
        if before in TERMINAL:
            self.fail(f"group {uid!r} was written as {after!r} although it was {before!r}, which is terminal")
        if before and RANK[after] < RANK[before]:
            self.fail(f"group {uid!r} went back from {before!r} to {after!r}")
        if not before and after != "pending":
            self.fail(f"group {uid!r} began as {after!r}, not as 'pending'")
        if after == "finished":
            self._check_whole(uid, before)
        if after == "failure" and not put.row.entry.tag.get("failure"):
            self.fail(f"group {uid!r} failed without a reason in its tag")

    def _check_whole(self, uid: str, before: str) -> None:
        if before != "running":
            self.fail(f"group {uid!r} went from {before!r} to 'finished'")
        rows = self.ground.shadow.groups.get(uid, {}).values()
        sessions = sorted({row.entry.session_id for row in rows if row.entry.session_id is not None})
        if sessions != list(range(self.ground.run.rollout.n)):
            self.fail(f"group {uid!r} is finished with rows of sessions {sessions}, not of all {self.ground.run.rollout.n}")
        if self.ground.shadow.groups[uid][uid].entry.tag.get("failure"):
            self.fail(f"group {uid!r} is finished, and a session of it has failed")

    def turn(self) -> None:
        """What replay has made of the tags."""
        if not self._known:
            return
        groups, known = self.ground.replay._groups, self._known
        for uid in self._some():
            group = groups.get(uid)
            if group is not None and group.status is not known[uid]:
                self._check_seen(uid, known[uid], group.status)
                known[uid] = group.status

    def _some(self) -> list[str]:
        """All groups, or where they are many some of them, each in its turn."""
        if len(self._known) <= MOST:
            return list(self._known)
        chosen = list(itertools.islice(self._known, MOST))
        for uid in chosen:  # to the end of the line
            self._known[uid] = self._known.pop(uid)
        return chosen

    def _check_seen(self, uid: str, before: str, seen: str) -> None:
        prompt = self.ground.shadow.prompt(uid)
        written = seen if prompt is None else prompt.status
        if RANK[seen] < RANK[before]:
            self.fail(f"replay saw group {uid!r} as '{before}', and then as '{seen}'")
        if RANK[seen] > RANK[written] or (RANK[seen] == RANK[written] and seen != written):
            self.fail(f"replay sees group {uid!r} as '{seen}', but its tag says {written!r}")
