"""Progress: one plain line a step into a file or pipe, a bar on a terminal."""

import io
import threading

from rich.console import Console

from asyncrl.observe.progress import LossBar, Progress

NUMBERS = {"critic/score/mean": 0.5, "perf/tokens_per_s": 1234.4, "groups/running": 16.0, "groups/failure": 1.0}


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    out = io.StringIO()
    with Progress(total_steps=60, step=11, console=Console(file=out, width=40)) as progress:
        assert not progress.is_live
        progress.groups({"running": 3, "pending": 2})
        progress.step(12, NUMBERS)
        progress.say("[red]\x07 not markup")
    assert out.getvalue().splitlines() == [
        "step 12/60  reward 0.500  1234 tokens/s  groups 1 failure",
        "[red] not markup",
    ]


def test_a_terminal_gets_a_bar_without_a_thread() -> None:
    out = io.StringIO()
    threads = threading.active_count()
    with Progress(total_steps=60, console=Console(file=out, width=160, force_terminal=True, color_system=None)) as progress:
        assert progress.is_live
        progress.groups({"pending": 16})
        assert "16 pending" in out.getvalue()
        progress.step(12, NUMBERS)
        progress.say("a line of its own")
        assert threading.active_count() == threads
    text = out.getvalue()
    assert "12/60" in text
    assert "reward 0.500  1234 tokens/s  groups 16 pending 16 running 0 finished 1 failure" in text
    assert "a line of its own\n" in text


def test_a_step_without_numbers_is_shown() -> None:
    out = io.StringIO()
    with Progress(total_steps=2, console=Console(file=out)) as progress:
        progress.step(1, {})
    assert out.getvalue().startswith("step 1/2  reward -  0 tokens/s")


def test_a_warm_start_without_a_terminal_is_twenty_lines() -> None:
    out = io.StringIO()
    with LossBar(100, console=Console(file=out)) as bar:
        for step in range(1, 101):
            bar.step(step, 1.5)
    assert out.getvalue().splitlines()[::19] == ["warm start step 5/100  loss 1.500", "warm start step 100/100  loss 1.500"]
