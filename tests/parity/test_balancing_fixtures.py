"""Partitions, micro-batches and workloads against stored numbers of verl 0.9.1 (`../shared/fixtures/balancing.json`), exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.algorithms.partition import partition, partition_under_cap, workload
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.balance import balance

PATH = Path(__file__).parents[3] / "shared" / "fixtures" / "balancing.json"

Case = dict[str, Any]


def _cases(kind: str) -> pytest.MarkDecorator:
    cases = json.loads(PATH.read_text(encoding="utf-8"))["cases"] if PATH.is_file() else []
    missing = pytest.param({}, id="missing", marks=pytest.mark.skip(reason="no balancing.json in ../shared/fixtures"))
    wanted = [pytest.param(case, id=case["id"]) for case in cases if case["kind"] == kind]
    return pytest.mark.parametrize("case", wanted or [missing])


@_cases("partition")
def test_partition(case: Case) -> None:
    lengths, params, outputs = case["inputs"]["lengths"], case["params"], case["outputs"]
    weights = lengths if params["measure"] == "tokens" else [workload(length) for length in lengths]
    parts = partition(weights, params["k"], equal_counts=params["equal_size"])
    assert [sum(weights[item] for item in part) for part in parts] == outputs["partition_sums_desc"]
    assert sorted(map(len, parts), reverse=True) == outputs["partition_counts_desc"]


@_cases("partition")
def test_token_metrics_of_a_mini_batch(case: Case) -> None:
    """As one mini-batch: tokens before, and the work of the heaviest rank after."""
    lengths, params, outputs = case["inputs"]["lengths"], case["params"], case["outputs"]
    tags = tuple({"seq_len": length} for length in lengths)
    batch = KVBatchMeta(partition_id="train", keys=tuple(f"u_{row}_0" for row in range(len(lengths))), tags=tags)
    dispatch = balance(batch, params["k"], groups_each=1, equal_counts=params["equal_size"])
    for name, value in outputs.get("contiguous_tokens", {}).items():
        assert dispatch.metrics[f"global_seqlen/{name}"] == pytest.approx(value, rel=1e-12)
    if params["measure"] == "workload":
        work = [sum(workload(int(tag["seq_len"])) for tag in shard.batch.tags) for shard in dispatch.shards]
        assert sorted(work, reverse=True) == outputs["partition_sums_desc"]


@_cases("micro_batches")
def test_micro_batches_under_a_cap(case: Case) -> None:
    lengths, params, outputs = case["inputs"]["lengths"], case["params"], case["outputs"]
    parts = partition_under_cap(lengths, params["max_tokens"], group_size=params["group_size"])
    assert len(parts) == outputs["num_micro_batches"]
    assert max(sum(lengths[row] for row in part) for part in parts) == outputs["max_tokens_used"]
    work = sorted((sum(workload(lengths[row]) for row in part) for part in parts), reverse=True)
    assert work == outputs["workload_sums_desc"]


@_cases("workload")
def test_workload(case: Case) -> None:
    assert [workload(length) for length in case["inputs"]["lengths"]] == case["outputs"]["workload"]
