"""What the ranks of these tests serve; imported in the ranks alone."""

import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncrl.cluster import Placed, Rank, beat
from asyncrl.errors import AlgorithmError, ConfigError, ModelError


class TwoArguments(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class OddConfigError(ConfigError):
    """Ours, and cannot be made again."""

    def __init__(self, *, key: str) -> None:
        super().__init__(f"key {key} is wrong")


class Unpicklable(Exception):
    """Holds what no process border lets through."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BadWords(Exception):
    """Its message raises."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _algorithm_error() -> AlgorithmError:
    error = AlgorithmError("the loss raised")
    error.has_learned = True
    error.add_note("a note")
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "two": lambda: TwoArguments("left", 3),
    "odd": lambda: OddConfigError(key="a.b"),
    "unpicklable": Unpicklable,
    "words": BadWords,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "algorithm": _algorithm_error,
    "memory": lambda: MemoryError("no memory"),
    "here": lambda: type("Here", (ValueError,), {})("of the rank alone"),
    "group": lambda: ExceptionGroup("two", [ValueError("a"), TwoArguments("b", 1)]),
}


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

    def threads(self) -> int:
        return torch.get_num_threads()

    def address(self) -> str:
        return os.environ["GLOO_SOCKET_IFNAME"]

    def mapped(self) -> list[str]:
        with open("/proc/self/maps", encoding="utf-8") as file:
            return [line for line in file if "/dev/shm/" in line]

    def double(self, placed: Placed) -> None:
        tensors = self.rank.arena.open(placed)
        own = slice(self.rank.rank, None, self.rank.world)
        tensors["doubled"][own] = tensors["column"][own] * 2

    def checksum(self, placed: Placed) -> float:
        return float(sum(tensor.double().sum() for tensor in self.rank.arena.open(placed).values()))

    def raise_all(self, kind: str) -> None:
        raise ERRORS[kind]()

    def raise_apart(self) -> None:
        raise ValueError(f"rank {self.rank.rank} is unhappy")

    def raise_one(self, which: int, kind: str = "algorithm", *, collective: bool = False) -> None:
        if self.rank.rank == which:
            raise ERRORS[kind]()
        if collective:
            dist.barrier()

    def lock(self) -> object:
        return threading.Lock()

    def signal_in_compute(self, which: int, number: int) -> None:
        """The one gets a signal while it computes; the others wait for it in a collective."""
        if self.rank.rank == which:
            beat("signal_in_compute: computing")
            os.kill(os.getpid(), number)
        dist.barrier()

    def signal_in_collective(self, which: int, number: int) -> None:
        """The one gets it in a collective which the others have not joined; they do so afterwards."""
        if self.rank.rank == which:
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            dist.barrier()
        threading.Event().wait(0.5)
        dist.barrier()

    def exit(self, which: int, code: int) -> None:
        if self.rank.rank == which:
            os._exit(code)
        dist.barrier()

    def wait(self) -> None:
        threading.Event().wait()

    def work_on(self, which: int) -> None:
        """The one shows signs of life for three seconds; the others wait for it."""
        for number in range(10 if self.rank.rank == which else 0):
            beat(f"work_on: piece {number}")
            threading.Event().wait(0.3)
        dist.barrier()

    def fall_behind(self, which: int) -> None:
        """The one beats less often than the others, and does not come back."""
        for _ in range(1 if self.rank.rank == which else 3):
            beat("fall_behind: a piece of work")
        if self.rank.rank == which:
            threading.Event().wait()
        dist.barrier()

    def say(self, text: str) -> None:
        sys.stdout.write(text)


def serve(rank: Rank, payload: object) -> Served:
    return Served(rank, payload)


def refuse_config(rank: Rank, payload: object) -> Served:
    raise ConfigError(f"key {payload} is wrong")


def refuse_on_one(rank: Rank, payload: object) -> Served:
    if rank.rank == 1:
        raise ModelError("the model folder of rank 1 is empty")
    dist.barrier()
    return Served(rank, payload)


def die(rank: Rank, payload: object) -> Served:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return Served(rank, payload)


def stop(rank: Rank, payload: object) -> Served:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return Served(rank, payload)
