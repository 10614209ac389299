"""The command that starts a server to train through: what it gives to vLLM, and what it refuses without one."""

import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest

from asyncrl.rollout.vllm.serve import _parser, command_line, server_args, server_environment, settings_of, words_of
from asyncrl.rollout.vllm.settings import engine_args

MODULE = "asyncrl.rollout.vllm.serve"


def test_the_server_gets_what_an_engine_gets_and_the_routes() -> None:
    options = _parser().parse_args(["/models/tiny", "--context-len", "512", "--port", "81", "--name", "tiny", "--dtype", "float32"])
    args = server_args(options, engine_args(settings_of(options), is_cpu=True))
    pairs = dict(pairwise(args))
    assert pairs["--model"] == "/models/tiny"
    assert pairs["--max-model-len"] == "512"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--worker-extension-cls"] == "asyncrl.rollout.vllm.worker.WorkerExtension"
    assert pairs["--weight-transfer-config"] == '{"backend": "asyncrl_shm"}'
    assert (pairs["--host"], pairs["--port"], pairs["--served-model-name"]) == ("127.0.0.1", "81", "tiny")
    assert {"--enable-scale-out", "--skip-tokenizer-init", "--no-enable-chunked-prefill", "--enforce-eager"} <= set(args)
    environment = server_environment(3)
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["OMP_NUM_THREADS"]) == ("1", "3")


def test_arguments_become_words() -> None:
    args = {"a_b": True, "c": False, "d": [1, 2], "e": {"f": None}, "g": 0.5}
    assert command_line(args) == ["--a-b", "--no-c", "--d", "1", "2", "--e", '{"f": null}', "--g", "0.5"]


def test_a_server_for_others_is_warned_of() -> None:
    options = _parser().parse_args(["m", "--context-len", "9"])
    assert words_of(options) == "starting vLLM: m at http://127.0.0.1:8000\n"
    options = _parser().parse_args(["m", "--context-len", "9", "--host", "0.0.0.0"])
    assert "whoever reaches this address can change the model's weights" in words_of(options)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", MODULE, "m", "--context-len", "9"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "not installed: pip install" in done.stderr
    assert done.stderr.count("\n") == 1
