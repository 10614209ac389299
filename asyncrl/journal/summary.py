"""What a run's journal holds, in numbers: read beside the running process, or from what it left behind. No torch.

run folder / journal.db -> [summary] -> `asyncrl inspect`
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from asyncrl.journal.entries import counted_by
from asyncrl.journal.opening import side_file
from asyncrl.journal.reading import Reader, open_reader
from asyncrl.journal.tables import NAME_BITS
from asyncrl.observe.run_folder import RunFolder, existing_file
from asyncrl.observe.text_tables import as_text

RETIRED = "retired"
"""Instead of the status of a group whose step is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSummary:
    """Values of one field in a partition, and their bytes."""

    values: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSummary:
    """`groups`: status in the prompt's tag, or `retired` -> number. `keys`: all, prompts included; `retired_keys` among them."""

    groups: dict[str, int]
    keys: int
    retired_keys: int
    fields: dict[str, FieldSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that `asyncrl inspect` shows.

    incarnation: how often the journal had been opened before, as in leases and in the trace. open_groups, open_sessions: leases.
    turns: of sessions that have not settled. recorded, retired: steps that were begun and not done since, and steps that were done;
    a restart from older weights does these once more. tries: step -> how often it was begun, of the recorded ones. trained: groups
    of retired and purged steps; open = admitted - dropped - trained. cursor: prompts that the feed handed out. evaluated: the
    newest version with a result, -1: none has one. failed_rows: dataset row -> groups of it that failed.
    """

    path: str
    files: dict[str, int]
    asyncrl: str
    incarnation: int
    sync: str
    partitions: dict[str, PartitionSummary]
    open_groups: int
    open_sessions: int
    half_done_sessions: int
    turns: int
    recorded: list[int]
    retired: list[int]
    tries: dict[int, int]
    purged_step: int
    cursor: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    open: int
    evaluated: int
    failed_rows: dict[int, int]


def summarize(folder: Path) -> Summary:
    """Raises RunFolderError for a folder that holds no journal, JournalError for one that cannot be read."""
    path = existing_file(folder, RunFolder(path=folder).journal.name, "its run had store.journal = false, or was no training")
    files = {file.name: file.stat().st_size for file in (path, side_file(path, "-wal")) if file.exists()}
    with open_reader(path) as reader:
        return _summary(reader, path, files)


def _summary(reader: Reader, path: Path, files: dict[str, int]) -> Summary:
    records = reader.guarded("step records", reader.read_records)
    counters = reader.read_counters()
    leases = reader.guarded("leases", reader.read_leases)
    retired = [record for record in records.values() if not record.tries]
    begun = [record for record in records.values() if record.tries]
    dropped = counted_by(counters, "dropped")
    trained = counters.get("purged_groups", 0) + sum(len(record.uids) for record in retired)
    is_open = [lease.session_id for lease in leases.values() if lease.is_open]
    [(half_done, turns)] = reader.query("turns", "SELECT COUNT(DISTINCT uid || '_' || session_id), COUNT(*) FROM turn")
    return Summary(
        path=str(path),
        files=files,
        asyncrl=str(reader.meta["asyncrl"]),
        incarnation=max(0, reader.incarnation - 1),
        sync=str(reader.meta.get("sync", "")),
        partitions=_partitions(reader, {row_id for record in retired for row_id in record.row_ids}),
        open_groups=is_open.count(None),
        open_sessions=len(is_open) - is_open.count(None),
        half_done_sessions=half_done,
        turns=turns,
        recorded=[record.step for record in begun],
        retired=[record.step for record in retired],
        tries={record.step: record.tries for record in begun},
        purged_step=counters.get("purged_step", 0),
        cursor=counters.get("cursor", 0),
        admitted=counters.get("admitted", 0),
        trained=trained,
        dropped=dropped,
        open=counters.get("admitted", 0) - sum(dropped.values()) - trained,
        evaluated=counters.get("evaluated", -1),
        failed_rows={int(row): number for row, number in counted_by(counters, "failed_row").items()},
    )


def _partitions(reader: Reader, retired: set[int]) -> dict[str, PartitionSummary]:
    keys: Counter[str] = Counter()
    retired_keys: Counter[str] = Counter()
    groups: dict[str, Counter[str]] = {}
    for row_id, partition_id, session_id, tag in reader.query("rows", "SELECT id, partition_id, session_id, tag FROM row"):
        if row_id in reader.removed:
            continue
        keys[partition_id] += 1
        retired_keys[partition_id] += row_id in retired
        if session_id is None:
            groups.setdefault(partition_id, Counter())[RETIRED if row_id in retired else _status(reader, tag)] += 1
    sizes = _sizes(reader)
    return {
        partition_id: PartitionSummary(
            groups=dict(sorted(groups.get(partition_id, {}).items())),
            keys=keys[partition_id],
            retired_keys=retired_keys[partition_id],
            fields=dict(sorted(sizes.get(partition_id, {}).items())),
        )
        for partition_id in sorted(keys)
    }


def _status(reader: Reader, tag: bytes) -> str:
    return str(reader.guarded("tags", lambda: msgspec.msgpack.decode(tag)).get("status", "-"))


def _sizes(reader: Reader) -> dict[str, dict[str, FieldSummary]]:
    """Partition -> field -> how much. SQLite knows a value's length without reading it."""
    removed = [(row_id,) for row_id in reader.removed]
    reader.connection.execute("CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY)")
    reader.connection.executemany("INSERT INTO gone VALUES (?)", removed)
    lines = reader.query(
        "values",
        f"""
        SELECT row.partition_id, cell.id & {(1 << NAME_BITS) - 1} AS name, COUNT(*), SUM(LENGTH(cell.data))
        FROM row JOIN cell ON cell.id >= row.id << {NAME_BITS} AND cell.id < (row.id + 1) << {NAME_BITS}
        WHERE row.id NOT IN (SELECT id FROM gone) GROUP BY row.partition_id, name
        """,
    )
    found: dict[str, dict[str, FieldSummary]] = {}
    for partition_id, name, values, size in lines:
        found.setdefault(partition_id, {})[reader.names.get(name, "?")] = FieldSummary(values=values, bytes=size)
    return found


# --- shown ------------------------------------------------------------------------------------------------------------------------


def render(summary: Summary, *, width: int | None = None) -> str:
    """Two tables: groups and counts, then keys and bytes of each partition. width: of the terminal, or None."""
    return as_text([summary.path, _about(summary), "", _fields(summary)], width)


def _about(summary: Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    dropped = _counted(summary.dropped)
    groups = [f"{partition_id}: {_counted(found.groups) or 'none'}" for partition_id, found in summary.partitions.items()]
    lines = (
        ("files", ", ".join(f"{name} {_size(size)}" for name, size in summary.files.items())),
        ("written by", f"asyncrl {summary.asyncrl}, incarnation {summary.incarnation}, sync {summary.sync}"),
        ("groups", "; ".join(groups) or "none"),
        ("conservation", f"{summary.admitted} admitted = {summary.trained} trained + {sum(summary.dropped.values())} dropped"
         f"{f' ({dropped})' if dropped else ''} + {summary.open} open"),
        ("feed", f"{summary.cursor} prompts handed out"),
        ("steps", f"recorded {_steps(summary.recorded)}{_tries(summary)}, retired {_steps(summary.retired)}, purged up to"
         f" {summary.purged_step}"),
        ("evaluated", f"up to version {summary.evaluated}" if summary.evaluated >= 0 else "nothing"),
        ("open leases", f"{summary.open_groups} groups, {summary.open_sessions} sessions"),
        ("turns kept", f"{summary.turns} of {summary.half_done_sessions} half-done sessions"),
    )  # fmt: skip
    for line in lines:
        table.add_row(*line)
    return table


def _fields(summary: Summary) -> Table:
    table = Table("partition", "field", box=None, pad_edge=False)
    for name in ("values", "bytes"):
        table.add_column(name, justify="right")
    for partition_id, found in summary.partitions.items():
        retired = f" ({found.retired_keys} retired)" if found.retired_keys else ""
        table.add_row(partition_id, "", f"{found.keys} keys{retired}", _size(sum(entry.bytes for entry in found.fields.values())))
        for name, entry in found.fields.items():
            table.add_row("", name, str(entry.values), _size(entry.bytes))
    return table


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers.items())


def _tries(summary: Summary) -> str:
    """A step that was begun more than once stands out."""
    told = [f"step {step} begun {tries} times" for step, tries in summary.tries.items() if tries > 1]
    return f" ({', '.join(told)})" if told else ""


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}..{steps[-1]}"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
