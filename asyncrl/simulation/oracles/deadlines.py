"""I11: every wait has its deadline. A session, a group, a tool call and a step end within a time that the configuration states, and
somebody always gets on.
"""

import math
from collections import deque

from asyncrl.config import TrainRun
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.oracles.ground import Ground, Task
from asyncrl.simulation.oracles.oracle import Oracle, Update
from asyncrl.simulation.oracles.shadow import Changes
from asyncrl.simulation.stacks import describe_tasks

SLACK_S = 60.0
"""Beyond the deadlines themselves: pauses at fault sites, and the moment that a cancelled guest gets."""


class Deadlines(Oracle):
    """Of groups, and of guests: sessions and tool calls. A guest that holds on to its cancellation is left behind, as it may be."""

    name = "I11"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        agent = ground.run.agent
        group_s = agent.group_timeout_s + 2 * ground.run.store.commit_timeout_s
        self._bounds = {"guest: session": agent.timeout_s, "guest: tool": agent.tool_timeout_s, "group ": group_s}
        self._due: dict[str, deque[tuple[float, Task, str]]] = {kind: deque() for kind in self._bounds}
        """In the order of their deadlines, since all of a kind have the same bound."""

    def begun(self, task: Task, name: str) -> None:
        for kind, bound_s in self._bounds.items():
            if name.startswith(kind):
                self._due[kind].append((self.ground.loop.time() + bound_s + SLACK_S, task, name))

    def turn(self) -> None:
        now = self.ground.loop.time()
        for kind, due in self._due.items():
            while due and (due[0][1].done() or due[0][0] < now):
                _, task, name = due.popleft()
                if not task.done() and not self.ground.is_left_behind(task):
                    self.fail(f"{name.removeprefix('guest: ')} runs for more than {self._bounds[kind] + SLACK_S:g} s, its deadline")

    def due(self) -> float:
        return min((due[0][0] for due in self._due.values() if due), default=math.inf)


class Progress(Oracle):
    """Something happens: an entry, an answer, a publication, a checkpoint, within the longest wait that anybody may have."""

    name = "I11"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._bound_s = longest_wait(ground.run) + SLACK_S
        self._step_bound_s = step_bound(ground.run)
        self._last = self._step_began = ground.loop.time()
        self._state: tuple[object, ...] = ()
        self._step = ground.trainer.step

    def entry(self, changes: Changes) -> None:
        self._last = self.ground.loop.time()

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        self._last = self.ground.loop.time()

    def updated(self, update: Update) -> None:
        self._last = self.ground.loop.time()

    def busy_until(self, end_s: float) -> None:
        """An edge works until then."""
        self._last = max(self._last, end_s)

    def turn(self) -> None:
        now, ground = self.ground.loop.time(), self.ground
        state = (ground.engines.published, len(ground.machine.checkpoints), ground.machine.newest, ground.trainer.step)
        if state != self._state:
            self._state, self._last = state, max(self._last, now)
        if now - self._last > self._bound_s:
            idle_s, waiting = now - self._last, describe_tasks(ground.loop.tasks_left)
            self.fail(f"nothing has happened for {idle_s:.1f} s; the longest wait is {self._bound_s:g} s\n{waiting}")
        if ground.trainer.step != self._step:
            self._step, self._step_began = ground.trainer.step, now
        if now - self._step_began > self._step_bound_s:
            self.fail(f"step {self._step + 1} takes more than {self._step_bound_s:g} s, the sum of its deadlines")

    def due(self) -> float:
        return min(self._last + self._bound_s, self._step_began + self._step_bound_s)


def longest_wait(run: TrainRun) -> float:
    """Seconds that a part of the controller may wait for one thing, by its deadlines: a session, a request, a commit, a scoring,
    the next attempt, an evaluation."""
    deadlines = (run.agent.timeout_s, run.rollout.request_timeout_s, publication_s(run), run.store.commit_timeout_s)
    evaluation_s = run.eval.timeout_s if run.data.val_files else 0.0
    return max(*deadlines, run.reward.timeout_s, evaluation_s) + backoff_s(run)


def publication_s(run: TrainRun) -> float:
    """Seconds that the trainer waits for one, at most: the gate, the pool and the engines have the same deadline one by one."""
    return run.rollout.publish_timeout_s * (2 + (not run.rollout.in_flight_updates))


def backoff_s(run: TrainRun) -> float:
    """Seconds before the last attempt at a session."""
    return run.agent.retry_backoff_s * 2.0 ** max(run.agent.max_attempts - 2, 0)


def step_bound(run: TrainRun) -> float:
    """Seconds of a whole step: its groups, its stages, the copy of the weights, a checkpoint, the publication, an evaluation, the
    journal."""
    stages = 8 * run.trainer.stage_timeout_s
    publication = run.trainer.stage_timeout_s + publication_s(run)
    return run.replay.sample_timeout_s + stages + publication + 2 * run.eval.timeout_s + 8 * run.store.commit_timeout_s + SLACK_S
