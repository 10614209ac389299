"""The TransferQueue: keys with tags and columns, leases for every write, watches instead of polling.

    verbs     store       what everybody calls: check, act, wait for the journal; begin here
              opening     the store of a run: with the journal at a path, and what it kept
    acts      puts        rows, turns, settlings        endings          clear, drop, record, retire, revive
              checks      what a call may be given      encoding         the values of a put, as blocks
    sight     describe    what is held of some keys     watch            who is told of changes
              under_way   the groups of a restart       counts           steps, records, and what is counted
    state     state       all of it at one moment       partition        rows and columns of one partition
              leases      who may write                 ledger           counters, records of steps, turns
              columns     blocks, and copies of them
    journal   journaling  acts as entries, and back     commit_deadline  how long a verb waits for them

Only `store` awaits. Acts are synchronous: they change the state and return the operations that the journal is given.
"""

from asyncrl.transfer_queue.store import TransferQueue
from asyncrl.transfer_queue.under_way import GroupUnderWay, SessionUnderWay
from asyncrl.transfer_queue.watch import Watch

__all__ = ["GroupUnderWay", "SessionUnderWay", "TransferQueue", "Watch"]
