"""Leases of what has ended: who held one may not know it.

ghosts -> [Graves] -> the ghosts of the next life
"""

from collections import deque

from asyncrl.keys import SessionLease

REMEMBERED = 32
"""Of a run, the last ones."""


class Graves(deque[SessionLease]):
    """The last leases that sessions of a run held."""

    def __init__(self) -> None:
        super().__init__(maxlen=REMEMBERED)
