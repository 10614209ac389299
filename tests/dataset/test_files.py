"""What the user may write for files, and what is said when nothing is found."""

from pathlib import Path

import pytest

from asyncrl.dataset.files import find_files
from asyncrl.errors import DataError

KEY = "data.train_files"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.parquet", "c.JSON", "README.md", "._a.parquet", ".hidden.json", "sub/d.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    return tmp_path


def names(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def test_a_directory_gives_its_known_files_by_name(folder: Path) -> None:
    assert names(find_files([str(folder)], key=KEY)) == ["a.parquet", "b.jsonl", "c.JSON"]


def test_a_glob_is_sorted_and_may_descend(folder: Path) -> None:
    assert names(find_files([f"{folder}/*.[jp]*"], key=KEY)) == ["a.parquet", "b.jsonl"]
    assert names(find_files([f"{folder}/**/*.jsonl"], key=KEY)) == ["b.jsonl", "d.jsonl"]


def test_files_keep_the_order_they_are_named_in(folder: Path) -> None:
    assert names(find_files([f"{folder}/b.jsonl", f"{folder}/a.parquet", f"{folder}/b.jsonl"], key=KEY)) == [
        "b.jsonl",
        "a.parquet",
        "b.jsonl",
    ]


def test_a_file_with_brackets_in_its_name_is_no_glob(tmp_path: Path) -> None:
    path = tmp_path / "rows[1].jsonl"
    path.write_text("{}")
    assert find_files([str(path)], key=KEY) == [path]


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert names(find_files(["~/b.jsonl", "~/*.parquet"], key=KEY)) == ["b.jsonl", "a.parquet"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.jsonl", "missing.jsonl: no such file or directory"),
        ("*.arrow", "no file matches the glob"),
        ("README.md", "unknown file extension '.md'; allowed are .parquet, .json, .jsonl"),
        ("README*", "unknown file extension '.md'"),
        ("b.jsonl/x.jsonl", "no such file"),
        ("n" * 300 + ".jsonl", "cannot be read"),
        ("nul\0.jsonl", "no such file"),
    ],
)
def test_what_cannot_be_found_is_named(folder: Path, name: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        find_files([f"{folder}/{name}"], key=KEY)
    assert says in str(caught.value)
    assert KEY in str(caught.value)


def test_an_empty_list_or_path_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.train_files is empty"):
        find_files([], key=KEY)
    with pytest.raises(DataError, match="has an empty path"):
        find_files([" "], key=KEY)


def test_a_directory_without_usable_files_says_what_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match=r"no file to read; allowed are .parquet, .json, .jsonl"):
        find_files([str(tmp_path)], key=KEY)


def test_a_directory_named_like_a_glob_match_is_skipped_and_a_device_refused(folder: Path) -> None:
    (folder / "z.jsonl").mkdir()
    assert names(find_files([f"{folder}/*.jsonl"], key=KEY)) == ["b.jsonl"]
    (folder / "null.jsonl").symlink_to("/dev/null")
    with pytest.raises(DataError, match="not a regular file"):
        find_files([f"{folder}/null.jsonl"], key=KEY)
