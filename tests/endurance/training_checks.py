"""What a run that was killed many times must show at its end: nothing lost, nothing trained twice, steps repeated as they were."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.event_loop import run_loop
from asyncrl.observe.metrics import read_metrics
from asyncrl.transfer_queue.opening import open_queue
from asyncrl.world import RealWorld

Line = dict[str, Any]
"""What a life told before a stage: step, version, keys, stage, and of the tokens `oldest` and `newest` where it reads them."""


def read_told(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def problems(folder: Path, told: list[Line], *, total_steps: int, max_staleness: int, seed: int) -> Iterator[str]:
    """Of the run in `folder`, which has ended: what is wrong, one line each."""
    trained: dict[int, list[str]] = {}
    for line in told:
        if trained.setdefault(line["step"], line["keys"]) != line["keys"]:
            yield f"step {line['step']} was repeated on {line['keys']}, before it had {trained[line['step']]}"
    if sorted(trained) != list(range(1, total_steps + 1)):
        yield f"steps {sorted(trained)} were trained, of {total_steps}"
    uids = [uid for keys in trained.values() for uid in dict.fromkeys(key.partition("_")[0] for key in keys)]
    twice = [uid for uid, count in Counter(uids).items() if count > 1]
    if twice:
        yield f"trained twice: {twice}"
    yield from _stale(told, set(trained), max_staleness)
    yield from run_loop(_miscounted(folder / "journal.db", uids, total_steps, seed))
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "training/global_step" in row]
    if steps != list(range(1, total_steps + 1)):
        yield f"metrics.jsonl has the steps {steps}"
    if not (folder / "hf" / "model.safetensors").is_file():
        yield "the run has left no model"


def _stale(told: list[Line], steps: set[int], max_staleness: int) -> Iterator[str]:
    """In every try of a step, not only the last."""
    measured = [line for line in told if "oldest" in line]
    for line in measured:
        if not line["version"] - max_staleness <= line["oldest"] <= line["newest"] <= line["version"]:
            yield f"step {line['step']} of version {line['version']} trained on tokens of {line['oldest']} to {line['newest']}"
    if not_seen := steps - {line["step"] for line in measured}:
        yield f"nobody looked at the versions of steps {sorted(not_seen)}"


async def _miscounted(journal: Path, trained: list[str], total_steps: int, seed: int) -> list[str]:
    """The journal against what was trained: every prompt that the feed gave out is trained, dropped or open."""
    async with RealWorld(run_seed=seed) as world, open_queue(journal, world=world, weights_step=total_steps) as queue:
        counts, cursor = queue.counters(), queue.cursor
        num_alive, num_trained = len(queue.groups_under_way("train")), queue.num_trained
        given = {world.uid(number) for number in range(cursor)}
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    found = [f"{uid} was trained, and the feed never gave it" for uid in trained if uid not in given]
    if counts["admitted"] != num_trained + dropped + num_alive:
        found.append(f"admitted {counts['admitted']} != trained {num_trained} + dropped {dropped} + open {num_alive}")
    if num_trained != len(trained):
        found.append(f"the journal counts {num_trained} trained groups, the lives {len(trained)}")
    if cursor != counts["admitted"]:
        found.append(f"the feed gave {cursor} prompts, {counts['admitted']} were admitted")
    if num_alive:
        found.append(f"{num_alive} groups are open after the last step")
    return found
