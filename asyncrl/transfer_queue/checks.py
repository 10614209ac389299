"""What a call to the TransferQueue may be given: names, numbers of them, and tags of plain scalars."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from asyncrl.errors import DuplicateKeyError, FieldError, TagCountError, TagValueError
from asyncrl.fields import Tag, TagValue
from asyncrl.transfer_queue.partition import Row

_PACK = msgspec.msgpack.Encoder().encode
_TAG_TYPES = frozenset({bool, int, float, str})
_NAME_TYPES = frozenset({str})


def listed(names: Sequence[str]) -> list[str]:
    """Raises FieldError for a single name, which would be taken for its letters."""
    if isinstance(names, str):
        raise FieldError(f"{names!r} is one name; give a list of names")
    return list(names)


def check_unique(keys: Sequence[str]) -> None:
    """Raises DuplicateKeyError."""
    if len(set(keys)) != len(keys):
        twice = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise DuplicateKeyError(f"key {twice!r} stands twice in one call")


def merged_tags(rows: Mapping[str, Row], keys: Sequence[str], tags: Sequence[Tag], partition_id: str) -> list[Tag]:
    """The tag of each key with what is new in it, none changed in place. Raises TagCountError or TagValueError."""
    if len(tags) != len(keys):
        where = f"none for {keys[len(tags)]!r}" if len(tags) < len(keys) else f"the last key is {keys[-1]!r}"
        raise TagCountError(f"{len(tags)} tags for {len(keys)} keys of partition {partition_id!r}: {where}")
    checked = map(_checked, keys, tags)
    return [MappingProxyType({**rows[key].tag, **new} if key in rows else new) for key, new in zip(keys, checked, strict=True)]


def _checked(key: str, tag: Tag) -> dict[str, TagValue]:
    """Plain scalars under plain names; a StrEnum or IntEnum becomes the value it stands for."""
    plain = dict(tag)
    if not (_TAG_TYPES.issuperset(map(type, plain.values())) and _NAME_TYPES.issuperset(map(type, plain))):
        plain = {
            name: value if type(value) in _TAG_TYPES and type(name) is str else _plain(key, name, value)
            for name, value in tag.items()
        }
    try:
        _PACK(plain)
    except (OverflowError, UnicodeEncodeError) as error:
        raise TagValueError(f"the tag of key {key!r} cannot be kept: {error}; allowed: 64-bit integers, text in UTF-8") from error
    return plain


def _plain(key: str, name: str, value: TagValue) -> TagValue:
    if isinstance(name, str):
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
    raise TagValueError(f"tag entry {name!r} of key {key!r} is {type(value).__name__} {value!r}; allowed: bool, int, float, str")
