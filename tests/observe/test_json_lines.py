"""A torn last line is cut off before anything is appended."""

from pathlib import Path

import pytest

from asyncrl.observe.json_lines import cut_unfinished_line

LONG = b"x" * 200_000


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b"a\n", b"a\n"),
        (b"a\nb", b"a\n"),
        (b"torn", b""),
        (b"a\n" + LONG, b"a\n"),
        (LONG + b"\n" + LONG + b"\n", LONG + b"\n" + LONG + b"\n"),
        (LONG, b""),
    ],
    ids=["empty", "whole", "torn", "only torn", "long torn", "long whole", "long only torn"],
)
def test_whole_lines_are_kept(tmp_path: Path, content: bytes, kept: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    cut_unfinished_line(path)
    assert path.read_bytes() == kept


def test_a_file_that_is_not_there_stays_so(tmp_path: Path) -> None:
    cut_unfinished_line(tmp_path / "lines")
    assert list(tmp_path.iterdir()) == []
