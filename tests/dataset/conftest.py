"""Files for the dataset's tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.ports import Json

WriteRows = Callable[[str, list[Json]], str]


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Writes rows to a file, in the format of its extension; returns the path."""

    def write(name: str, rows: list[Json]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def write_bytes(tmp_path: Path) -> Callable[[str, bytes], str]:
    def write(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return write


@pytest.fixture
def gsm8k() -> Path:
    """The folder of GSM8K beside the checkout: real text, not part of the project."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("no ../shared/data/gsm8k beside the checkout")
    return folder
