"""trace.jsonl: whole records come back as they were, torn ones are passed over, and the last of a step counts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import DataError
from asyncrl.observe.trace_file import Record, TraceFile, TraceLog

Make = Callable[..., Record]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def steps_of(file: TraceFile) -> list[int]:
    return [head.step for head in file.heads]


def test_records_come_back_as_they_were(path: Path, make_record: Make) -> None:
    records = [make_record(1, "a"), make_record(2), make_record(3, "b", "c")]
    log = TraceLog(path)
    for record in records:
        log.append(record)
    file = TraceFile(path)
    assert [file.read(step) for step in steps_of(file)] == records


def test_of_two_records_of_a_step_the_last_counts(path: Path, make_record: Make) -> None:
    log = TraceLog(path)
    for record in (make_record(1, "a"), make_record(2, "b"), make_record(1, "a", version=7)):
        log.append(record)
    file = TraceFile(path)
    assert [(head.step, head.version) for head in file.heads] == [(1, 7), (2, 1)]
    assert file.read(1) == make_record(1, "a", version=7)


def test_wherever_a_write_was_torn_the_records_before_it_are_read(path: Path, make_record: Make) -> None:
    whole = tuple(make_record(step, "a") for step in (1, 2))
    for record in whole:
        TraceLog(path).append(record)
    content = path.read_bytes()
    first = len(content) // 2
    for end in range(first, len(content), 7):
        path.write_bytes(content[:end])
        assert steps_of(TraceFile(path)) == [1]
    assert TraceFile(path).read(1) == whole[0]


def test_a_run_that_goes_on_after_a_torn_write_is_read(path: Path, make_record: Make) -> None:
    TraceLog(path).append(make_record(1, "a"))
    TraceLog(path).append(make_record(2, "b"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 40])
    TraceLog(path).append(make_record(3, "c"))
    assert steps_of(TraceFile(path)) == [1, 3], "step 2 has lost its last line"
    TraceLog(path).append(make_record(2, "b"))
    file = TraceFile(path)
    assert steps_of(file) == [1, 2, 3]
    assert file.read(2) == make_record(2, "b")


def test_a_torn_repetition_does_not_hide_the_whole_record(path: Path, make_record: Make) -> None:
    TraceLog(path).append(make_record(1, "a"))
    size = path.stat().st_size
    TraceLog(path).append(make_record(1, "a", version=9))
    path.write_bytes(path.read_bytes()[: size + 900])
    assert [head.version for head in TraceFile(path).heads] == [0]


def test_a_file_that_is_no_trace_is_named(path: Path, make_record: Make) -> None:
    with pytest.raises(DataError, match=r"trace\.jsonl cannot be read: No such file"):
        TraceFile(path)
    path.write_bytes(b'xx\n{"kind":"step","step":"x"}\n')
    with pytest.raises(DataError, match=r"trace\.jsonl: the line at byte 3 is not that of a trace \(.*\): another version"):
        TraceFile(path)


def test_a_damaged_line_of_one_step_leaves_the_others(path: Path, make_record: Make) -> None:
    TraceLog(path).append(make_record(1, "a"))
    first = path.read_bytes()
    TraceLog(path).append(make_record(2, "b"))
    lines = first.splitlines(keepends=True)
    path.write_bytes(path.read_bytes().replace(lines[1], b"x" + lines[1][1:], 1))
    file = TraceFile(path)
    assert file.read(2).head.step == 2
    with pytest.raises(DataError, match=rf"the line at byte {len(lines[0])} is not that of a trace"):
        file.read(1)
