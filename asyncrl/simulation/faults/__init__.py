"""Faults by seed and rate: what goes wrong at the edges, at any await, and with the whole process; and which ends they explain."""

from asyncrl.simulation.faults.kinds import ALL, FaultKind, ResumeFault
from asyncrl.simulation.faults.plan import FaultPlan, armed_kinds

__all__ = ["ALL", "FaultKind", "FaultPlan", "ResumeFault", "armed_kinds"]
