"""KVBatchMeta: what the controller holds of a batch. Keys and tags, never the payload.

feed -> agents -> replay -> [KVBatchMeta] -> stages -> retire
"""

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.errors import DuplicateKeyError, TagCountError
from asyncrl.fields import Tag
from asyncrl.keys import TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBatchMeta:
    """Keys of a batch in order, and their tags. Immutable: a reorder makes a new one, and changes no key or tag.

    Raises DuplicateKeyError or TagCountError on construction.
    """

    partition_id: str
    keys: tuple[str, ...]
    tags: tuple[Tag, ...]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise TagCountError(f"{len(self.keys)} keys but {len(self.tags)} tags in a batch of partition {self.partition_id!r}")
        if len(set(self.keys)) != len(self.keys):
            twice = next(key for position, key in enumerate(self.keys) if key in self.keys[:position])
            raise DuplicateKeyError(f"key {twice!r} stands twice in a batch of partition {self.partition_id!r}")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def uids(self) -> tuple[str, ...]:
        """uid of each key."""
        return tuple(TrajectoryKey.parse(key).uid for key in self.keys)

    @property
    def padding(self) -> tuple[bool, ...]:
        """True for each row that only fills a mesh (`protocol/padding.py`)."""
        return tuple(bool(tag.get("is_padding", False)) for tag in self.tags)

    @property
    def groups(self) -> tuple[str | None, ...]:
        """uid of each key, None for a padding row: it is a member of no group."""
        return tuple(None if fills else uid for uid, fills in zip(self.uids, self.padding, strict=True))

    @property
    def sessions(self) -> tuple[str | None, ...]:
        """uid_session of each key, None for a padding row."""
        return tuple(None if fills else key.rpartition("_")[0] for key, fills in zip(self.keys, self.padding, strict=True))

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of its trajectories. Raises KeyError when a tag has no seq_len."""
        return sum(int(tag["seq_len"]) for tag, fills in zip(self.tags, self.padding, strict=True) if not fills)

    def without_padding(self) -> "KVBatchMeta":
        """The trajectories alone: what the store holds, and what counts."""
        padding = self.padding
        return self.select(row for row, fills in enumerate(padding) if not fills) if any(padding) else self

    def select(self, positions: Iterable[int]) -> "KVBatchMeta":
        """The rows at `positions`, in that order."""
        chosen = tuple(positions)
        return KVBatchMeta(
            partition_id=self.partition_id,
            keys=tuple(self.keys[position] for position in chosen),
            tags=tuple(self.tags[position] for position in chosen),
        )
