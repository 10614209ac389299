"""KVBatchMeta: keys and tags of a batch."""

import pytest

from asyncrl.errors import DuplicateKeyError, KeyFormatError, TagCountError
from asyncrl.protocol.batch_meta import KVBatchMeta


def _meta(*keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=keys, tags=tuple({"seq_len": number} for number in range(len(keys))))


def test_uids_are_read_from_the_keys() -> None:
    assert _meta("a_0_0", "b_c_1_2").uids == ("a", "b_c")
    with pytest.raises(KeyFormatError, match="'a'"):
        _ = _meta("a").uids


def test_select_keeps_keys_and_tags_together() -> None:
    chosen = _meta("a_0_0", "a_1_0", "b_0_0").select([2, 0])
    assert chosen.keys == ("b_0_0", "a_0_0")
    assert chosen.tags == ({"seq_len": 2}, {"seq_len": 0})
    assert chosen.partition_id == "train"
    assert len(chosen) == 2


def test_a_key_stands_once() -> None:
    with pytest.raises(DuplicateKeyError, match="'a_0_0' stands twice"):
        _meta("a_0_0", "b_0_0", "a_0_0")
    with pytest.raises(DuplicateKeyError):
        _meta("a_0_0").select([0, 0])


def test_every_key_has_a_tag() -> None:
    with pytest.raises(TagCountError, match="2 keys but 1 tags"):
        KVBatchMeta(partition_id="train", keys=("a_0_0", "b_0_0"), tags=({},))
