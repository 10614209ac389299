"""RLHFDataset: the rows of a run, all checked when it is made, before the first step."""

import hashlib
import json
from collections.abc import Callable, Sequence

from asyncrl.config import DataConfig
from asyncrl.dataset.mapping import map_ground_truth, map_prompt
from asyncrl.dataset.messages import check_messages, refuse_media
from asyncrl.dataset.readers import SourceRow, gc_paused, read_table
from asyncrl.errors import DataError
from asyncrl.ports import Json, Messages, Prompt, copied, not_json
from asyncrl.wording import kind_of, named_message_of, names_shown, shown

Row = dict[str, Json]

_PROMPT_FIELDS = ("raw_prompt", "data_source", "extra_info", "tools_kwargs")
"""Columns that have a field of their own in `Prompt`."""


class RLHFDataset:
    """A sequence of rows, each a dict:

    raw_prompt          message list, from `config.mapping`, else the column `config.prompt_key`, else the column `raw_prompt`
    data_source         text, from `config.mapping`, else its column, else the file's name without extension
    reward_model        object; `ground_truth` in it from `config.mapping`, else the row's own, else None
    extra_info          object, empty when the row has none
    index               extra_info.index, else the column, else the row's number over all files, from 0 (filtering changes it not)
    tools_kwargs        objects: extra_info's, else the column's, else empty
    interaction_kwargs
    ...                 every other column as the file has it (null in a column of these names counts as absent)

    files, key, max_rows: see `read_table`. Raises DataError with one line naming file, row and key.
    The rows belong to the dataset: read them, do not change them (`to_prompt` copies).
    """

    def __init__(self, files: Sequence[str], config: DataConfig, *, key: str = "data.train_files", max_rows: int = 0) -> None:
        self.key = key
        with gc_paused():
            sources = read_table(files, key=key, max_rows=max_rows)
            self._places = [source.place for source in sources]
            self._rows = [_make_row(source, number, config) for number, source in enumerate(sources)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Row:
        return self._rows[position]

    def where(self, position: int) -> str:
        """The place of a row for messages: "file, line 3" or "file, row 3"."""
        return self._places[position]

    @property
    def digest(self) -> str:
        """16 hex digits over every row's prompt and right answer, in order. 0.5 s for 100,000 rows."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps([row["raw_prompt"], row["reward_model"]], default=str).encode())
        return digest.hexdigest()

    def filter_overlong(self, measure: Callable[[Messages], int], max_prompt_length: int, drop: bool = True) -> list[str]:
        """Take out the rows whose prompt has more than `max_prompt_length` tokens; returns their places, in order.

        measure: tokens of a message list as the model will see it, chat template and tool schemas included.
        Raises DataError naming file and row when `measure` raises, or when `drop` is False and a prompt is too long; and when no
        row is left. Then nothing has been dropped.
        """
        lengths = [self._measure(measure, position) for position in range(len(self))]
        long = [position for position, length in enumerate(lengths) if length > max_prompt_length]
        limit = f"data.max_prompt_length = {max_prompt_length}"
        if long and not drop:
            raise DataError(
                f"{self.where(long[0])}: the prompt has {lengths[long[0]]} tokens, more than {limit} ({len(long)} rows are longer);"
                " raise it, or set data.filter_overlong_prompts = true to drop them"
            )
        if len(long) == len(self):
            shortest = lengths.index(min(lengths))
            raise DataError(
                f"{self.key}: all {len(self)} prompts are longer than {limit} tokens"
                f" (the shortest has {lengths[shortest]}: {self.where(shortest)})"
            )
        dropped = [self._places[position] for position in long]
        self._drop(frozenset(long))
        return dropped

    def _drop(self, positions: frozenset[int]) -> None:
        kept = [position for position in range(len(self)) if position not in positions]
        self._places = [self._places[position] for position in kept]
        self._rows = [self._rows[position] for position in kept]

    def _measure(self, measure: Callable[[Messages], int], position: int) -> int:
        try:
            return measure(self._rows[position]["raw_prompt"])
        except Exception as error:  # a chat template is code from outside and may raise anything
            raise DataError(f"{self.where(position)}: the prompt cannot be rendered: {named_message_of(error)}") from error


def to_prompt(row: Row, *, uid: str, global_steps: int, number: int = 0) -> Prompt:
    """A row on its way to its sessions. It owns its values, so what a session does to them is not seen in the next epoch.

    `columns` has everything without a field of its own, `index`, `interaction_kwargs` and the whole `reward_model` included.
    """
    own = copied(row)
    return Prompt(
        uid=uid,
        messages=own["raw_prompt"],
        data_source=own["data_source"],
        ground_truth=own["reward_model"].get("ground_truth"),
        extra_info=own["extra_info"],
        tools_kwargs=own["tools_kwargs"],
        columns={name: value for name, value in own.items() if name not in _PROMPT_FIELDS},
        global_steps=global_steps,
        number=number,
    )


# --- one row ----------------------------------------------------------------------------------------------------------------------


def _make_row(source: SourceRow, number: int, config: DataConfig) -> Row:
    refuse_media(source.values, place=source.place)
    row = dict(source.values)
    row["raw_prompt"] = _take_prompt(row, source, config)
    row["data_source"] = _data_source(source, config)
    row["reward_model"] = _reward_model(source, config)
    row["extra_info"] = info = _object(row, "extra_info", f"{source.place}: ")
    row["index"] = next((value for value in (info.get("index"), row.get("index")) if value is not None), number)
    for name in ("tools_kwargs", "interaction_kwargs"):
        row[name] = _object(info, name, f"{source.place}: extra_info.") or _object(row, name, f"{source.place}: ")
    _refuse_unkept(row, source.place)
    return row


def _refuse_unkept(row: Row, place: str) -> None:
    """What sessions and rewards read is kept in the journal, as JSON: a restart must find it as it was."""
    read = [("ground_truth", row["reward_model"]["ground_truth"]), *((name, row[name]) for name in ("extra_info", "tools_kwargs"))]
    for name, whole in read:
        if (found := not_json(whole, name)) is not None:
            part, value = found
            raise DataError(f"{place}: {part} is {kind_of(value)} ({shown(value)}); turn it into a text or a number that JSON has")


def _take_prompt(row: Row, source: SourceRow, config: DataConfig) -> Messages:
    """The message list; its column leaves the row, since `raw_prompt` holds it."""
    if config.mapping.prompt:
        return check_messages(map_prompt(config.mapping, source), place=source.place, key="data.mapping.prompt")
    key = config.prompt_key if config.prompt_key in row else "raw_prompt"
    if key not in row:
        raise DataError(
            f"{source.place}: no column {config.prompt_key!r} (data.prompt_key); columns: {names_shown(row)};"
            ' for a plain table set data.mapping.prompt, such as "{question}"'
        )
    return check_messages(row.pop(key), place=source.place, key=key)


def _data_source(source: SourceRow, config: DataConfig) -> str:
    value = config.mapping.data_source or source.values.get("data_source")
    if value is None:
        return source.file.stem
    if not isinstance(value, str):
        raise DataError(f"{source.place}: data_source must be a text, got {kind_of(value)}")
    return value


def _reward_model(source: SourceRow, config: DataConfig) -> dict[str, Json]:
    given = _object(source.values, "reward_model", f"{source.place}: ")
    return {**given, "ground_truth": map_ground_truth(config.mapping, source, given.get("ground_truth"))}


def _object(values: dict[str, Json], name: str, prefix: str) -> dict[str, Json]:
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{prefix}{name} must be an object, got {kind_of(value)}")
    return value
