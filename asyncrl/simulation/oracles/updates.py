"""What new weights do to calls in flight: rollout.in_flight_updates, and rule 19."""

from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.faults.ends import SLOW
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle

LATE = "deadline_publish"
"""Incident of a publication that did not wait any longer."""


class InFlight(Oracle):
    """Without in-flight updates a call is of one version, and no publication starves; each, unless a fault has held up a call."""

    name = "in flight"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._is_off = not ground.run.rollout.in_flight_updates

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        versions = sorted({span.version for span in generation.version_spans})
        if self._is_off and len(versions) > 1 and not self.ground.num_incidents(LATE):
            self.fail(f"request {request.request_id} was sampled by versions {versions}, with in_flight_updates = false")

    def turn(self) -> None:
        if self._is_off and self.ground.num_incidents(LATE) and not any(self.ground.hits.get(kind) for kind in SLOW):
            self.fail("a publication waited for its deadline, and no fault held up a call: new calls went before it")
