"""`asyncrl inspect`: the numbers of a run's journal, while it is written and afterwards."""

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl import cli
from asyncrl.errors import JournalDamagedError, RunFolderError
from asyncrl.journal.entries import (
    Entry,
    Header,
    LeaseEntry,
    PutCounters,
    PutLeases,
    PutRecord,
    PutRows,
    PutTurn,
    RemoveRows,
    RowEntry,
    StepRecord,
)
from asyncrl.journal.sqlite import SqliteJournal, open_journal
from asyncrl.journal.summary import FieldSummary, summarize

OpenJournal = Callable[..., SqliteJournal]


def prompt(row_id: int, status: str, partition_id: str = "train") -> RowEntry:
    uid = f"p{row_id}"
    return RowEntry(
        row_id=row_id,
        partition_id=partition_id,
        key=uid,
        uid=uid,
        session_id=None,
        attempt=0,
        incarnation=0,
        tag={"is_prompt": True, "status": status},
    )


def lease(uid: str, session_id: int | None, *, is_open: bool = True) -> LeaseEntry:
    return LeaseEntry(uid=uid, session_id=session_id, attempt=0, incarnation=0, is_open=is_open)


def history(make: SimpleNamespace) -> list[Entry]:
    turn = {"responses": (Header(kind="ragged", dtype="int64"), memoryview(bytes(80)))}
    retired = StepRecord(step=2, partition_id="train", uids=("p1",), keys=("u3_0_0",), row_ids=(1, 3), tries=0)
    recorded = StepRecord(step=3, partition_id="train", uids=("p2",), keys=("u4_0_0",), row_ids=(2, 4), tries=2)
    return [
        [PutRows([prompt(1, "finished"), prompt(2, "finished"), prompt(9, "running"), prompt(10, "[pending]", "val")])],
        make.whole(3, bytes(100)),
        make.whole(4, bytes(50)),
        make.whole(5, bytes(7)),
        [PutLeases([lease("p9", None), lease("p9", 0), lease("p9", 1, is_open=False)])],
        [PutTurn("p9", 0, 0, turn)],
        [PutTurn("p9", 0, 1, turn)],
        [PutRecord(retired), PutRecord(recorded)],
        [PutCounters({"cursor": 7, "admitted": 6, "dropped/no_signal": 1, "purged_step": 1, "purged_groups": 2})],
        [PutCounters({"evaluated": 2, "failed_row/7": 1, "failed_row/30": 2})],
        [RemoveRows([5])],
    ]


def check(folder: Path) -> None:
    found = summarize(folder)
    train, val = found.partitions["train"], found.partitions["val"]
    assert train.groups == {"finished": 1, "retired": 1, "running": 1}
    assert (train.keys, train.retired_keys) == (5, 2)
    assert train.fields == {"responses": FieldSummary(values=2, bytes=150)}
    assert (val.groups, val.fields) == ({"[pending]": 1}, {})
    assert (found.open_groups, found.open_sessions) == (1, 1)
    assert (found.half_done_sessions, found.turns) == (1, 2)
    assert (found.recorded, found.retired, found.purged_step, found.tries) == ([3], [2], 1, {3: 2})
    assert (found.cursor, found.admitted, found.trained, found.dropped, found.open) == (7, 6, 3, {"no_signal": 1}, 2)
    assert (found.incarnation, found.sync) == (0, "full")
    assert (found.evaluated, found.failed_rows) == (2, {7: 1, 30: 2})


def test_the_numbers_are_the_same_beside_the_writer_and_afterwards(
    open_one: OpenJournal, make: SimpleNamespace, path: Path
) -> None:
    journal = open_one(sync="full")
    asyncio.run(make.write(journal, history(make)))
    check(path.parent)
    journal.close()
    check(path.parent)
    assert summarize(path.parent).files["journal.db"] == path.stat().st_size


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["asyncrl", "inspect", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert isinstance(exited.value.code, int)
    return exited.value.code, *capsys.readouterr()


def test_the_command_prints_a_table_or_json(
    open_one: OpenJournal, make: SimpleNamespace, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = open_one()
    asyncio.run(make.write(journal, history(make)))
    code, out, err = run(monkeypatch, capsys, str(path.parent))
    assert (code, err) == (0, "")
    assert "6 admitted = 3 trained + 1 dropped (1 no_signal) + 2 open" in out
    assert "val: 1 [pending]" in out
    assert "recorded 3 (step 3 begun 2 times), retired 2, purged up to 1" in out
    assert "up to version 2" in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    code, out, _ = run(monkeypatch, capsys, str(path.parent), "--json")
    assert json.loads(out)["partitions"]["train"]["fields"] == {"responses": {"values": 2, "bytes": 150}}


def test_a_folder_without_a_journal_is_one_line_that_says_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    open_journal(mine / "journal.db").close()
    (other / "metrics.jsonl").touch()
    code, out, err = run(monkeypatch, capsys, str(other))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {other} has no journal.db")
    assert err.endswith("there is: metrics.jsonl\n")
    with pytest.raises(RunFolderError, match=r"min does not exist; with a journal\.db in .*: mine; did you mean mine\?$"):
        summarize(tmp_path / "min")


def test_a_journal_without_its_meta_is_damaged(open_one: OpenJournal, path: Path) -> None:
    open_one().close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM meta WHERE name = 'asyncrl'")
    with pytest.raises(JournalDamagedError, match=r"its meta lacks 'asyncrl'; start a new run"):
        summarize(path.parent)
    with pytest.raises(JournalDamagedError, match=r"its meta lacks 'asyncrl'"):
        open_one()


def test_a_file_that_is_no_journal_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(b"x" * 5000)
    code, _, err = run(monkeypatch, capsys, str(path.parent))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
