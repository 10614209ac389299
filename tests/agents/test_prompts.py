"""A prompt in the store is all of it: a restart needs no dataset."""

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.prompts import PROMPT_FIELDS, prompt_fields, prompt_tag
from asyncrl.fields import CATALOGUE, TAGS
from asyncrl.journal.model import MemoryJournal
from asyncrl.keys import TRAIN, GroupLease
from asyncrl.ports import Prompt
from asyncrl.recovery import open_groups
from asyncrl.transfer_queue import TransferQueue

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3)


@settings(max_examples=20, deadline=None)
@given(
    truth=JSON,
    info=OBJECTS,
    kwargs=OBJECTS,
    columns=OBJECTS,
    version=st.integers(0, 9),
    number=st.integers(0, 99),
    row=st.integers(-1, 9),
)
def test_a_prompt_comes_back_from_the_store_as_it_was(
    truth: Any, info: Any, kwargs: Any, columns: Any, version: int, number: int, row: int
) -> None:
    before = Prompt(
        uid="a1",
        messages=[{"role": "user", "content": "?"}],
        data_source="test",
        ground_truth=truth,
        extra_info=info,
        tools_kwargs=kwargs,
        columns=columns,
        global_steps=version,
        number=number,
        row=row,
    )

    async def through_the_store() -> Prompt:
        journal = MemoryJournal()
        async with TransferQueue(journal) as queue:
            lease = GroupLease(uid="a1")
            await queue.admit(lease, partition_id=TRAIN, cursor=number + 1, tag=prompt_tag(before), fields=prompt_fields(before))
            (found,) = await open_groups(queue)
            return found.prompt

    assert asyncio.run(through_the_store()) == before


def test_of_a_row_what_is_no_json_is_left_out_of_its_other_columns(prompt: Prompt) -> None:
    odd = replace(prompt, columns={"good": [1], "date": object(), "bytes": [{"a": b"x"}], "huge": 2**64, "names": {1: 2}})
    assert prompt_fields(odd)["row_columns"] == {"good": [1]}


def test_columns_and_tags_of_a_prompt_are_in_the_catalogue(prompt: Prompt) -> None:
    assert set(PROMPT_FIELDS) <= set(CATALOGUE)
    assert set(prompt_tag(prompt)) <= {name for name, tag in TAGS.items() if tag.on in ("prompt", "both")}
