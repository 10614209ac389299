"""The feed: dataset rows in the order of the run, each as a Prompt with its uid. dataset -> [feed] -> replay's admission.

Owns the order and the cursor, which is the number of prompts handed out so far. Not: when the next one may be taken (admission).

1. The row, epoch and uid of the k-th prompt are pure functions of (seed, k), for the same rows. So a feed that is made with the
   cursor that the journal keeps goes on at the exact row.
2. Within an epoch every row comes exactly once, but for those in quarantine, which are passed over.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from asyncrl.dataset import to_prompt
from asyncrl.errors import ConfigError, GroupsExhaustedError
from asyncrl.ports import Prompt, Rows, World
from asyncrl.world import derive_seed


class Feed:
    """Prompts of `epochs` passes over `dataset` (None: without end), from number `cursor` on.

    seed: with the epoch's number it decides the order when `shuffle` is on; otherwise rows come as they are in the dataset.
    is_left_out: of the position of a row in the dataset: is it in quarantine?
    """

    def __init__(
        self,
        dataset: Rows,
        world: World,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        cursor: int = 0,
        is_left_out: Callable[[int], bool] = lambda row: False,
    ) -> None:
        if cursor < 0:
            raise ConfigError(f"the feed's cursor is {cursor}; it must be 0 or more")
        self._dataset = dataset
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(dataset)
        self._cursor = cursor
        self._is_left_out = is_left_out
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def cursor(self) -> int:
        """Number of prompts handed out or passed over so far: the number of the next one."""
        return self._cursor

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._dataset)

    def take(self, global_steps: int) -> Prompt | None:
        """The next prompt, stamped with the weight version `global_steps`; None when the epochs are over.

        O(1), but for the first one of an epoch (its order: 9 ms for 100,000 rows). Raises GroupsExhaustedError when every row is in
        quarantine.
        """
        for _ in range(self.num_rows):
            if self._end is not None and self._cursor >= self._end:
                return None
            number, position = self._cursor, self._row_at(self._cursor)
            self._cursor += 1
            if not self._is_left_out(position):
                prompt = to_prompt(self._dataset[position], uid=self._world.uid(number), global_steps=global_steps, number=number)
                return replace(prompt, row=position)
        raise GroupsExhaustedError(
            f"all {self.num_rows} rows of data.train_files are in quarantine: none is left to train on; mend what failed, and go "
            "on by --resume with a higher replay.quarantine_after, or 0"
        )

    def _row_at(self, number: int) -> int:
        epoch, position = divmod(number, self.num_rows)
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._seed, epoch, self.num_rows))
        return int(self._order[1][position])


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """int64 [num_rows]: the permutation of an epoch.

    Rows sorted by one 64-bit number each. The numbers are the raw words of a counter-based generator, which numpy promises never
    to change (its `shuffle` and `permutation` may); the sort is stable, so even equal numbers have one order.
    """
    words = np.random.Philox(key=derive_seed("feed", seed, epoch)).random_raw(num_rows)
    return np.argsort(words, kind="stable")
