"""What the ranks of these tests serve; imported in the ranks alone."""

import os
import signal
import threading

import torch
import torch.distributed as dist

from asyncrl.cluster import Placed, Rank, beat


class Served:
    def __init__(self, rank: Rank, payload: object) -> None:
        self.rank = rank
        self.payload = payload

    def echo(self, *args: object, **kwargs: object) -> object:
        return self.rank.rank, self.rank.world, self.payload, args, kwargs

    def total(self) -> float:
        beat("total: summing")
        value = torch.tensor([float(self.rank.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    def double(self, placed: Placed) -> None:
        tensors = self.rank.arena.open(placed)
        own = slice(self.rank.rank, None, self.rank.world)
        tensors["doubled"][own] = tensors["column"][own] * 2

    def die(self, which: int, number: int = signal.SIGKILL) -> None:
        if self.rank.rank == which:
            os.kill(os.getpid(), number)
        dist.barrier()

    def wait(self) -> None:
        threading.Event().wait()


def serve(rank: Rank, payload: object) -> Served:
    return Served(rank, payload)
