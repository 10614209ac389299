"""Rank processes on this machine: start N of them, call all alike, name the one that dies or hangs. Knows nothing of models.

assembly -> training.ranks -> [cluster: RankGroup | rank_main] -> training.rank -> learners

1. Every rank is asked the same thing in the same order; a call ends with the replies of all ranks, or with one error.
2. Every wait has an end: a dead rank is seen at once, a silent group after `timeout_s` without a sign of life of any rank.
3. A group that is out of step is dead: it is killed whole, and every later call says so.
4. Nothing outlives the controller: neither a process nor a byte of shared memory, also after kill -9 (shared memory has no name).
"""

from asyncrl.cluster.arena import Arena, Placed, RankArena
from asyncrl.cluster.beats import beat
from asyncrl.cluster.fork_server import ForkServer
from asyncrl.cluster.rank_group import RankGroup
from asyncrl.cluster.rank_main import Rank

__all__ = ["RankGroup", "Rank", "beat", "Arena", "Placed", "RankArena", "ForkServer"]
