"""The generated page is that of the code, and `asyncrl fields` prints the whole catalogue."""

from pathlib import Path

import pytest

from asyncrl.config import SFTRun, TrainRun, keys_of
from asyncrl.fields import CATALOGUE, TAGS
from asyncrl.reference import configuration_page, default_text, key_rows, render_fields_table, type_text

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_the_configuration_is_that_of_the_code() -> None:
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


def test_the_table_has_every_field_and_tag() -> None:
    lines = render_fields_table().splitlines()
    assert [name for name in [*CATALOGUE, *TAGS] if not any(line.startswith(f"{name} ") for line in lines)] == []
    assert max(map(len, lines)) < 220
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("data.train_batch_size", "int > 0", "16"),
        ("data.train_files", "list of str", "[]"),
        ("model.path", "str", "required"),
        ("model.chat_template_kwargs", "table", "{}"),
        ("rollout.top_p", "float > 0 and <= 1", "1"),
        ("agent.parallel_tool_calls", "bool", "false"),
        ("algorithm.old_log_probs", '"auto" or "recompute" or "bypass"', '"auto"'),
        ("actor.optim.lr", "float > 0", "1e-06"),
        ("actor.optim.betas", "list of 2 float", "[0.9, 0.95]"),
    ],
)
def test_types_and_defaults_read_like_toml(key: str, kind: str, default: str) -> None:
    entry = dict(keys_of(TrainRun))[key]
    assert (type_text(entry), default_text(entry)) == (kind, default)


def test_every_key_has_a_row() -> None:
    page = configuration_page()
    assert [key for run in (TrainRun, SFTRun) for key, *_ in key_rows(run) if f"| `{key}` |" not in page] == []
