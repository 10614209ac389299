"""The whole quick start in one command: `python -m asyncrl.examples.quickstart [--seed N]`. What `make train` runs.

    calculator.make -> runs/quickstart-data -> asyncrl sft -> runs/quickstart-sft/hf -> asyncrl train -> runs/quickstart

Each part is what the command line would run from the same configuration files, with the paths of this very run put in. A second
run takes new folders (`quickstart-2`); the data folder is written anew, the same bytes for the same seed.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from asyncrl import cli
from asyncrl.config import SFTRun, load_run
from asyncrl.errors import AsyncRLError, UserError
from asyncrl.examples.calculator import QuickstartFiles, make
from asyncrl.stopping import Stop

SFT_CONFIG, TRAIN_CONFIG = "quickstart-sft.toml", "quickstart.toml"


def sft_overrides(files: QuickstartFiles, *, runs: Path, seed: int) -> list[str]:
    """What the warm start's configuration cannot know: where the files lie."""
    stages = ", ".join(f"'{path}'" for path in (files.mechanics, files.style))
    return [
        f"model.path='{files.model}'",
        f"sft.stages=[{stages}]",
        f"trainer.default_local_dir='{runs}'",
        f"trainer.seed={seed}",
    ]


def train_overrides(files: QuickstartFiles, model: Path, *, runs: Path, seed: int) -> list[str]:
    """The same for the training run; `model` is the warm start's."""
    return [
        f"data.train_files='{files.train}'",
        f"data.val_files='{files.val}'",
        f"model.path='{model}'",
        f"trainer.default_local_dir='{runs}'",
        f"trainer.seed={seed}",
    ]


INTERRUPTED = 130
"""Exit code after Ctrl-C in the warm start, as shells give it: there is no model to train on."""


def warm_start(configs: Path, files: QuickstartFiles, *, runs: Path, seed: int, stop: Stop | None = None) -> Path:
    """Run the warm start; returns its run folder. Raises typer.Exit when it was stopped halfway."""
    from asyncrl.preflight import check_sft
    from asyncrl.sft import run_sft

    run = load_run(SFTRun, configs / SFT_CONFIG, sft_overrides(files, runs=runs, seed=seed))
    check_sft(run)
    stop = stop or Stop()
    folder = asyncio.run(run_sft(run, stop=stop))
    if stop.is_requested:
        raise typer.Exit(INTERRUPTED)
    return folder


def main(
    seed: Annotated[int, typer.Option(help="Seed of data, weights, order and sampling.")] = 1,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    configs: Annotated[Path, typer.Option(help="Folder with the quick start's configuration files.")] = Path("configs"),
) -> None:
    """Make the data, warm-start the tiny model, train it."""
    try:
        typer.echo("1/3 problems, demonstrations and a random model")
        files = make(runs / "quickstart-data", seed=seed)
        typer.echo("2/3 warm start")
        folder = warm_start(configs, files, runs=runs, seed=seed)
        typer.echo(f"run folder: {folder}")
        typer.echo("3/3 reinforcement learning")
        cli.train(configs / TRAIN_CONFIG, train_overrides(files, folder / "hf", runs=runs, seed=seed))
    except AsyncRLError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UserError) else 3) from error


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
