"""A prompt in the store: the columns and tag of its key, and the way back. So a restart needs no dataset.

Place: feed -> runner -> [prompts] -> TransferQueue, and at a restart TransferQueue -> [prompts] -> recovery -> runner.
"""

from collections.abc import Mapping

from asyncrl.fields import Tag
from asyncrl.ports import GroupStatus, Json, Prompt, not_json

PROMPT_FIELDS = ("raw_prompt", "data_source", "ground_truth", "extra_info", "tools_kwargs", "row_columns")
"""Columns of a prompt's key, to be read for `prompt_of`."""


def prompt_fields(prompt: Prompt) -> dict[str, Json]:
    """Values of the prompt's row. Of `columns`, what JSON cannot carry (a date of a parquet file, say) is left out."""
    columns = {name: value for name, value in prompt.columns.items() if not_json(value) is None}
    values = (prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.tools_kwargs, columns)
    return dict(zip(PROMPT_FIELDS, values, strict=True))


def prompt_tag(prompt: Prompt) -> Tag:
    """Its first tag."""
    return {
        "status": GroupStatus.PENDING,
        "is_prompt": True,
        "global_steps": prompt.global_steps,
        "number": prompt.number,
        "row": prompt.row,
    }


def prompt_of(uid: str, tag: Tag, fields: Mapping[str, Json]) -> Prompt:
    """The prompt again. tag: any of its tags, which keep what the first one had; fields: the values of `PROMPT_FIELDS`."""
    return Prompt(
        uid=uid,
        messages=fields["raw_prompt"],
        data_source=fields["data_source"],
        ground_truth=fields["ground_truth"],
        extra_info=fields["extra_info"],
        tools_kwargs=fields["tools_kwargs"],
        columns=fields["row_columns"],
        global_steps=int(tag["global_steps"]),
        number=int(tag["number"]),
        row=int(tag["row"]),
    )
