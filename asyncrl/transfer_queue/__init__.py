"""The TransferQueue: keys with tags and columns, leases for every write, watches instead of polling. Kept in memory."""

from asyncrl.transfer_queue.store import TransferQueue
from asyncrl.transfer_queue.watch import Watch

__all__ = ["TransferQueue", "Watch"]
