"""Oracles: what must hold after every turn of a simulated run, I1 to I12.

store's entries, engines, actor, tasks -> [Oracles] -> Violation
"""

from asyncrl.simulation.oracles.oracles import Oracles

__all__ = ["Oracles"]
