"""Every benchmark still runs: with the smallest settings, each ends with one JSON object. Their figures are not looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALLEST = {
    "advantages": "--rows 64 --tokens 64 --repeats 1 --all",
    "engines": "--engines torch --rows 8 --repeats 1",
    "generate": "--repeats 1",
    "grpo_step": "--rounds 1 --threads 1",
    "log_prob_memory": "--tokens 64 --vocab 100",
    "loop_lag": "--sessions 16 --seconds 1 --warm-start 2",
    "rank_invariance": "--models qwen2 --layouts 2-ranks --hidden 16",
    "ranks": "--rounds 1 --updates 1",
    "sample_latency": "--groups 32 --samples 2",
    "simulation": "--seeds 1 --repeats 1",
    "tool_loop": "--prompts 2 --gens 2 --turns 1 --latency 0.01 --repeats 1",
    "transfer_queue": "--rounds 1",
}
WITH_VLLM = {"publication": "--publications 2 --rows 4"}
LONG = {"async_vs_sync", "presets", "quickstart_control", "simulation_reality", "trace_cost"}
"""Whole trainings, on what `make train` leaves: `make presets` runs the first, people the others."""


def test_every_benchmark_is_known() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SMALLEST.keys() | WITH_VLLM.keys() | LONG


@pytest.mark.long
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str) -> None:
    _run(name, SMALLEST[name], timeout_s=110)


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", WITH_VLLM)
def test_a_benchmark_of_vllm_runs(name: str) -> None:
    _run(name, WITH_VLLM[name], timeout_s=390)


def _run(name: str, options: str, *, timeout_s: float) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options.split(), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=BENCHMARKS.parent, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
