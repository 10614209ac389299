"""Make the quick start's folder: rows, held-out rows, demonstrations and a random model. `python -m asyncrl.examples.calculator`.

    problems ─┬─ held out ─> val.jsonl                                    (evaluation only)
              └─ the rest ─┬─> train.parquet                              (reinforcement learning)
                           └─ demonstrator ─> mechanics.jsonl, style.jsonl (warm start, in this order)
    transcripts ─> tokenizer ─> model/

Same seed, same bytes; the held-out rows are the same for every seed. About 4 s.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from asyncrl.examples.demonstrator import MECHANICS, STYLE, TOOL, Mix, demonstrate
from asyncrl.examples.problems import draw_distinct, draw_problem, to_row
from asyncrl.ports import Json, Messages
from asyncrl.tools import load_tools
from asyncrl.world import derive_seed

TRAIN_ROWS = 2048
"""More than 80 steps of 16 prompts take."""
VAL_ROWS = 256
"""A success rate over so many problems has a standard error of 3 % at most."""
MECHANICS_ROWS, STYLE_ROWS = 16_000, 6_000
"""The warm start passes over each about three times."""
TOKENIZER_ROWS = 500
"""Conversations that the merges come from: every fixed piece of text occurs in them hundreds of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartFiles:
    """Where the parts lie."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def val(self) -> Path:
        return self.folder / "val.jsonl"

    @property
    def mechanics(self) -> Path:
        return self.folder / "mechanics.jsonl"

    @property
    def style(self) -> Path:
        return self.folder / "style.jsonl"

    @property
    def model(self) -> Path:
        return self.folder / "model"


def make(folder: Path, *, seed: int) -> QuickstartFiles:
    """Write all parts into `folder`, over what an earlier call left there."""
    files = QuickstartFiles(folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_jsonl(files.val, val_rows())
    pq.write_table(pa.Table.from_pylist(train_rows(seed)), files.train)
    mechanics = demonstrations(MECHANICS, MECHANICS_ROWS, seed=seed, name="mechanics")
    _write_jsonl(files.mechanics, [{"messages": messages} for messages in mechanics])
    style = demonstrations(STYLE, STYLE_ROWS, seed=seed, name="style")
    _write_jsonl(files.style, [{"messages": messages} for messages in style])
    _make_model(files.model, mechanics[:TOKENIZER_ROWS], seed=seed)
    return files


def val_rows() -> list[dict[str, Json]]:
    """Held-out problems, the same for every seed."""
    return _rows(random.Random(0), VAL_ROWS, held_out=True)


def train_rows(seed: int) -> list[dict[str, Json]]:
    """Problems for reinforcement learning; none is held out."""
    return _rows(random.Random(derive_seed(seed, "train")), TRAIN_ROWS, held_out=False)


def _rows(source: random.Random, count: int, *, held_out: bool) -> list[dict[str, Json]]:
    return [to_row(problem, index) for index, problem in enumerate(draw_distinct(source, count, held_out=held_out))]


def demonstrations(mix: Mix, count: int, *, seed: int, name: str) -> list[Messages]:
    """Conversations of the noisy demonstrator on problems that are not held out."""
    source = random.Random(derive_seed(seed, "demonstrations", name))
    return [demonstrate(draw_problem(source, held_out=False), mix, source) for _ in range(count)]


def _make_model(folder: Path, conversations: Sequence[Messages], *, seed: int) -> None:
    from asyncrl.examples.tiny_model import build_model, save_model, train_tokenizer

    tokenizer = train_tokenizer(conversations, [load_tools([TOOL])[TOOL].schema])
    save_model(build_model(tokenizer, seed=seed), tokenizer, folder)


def _write_jsonl(path: Path, rows: Sequence[Json]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/quickstart-data"),
    seed: Annotated[int, typer.Option(help="Seed of problems, demonstrations and weights.")] = 1,
) -> None:
    """Make the rows, the demonstrations and the random model of the quick start."""
    files = make(out, seed=seed)
    typer.echo(
        f"{files.folder}: {TRAIN_ROWS} rows, {VAL_ROWS} held-out rows, {MECHANICS_ROWS + STYLE_ROWS} demonstrations, a model"
    )


if __name__ == "__main__":
    typer.run(main)
