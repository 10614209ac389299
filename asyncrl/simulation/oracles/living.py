"""I3: who is not at its end has somebody who brings it there. And the account of tasks that other oracles read."""

from collections.abc import Sequence

from asyncrl.simulation.faults.plan import EVALUATION
from asyncrl.simulation.oracles.book import Line
from asyncrl.simulation.oracles.ground import Task
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes
from asyncrl.simulation.oracles.status import TERMINAL


class Living(Oracle):
    """A group that is not terminal has a living task; a terminal one has no session that could still write."""

    name = "I3"

    def begun(self, task: Task, name: str) -> None:
        kind, _, rest = name.partition(" ")
        tasks = self.ground.tasks
        if kind == "group":
            tasks.groups[rest] = task
        elif kind == "session":
            uid, _, number = rest.rpartition("_")
            tasks.sessions.setdefault(uid, {})[int(number)] = task
        elif name.startswith(f"guest: session {EVALUATION}"):
            tasks.eval_guests[task] = None
        elif name.startswith("guest: session"):
            tasks.session_guests[task] = None
        elif name.startswith("guest: tool"):
            tasks.tool_guests[task] = None

    def ended(self, task: Task, name: str) -> None:
        kind, _, rest = name.partition(" ")
        tasks = self.ground.tasks
        if kind == "group":
            tasks.groups.pop(rest, None)
            self._check_group(rest, task)
        elif kind == "session":
            uid, _, number = rest.rpartition("_")
            of_group = tasks.sessions.get(uid, {})
            of_group.pop(int(number), None)
            if not of_group:
                tasks.sessions.pop(uid, None)
        elif kind == "guest:":
            tasks.session_guests.pop(task, None)
            tasks.eval_guests.pop(task, None)
            tasks.tool_guests.pop(task, None)

    def fed(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line.uid not in self.ground.tasks.groups and not self.ground.is_ending:
                self.fail(f"{line} was admitted, but no task runs it")

    def _check_group(self, uid: str, task: Task) -> None:
        ground = self.ground
        if ground.is_ending or (not task.cancelled() and task.exception() is not None):
            return  # the run ends with it
        prompt = ground.shadow.prompt(uid)
        if prompt is None and uid in ground.book.open and ground.admission.is_alive(uid):
            self.fail(f"the task of {ground.book.open[uid]} has ended, and the store never heard of it: it is alive for ever")
        if prompt is not None and prompt.status not in TERMINAL:
            self.fail(f"the task of group {uid!r} has ended, but the group is {prompt.status!r}: nobody will ever end it")

    def entry(self, changes: Changes) -> None:
        if changes.recorded:
            self._check_all_run()
        for put in changes.put:
            if put.row.is_prompt and put.row.status in TERMINAL:
                self._check_siblings(put.row.entry.uid, changes)

    def _check_all_run(self) -> None:
        """At a new record all that a restart found is under way again."""
        for uid, line in self.ground.book.open.items():
            prompt = self.ground.shadow.prompt(uid)
            is_over = prompt is None or prompt.status in TERMINAL
            if not is_over and uid not in self.ground.tasks.groups and not self.ground.is_ending:
                self.fail(f"{line}, and no task runs it")

    def _check_siblings(self, uid: str, changes: Changes) -> None:
        """In the entry that makes a group terminal the leases of all its sessions are closed, or their tasks have ended."""
        leases = changes.ended.get(uid) or self.ground.shadow.leases.get(uid, {})
        alive = self.ground.tasks.sessions.get(uid, {})
        for number, lease in leases.items():
            if number is not None and lease.is_open and number in alive:
                self.fail(f"group {uid!r} became terminal while its session {number} is running under an open lease")
