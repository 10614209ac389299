"""I2: the status of a group only moves forward, as it is written and as replay sees it."""

from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, RowPut

RANK = {"pending": 0, "running": 1, "finished": 2, "failure": 2}
TERMINAL = ("finished", "failure")


class Status(Oracle):
    """pending -> running -> finished | failure; a group whose sessions never began may go from pending to failure."""

    name = "I2"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._seen: dict[str, str] = {}
        self._behind: dict[str, None] = {}
        """Groups of which replay may not have seen the last tag."""

    def entry(self, changes: Changes) -> None:
        for put in changes.put:
            if put.row.is_prompt:
                self._check_move(put)
                self._behind[put.row.entry.uid] = None

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

    def turn(self) -> None:
        if not self._behind:
            return
        groups = self.ground.replay._groups
        for uid in list(self._behind):
            prompt, group = self.ground.shadow.prompt(uid), groups.get(uid)
            if prompt is None:
                del self._behind[uid]
                self._seen.pop(uid, None)
            elif group is not None:
                self._check_seen(uid, str(group.status), prompt.status)

    def _check_seen(self, uid: str, seen: str, written: str) -> None:
        before = self._seen.get(uid, seen)
        if RANK[seen] < RANK[before]:
            self.fail(f"replay saw group {uid!r} as {before!r}, and then as {seen!r}")
        if RANK[seen] > RANK[written] or (RANK[seen] == RANK[written] and seen != written):
            self.fail(f"replay sees group {uid!r} as {seen!r}, but its tag says {written!r}")
        self._seen[uid] = seen
        if seen == written:
            del self._behind[uid]
