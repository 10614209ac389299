"""Tables as plain text, at every width of a terminal."""

import pytest

from asyncrl.observe.text_tables import as_text
from asyncrl.observe.trace_view import _table


def _shown(width: int | None) -> list[str]:
    table = _table("stage", "field", "consumers", "mask sum")
    table.add_row("advantage", "response_mask", "old_log_prob ref_log_prob advantage update_actor observe " * 3, "22 " * 8)
    return as_text(["runs/x [bold] :smile:", table], width).splitlines()


@pytest.mark.parametrize("width", [1, 20, 80, 132, 200])
def test_words_stay_whole_in_a_terminal_however_narrow(width: int) -> None:
    lines = _shown(width)
    assert lines[0] == "runs/x [bold] :smile:"
    assert max(map(len, lines)) <= max(width, 160)
    words = " ".join(lines).split()
    assert words.count("update_actor") == words.count("old_log_prob") == 3


def test_a_file_has_a_line_a_row() -> None:
    lines = _shown(None)
    assert len(lines) == 3
    assert lines == [line.rstrip() for line in lines]
