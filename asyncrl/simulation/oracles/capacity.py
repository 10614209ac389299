"""I10: no more under way than there are places, as many permits as holders, nothing left when the controller is closed; and what is
kept does not grow.
"""

from itertools import islice

from asyncrl.simulation.oracles.ground import Ground, Task
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes


class Places(Oracle):
    """Slots of engines, sessions in flight, tool calls."""

    name = "I10"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        config = ground.run.agent
        self._max_sessions = config.max_concurrent_sessions
        self._max_tools = config.max_concurrent_tools
        self._slots = ground.run.rollout.max_num_seqs
        self._tools = ground.runner._tools
        self._has_changed = False

    def begun(self, task: Task, name: str) -> None:
        self._has_changed = True

    def ended(self, task: Task, name: str) -> None:
        self._has_changed = True

    def turn(self) -> None:
        if not self._has_changed:
            return
        self._has_changed = False
        tasks = self.ground.tasks
        if not tasks.num:
            self._check_free()
            return
        late = self.ground.runner._parts.guests._late
        sessions = sum(task not in late for task in tasks.session_guests)
        if self._max_sessions and sessions > self._max_sessions:
            self.fail(f"{sessions} sessions run; agent.max_concurrent_sessions is {self._max_sessions}")
        if tasks.tool_guests:
            runners = 1 if self.ground.edges.val_rows is None else 2  # an evaluation has one of its own
            calls, limit = (
                len(tasks.tool_guests) - len(self._tools._guests._late),
                self._max_tools * len(self._tools.tools) * runners,
            )
            if calls > limit:
                self.fail(
                    f"{calls} tool calls run; agent.max_concurrent_tools is {self._max_tools}, of {len(self._tools.tools)} tools"
                )
        for name, places in self._tools._places.items():
            if not 0 <= places._value <= self._max_tools:
                self.fail(f"tool {name!r} has {places._value} free places of {self._max_tools}")
        for engine in islice(self.ground.engines.serving(), 16):  # each holds itself to it: a model's check, to be cheap
            if engine.slots.num_running > self._slots:
                self.fail(f"{engine.name} runs {engine.slots.num_running} rows in {self._slots} slots")

    def _check_free(self) -> None:
        """No group, session or tool is under way: every place is free."""
        for name, places in self._tools._places.items():
            if places._value != self._max_tools:
                self.fail(f"no session is under way, and tool {name!r} has {places._value} free places of {self._max_tools}")
        places_of_sessions = self.ground.runner._places
        if places_of_sessions is not None and places_of_sessions._value != self._max_sessions:
            self.fail(f"no session is under way, and {places_of_sessions._value} of {self._max_sessions} session places are free")
        for member in self.ground.engines._members:
            if member.load:
                self.fail(f"no session is under way, and {member.name} counts {member.load} requests")
        for engine in self.ground.engines.serving():
            if engine.slots.load:
                self.fail(f"no session is under way, and {engine.name} has {engine.slots.load} requests")

    def end(self) -> None:
        ground = self.ground
        left = sorted(task.get_name() for task in ground.loop.tasks_left if not ground.is_left_behind(task))
        if left:
            self.fail(f"{len(left)} tasks are left after the end: {left[:4]}")
        if len(ground.state.leases) or len(ground.state.watches):
            self.fail(f"{len(ground.state.leases)} leases and {len(ground.state.watches)} watches are left after the end")


class Emptied(Oracle):
    """At the end of a finished run nothing is left in the store, in its leases and turns, or of a step."""

    name = "I4"

    def end(self) -> None:
        ground, shadow = self.ground, self.ground.shadow
        if not ground.machine.is_finished:
            return
        if shadow.groups:
            self.fail(f"the run is over, and keys are left: {sorted(key for group in shadow.groups.values() for key in group)[:4]}")
        if shadow.leases or shadow.turns:
            self.fail(
                f"the run is over, and leases of {sorted(shadow.leases)[:4]} and turns of {sorted(shadow.turns)[:4]} are left"
            )
        early = sorted(set(shadow.records) - shadow.done)
        if early:
            self.fail(f"the run is over, and steps {early} are not retired")
        stats = ground.edges.queue.stats()
        if stats["keys"] or stats["bytes"] or stats["turns"]:
            self.fail(f"the run is over, and the store holds {stats['keys']} keys, {stats['bytes']} bytes, {stats['turns']} turns")


class Bounded(Oracle):
    """What is kept does not grow: records of three intervals of checkpoints, and as many groups as there are places."""

    name = "I10"

    def entry(self, changes: Changes) -> None:
        ground = self.ground
        save_freq, kept = ground.run.trainer.save_freq, ground.run.trainer.max_ckpt_to_keep
        if changes.recorded and ground.run.store.journal and save_freq and len(ground.shadow.records) > (kept + 1) * save_freq:
            self.fail(f"{len(ground.shadow.records)} records are kept, with {save_freq} steps from checkpoint to checkpoint")
        if changes.put and ground.shadow.num_unrecorded > ground.num_places:
            self.fail(f"{ground.shadow.num_unrecorded} groups are alive, and there are {ground.num_places} places")
