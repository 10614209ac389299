"""What a simulation can find. Not errors of the user: each is a broken promise, told with what broke it."""


class SimulationError(Exception):
    """Base of what ends a simulated run as a failure."""


class DeadlockError(SimulationError):
    """Nothing is left that could wake anybody up."""


class EndlessError(SimulationError):
    """The loop turns and turns, or virtual time passes, without an end."""


class OutsideError(SimulationError):
    """Something left the loop: a thread, a socket, a real sleep."""


class UnseenError(SimulationError):
    """Something failed and nobody looked at it: asyncio would only have logged it. Its cause is that failure, if it had one."""


class Violation(SimulationError):
    """An oracle does not hold. `invariant`: its name, such as `I4`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class InjectedError(Exception):
    """A fault that the simulator has thrown in. Whoever ends with it, or because of it, did nothing wrong."""


class Crash(BaseException):
    """The controller's process ends here, at once: no `finally` of it has any effect on what survives."""
