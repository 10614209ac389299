"""The command line: asyncrl train | sft | eval | simulate | trace | inspect | fields.

Everything that can be wrong with the user's input is checked before torch is imported, and answered in one line
`error: ...` on stderr with exit code 2. A run that fails later ends with one such line and exit code 3.
"""

import io
import json
import logging
import shutil
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from asyncrl import __version__
from asyncrl.config import SFTRun, TrainRun, load_run, to_toml
from asyncrl.errors import AsyncRLError
from asyncrl.event_loop import leave_threads, run_loop
from asyncrl.journal.summary import render, summarize
from asyncrl.observe.trace_command import TraceFormat, render_trace, write_output
from asyncrl.wording import first_of, named_message_of

T = TypeVar("T")

if TYPE_CHECKING:
    UsageError = typer.BadParameter
else:
    UsageError = typer.BadParameter.__mro__[1]
    """Of click; typer shows this child of it alone."""

app = typer.Typer(
    name="asyncrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value ...]", help="Values that replace those of the file, in TOML syntax.", show_default=False
    ),
]

Scenarios = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO.toml... [section.key=value ...]",
        help="Scenarios, such as configs/sim/tools.toml, and values that replace those of the files.",
        show_default=False,
    ),
]
Seeds = Annotated[
    str, typer.Option(metavar="A..B", help="Hunt: run all of these seeds until one shows a violation.", show_default=False)
]
SweepOption = Annotated[
    str,
    typer.Option(metavar="KEY=A..B", help="One key over values: a..b, a..b+step, a..b*factor, or a,b,c.", show_default=False),
]
OutputFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write pictures, a Perfetto trace and JSON here.", show_default=False)
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes. Default: of a hunt one a core, of several simulations one.", show_default=False),
]
FittedRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Print the scenario of a real run, such as runs/quickstart; --output FILE writes it.",
        show_default=False,
    ),
]
EventsFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every event of the run here.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def asyncrl(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train language-model agents that call tools over many turns."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the batch arithmetic, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest valid checkpoint of the newest run of this name that has one.")
    ] = False,
) -> None:
    """Train by reinforcement learning."""
    run = load_run(TrainRun, config, overrides or [])
    from asyncrl.preflight import check_train, describe_batch

    inputs = check_train(run)
    if dry_run:
        print(describe_batch(run, num_rows=len(inputs.train_rows)))
        return
    from asyncrl.assembly import run_training

    folder = run_loop(run_training(run, inputs, resume=resume))
    print(f"run folder: {folder}")


@app.command()
def sft(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
) -> None:
    """Warm-start a model by supervised training on conversations."""
    run = load_run(SFTRun, config, overrides or [])
    from asyncrl.preflight import check_sft

    check_sft(run)
    if dry_run:
        print(to_toml(run))
        return
    from asyncrl.sft import run_sft

    print(f"run folder: {run_loop(run_sft(run))}")


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, the folder of a finished run, or a Hugging Face model directory.", show_default=False),
    ],
    file: Annotated[Path, typer.Argument(help="Rows to evaluate on: parquet, json or jsonl.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration with the agent, its tools and the reward. Default: that of the checkpoint's run.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.key=value", help="Values that replace those of the file.")
    ] = None,
) -> None:
    """Evaluate any checkpoint on any file; prints one JSON object."""
    from asyncrl.preflight import check_eval

    run, rows = check_eval(checkpoint, file, config, overrides or [])
    from asyncrl.assembly import run_evaluation

    print(json.dumps(run_loop(run_evaluation(run, rows))))


@app.command()
def simulate(
    scenarios: Scenarios = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The seed of one run. Default: 0.", show_default=False)
    ] = None,
    seeds: Seeds = "",
    faults: Annotated[str, typer.Option(metavar="KINDS", help="all, none, or kinds of faults with commas.")] = "none",
    order: Annotated[str, typer.Option(metavar="strict|tasks|all", help="What the seed may reorder.")] = "tasks",
    jobs: Jobs = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Hunt on after a violation.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Several scenarios side by side.")] = False,
    sweep: SweepOption = "",
    output: OutputFolder = None,
    fit: FittedRun = None,
    events: EventsFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the whole controller under virtual time on models of its edges: to size a cluster, or to hunt for faults."""
    from asyncrl.simulation.asked import read_asked

    asked = read_asked(
        scenarios or [],
        seed=seed,
        seeds=seeds,
        faults=faults,
        order=order,
        jobs=jobs,
        keeps_going=keep_going,
        compares=compare,
        sweep=sweep,
        output=output,
        fit=fit,
        events=events,
        as_json=as_json,
        width=_terminal_width(),
    )
    from asyncrl.simulation.command import run_asked

    raise typer.Exit(run_asked(asked))


@app.command()
def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.", show_default=False)
    ],
    group: Annotated[
        str | None, typer.Option(metavar="UID", help="One prompt group. Default: the newest that is traced.", show_default=False)
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The traced groups of one training step.", show_default=False)
    ] = None,
    form: Annotated[
        TraceFormat, typer.Option("--format", help="A table, JSON lines, or a trace for ui.perfetto.dev.")
    ] = TraceFormat.TABLE,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. Default: the terminal.", show_default=False)
    ] = None,
) -> None:
    """Show which stage wrote and read every field of a prompt group, and what its sessions did when."""
    width = _terminal_width() if output is None else None
    text = render_trace(folder, group=group, step=step, form=form, width=width)
    if output is None:
        print(text, end="")
    else:
        write_output(output, text, run=folder)


@app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the journal of a run holds: groups, counts, steps and bytes. The run may be going on."""
    summary = summarize(folder)
    if as_json:
        print(json.dumps(asdict(summary)))
    else:
        print(render(summary, width=_terminal_width()), end="")


@app.command()
def fields() -> None:
    """Print the field catalogue: every column, its producer and its consumers."""
    from asyncrl.reference import render_fields_table

    print(render_fields_table())


def _terminal_width() -> int | None:
    """In characters; None where the output goes to a file or a pipe, or nowhere."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def main() -> NoReturn:
    """Entry point: errors become one line and an exit code (2: the user's input, 3: the run)."""
    before = threading.enumerate()
    try:
        _run_command()
    except SystemExit as end:
        leave_threads(end.code if isinstance(end.code, int) else int(end.code is not None), before)
        raise


def _run_command() -> NoReturn:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name of a folder that the terminal has no characters for
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # FSDP's first forward makes torch warn about a function of its own that torch itself calls.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        code = app(prog_name="asyncrl", standalone_mode=False) or 0
        print(end="", flush=True)  # a disk that is full says so now
    except UsageError as error:
        _fail_usage(error)
    except (AsyncRLError, OSError, MemoryError) as error:
        _fail(error)
    except BaseExceptionGroup as group:
        _fail_group(group)
    sys.exit(code)


def _fail_usage(error: UsageError) -> NoReturn:
    """A command line that cannot be read; without any arguments it is the help."""
    if len(sys.argv) == 1:
        error.show()
        sys.exit(2)
    help_of = error.ctx.command_path if error.ctx else "asyncrl"
    print(f"error: {error.format_message()} (see {help_of} --help)", file=sys.stderr)
    sys.exit(2)


def _fail_group(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Task groups wrap what their tasks raise. One line when all leaves are told in one, else the full traceback."""
    told, others = group.split((AsyncRLError, OSError, MemoryError))
    if told is None or others is not None:
        raise group
    _fail(first_of(told))


def _fail(error: BaseException) -> NoReturn:
    """Ours are one sentence, however long. A disk that is full or memory that ran out is the machine's, said in its own words."""
    text = str(error) if isinstance(error, AsyncRLError) else named_message_of(error)
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(error.exit_code if isinstance(error, AsyncRLError) else AsyncRLError.exit_code)


if __name__ == "__main__":
    main()
