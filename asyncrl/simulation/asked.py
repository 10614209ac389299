"""What `asyncrl simulate` is asked for: its words, read and checked before anything heavy is loaded.

cli -> [asked] -> Asked -> command
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import load_run
from asyncrl.config.simulation import Scenario
from asyncrl.errors import ConfigError
from asyncrl.observe.run_folder import RunFolder, existing_file
from asyncrl.simulation.faults import ALL, FaultKind
from asyncrl.simulation.loop import Order

MAX_VALUES = 64
"""Of one sweep: more is a slip of the finger, and no table that anybody reads."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`key` takes each of `values`, in TOML syntax."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One simulation: its name among others, its file and overrides, and the scenario that they give."""

    name: str
    file: Path
    overrides: tuple[str, ...]
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`scenarios`: in the order in which they run. seeds: of a hunt, which has one scenario; None: each runs under `seed`.
    compares: side by side, and not one after the other; with `sweep` they always are."""

    scenarios: tuple[Named, ...]
    seed: int = 0
    seeds: range | None = None
    faults: frozenset[FaultKind] = frozenset()
    order: Order = Order.TASKS
    jobs: int | None = None
    keeps_going: bool = False
    compares: bool = False
    sweep: Sweep | None = None
    output: Path | None = None
    """A folder; with `fit`, a file."""
    fit: Path | None = None
    """The folder of a real run, whose scenario is asked for and nothing else."""
    events: Path | None = None
    as_json: bool = False
    width: int | None = None
    """Of the terminal; None: a file or a pipe."""


def read_asked(
    words: Sequence[str],
    *,
    seed: int | None = None,
    seeds: str = "",
    faults: str = "none",
    order: str = Order.TASKS.value,
    jobs: int | None = None,
    keeps_going: bool = False,
    compares: bool = False,
    sweep: str = "",
    output: Path | None = None,
    fit: Path | None = None,
    events: Path | None = None,
    as_json: bool = False,
    width: int | None = None,
) -> Asked:
    """words: files, which end in .toml, and overrides, which have a `=`. Raises ConfigError or RunFolderError, one line."""
    if fit is not None:
        if words or seeds or sweep or compares or as_json or keeps_going or (seed, jobs, events) != (None, None, None):
            raise ConfigError("--fit RUN goes with --output FILE and nothing else; what it prints is a scenario to simulate")
        existing_file(fit, RunFolder(path=fit).config.name, "it is not the folder of a run")
        return Asked(scenarios=(), fit=fit, output=output)
    files, overrides = _split(words)
    swept = parse_sweep(sweep) if sweep else None
    hunted = parse_seeds(seeds) if seeds else None
    _check_options(len(files), seed, hunted, compares=compares, swept=swept, output=output, events=events, keeps_going=keeps_going)
    return Asked(
        scenarios=_scenarios(files, overrides, swept),
        seed=seed or 0,
        seeds=hunted,
        faults=parse_faults(faults),
        order=_order(order),
        jobs=jobs,
        keeps_going=keeps_going,
        compares=compares,
        sweep=swept,
        output=output,
        events=events,
        as_json=as_json,
        width=width,
    )


def _split(words: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    overrides = tuple(word for word in words if "=" in word)
    files = [word for word in words if "=" not in word]
    strange = [word for word in files if not word.endswith(".toml")]
    if strange or not files:
        what = f"{strange[0]!r} is neither" if strange else "no scenario is given"
        raise ConfigError(f"{what}: give files that end in .toml, such as configs/sim/tools.toml, and values as section.key=value")
    return [Path(file) for file in files], overrides


def _check_options(
    num_files: int,
    seed: int | None,
    seeds: range | None,
    *,
    compares: bool,
    swept: Sweep | None,
    output: Path | None,
    events: Path | None,
    keeps_going: bool,
) -> None:
    if seeds is not None:
        others = {"--seed": seed is not None, "--compare": compares, "--sweep": swept is not None}
        others |= {"--output": output is not None, "--events": events is not None, "a second scenario": num_files > 1}
        if taken := [name for name, is_given in others.items() if is_given]:
            raise ConfigError(f"--seeds hunts in one scenario, and does not go with {taken[0]}")
    elif keeps_going:
        raise ConfigError("--keep-going has no effect without --seeds")
    if swept is not None and (compares or num_files > 1):
        raise ConfigError("--sweep takes one scenario; --compare takes several")
    if compares and num_files < 2:
        raise ConfigError("--compare needs two scenarios or more")
    if events is not None and (swept is not None or num_files > 1):
        raise ConfigError("--events writes the log of one simulation: give one scenario, and no --sweep")


def _scenarios(files: Sequence[Path], overrides: tuple[str, ...], swept: Sweep | None) -> tuple[Named, ...]:
    """All are loaded before the first one runs: a value that cannot be is told before an hour of others."""
    if swept is not None:
        file = files[0]
        pairs = [(f"{swept.key}={value}", (*overrides, f"{swept.key}={value}")) for value in swept.values]
        return tuple(Named(name=name, file=file, overrides=own, scenario=load_run(Scenario, file, own)) for name, own in pairs)
    names = [file.stem for file in files]
    names = [str(file) if names.count(name) > 1 else name for name, file in zip(names, files, strict=True)]
    return tuple(
        Named(name=name, file=file, overrides=overrides, scenario=load_run(Scenario, file, overrides))
        for name, file in zip(names, files, strict=True)
    )


def _order(text: str) -> Order:
    try:
        return Order(text)
    except ValueError:
        raise ConfigError(f"--order {text!r}: it is one of {', '.join(Order)}") from None


def parse_faults(text: str) -> frozenset[FaultKind]:
    """`all`, `none`, or kinds with commas. Raises ConfigError."""
    if text in ("all", "none"):
        return ALL if text == "all" else frozenset()
    try:
        return frozenset(FaultKind(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--faults {text!r}: {error}; kinds: all, none, {', '.join(FaultKind)}") from None


def parse_seeds(text: str) -> range:
    """`a..b`, both included, or one number. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip(), re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
    if last < first:
        raise ConfigError(f"--seeds {text!r}: it is FIRST..LAST, such as 0..999")
    return range(first, last + 1)


def parse_sweep(text: str) -> Sweep:
    """`key=a..b` (whole numbers, one by one), `key=a..b+step`, `key=a..b*factor`, or `key=a,b,c`. Raises ConfigError."""
    key, _, values = text.partition("=")
    form = "it is section.key=a..b, =a..b+step, =a..b*factor, or =a,b,c"
    if "." not in key or not values.strip():
        raise ConfigError(f"--sweep {text!r}: {form}")
    found = _range(values.strip(), form) if ".." in values else tuple(value.strip() for value in values.split(","))
    if not all(found):
        raise ConfigError(f"--sweep {text!r}: a value is empty; {form}")
    if len(found) > MAX_VALUES:
        raise ConfigError(f"--sweep {text!r}: it has more than {MAX_VALUES} values; give a step, such as a..b*2")
    return Sweep(key=key.strip(), values=found)


def _range(text: str, form: str) -> tuple[str, ...]:
    """One value more than `MAX_VALUES` when there are too many. `+` stands before the step, so numbers have none of their own."""
    first, _, rest = text.partition("..")
    sign = "*" if "*" in rest else "+"
    last, has_step, step = rest.partition(sign)
    if not all(_NUMBER.fullmatch(number.strip()) for number in (first, last, step if has_step else "1")):
        raise ConfigError(f"--sweep {text!r}: not numbers; {form}")
    low, high, by = float(first), float(last), float(step or 1)
    if not has_step and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"--sweep {text!r}: say the step between numbers that are not whole, such as {text}+0.1")
    if high < low:
        raise ConfigError(f"--sweep {text!r}: {first} is more than {last}; the smaller one comes first")
    if by <= (sign == "*") or (sign == "*" and low <= 0):
        raise ConfigError(f"--sweep {text!r}: these steps lead nowhere; a factor is above 1 and begins above 0, a step is above 0")
    count, values = 0, list[str]()
    while (value := low * by**count if sign == "*" else low + by * count) <= high * (1 + 1e-9) and count <= MAX_VALUES:
        values.append(f"{value:.12g}")
        count += 1
    return tuple(values)
