"""What a vLLM is started with."""

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.vllm.settings import OURS, VLLMSettings, check_free_args, engine_args


def settings(**more: Any) -> VLLMSettings:
    return VLLMSettings(**{"model": "m", "dtype": "float32", "max_num_seqs": 8, "context_len": 4096, **more})


def test_every_argument_of_ours_is_refused_as_a_free_one() -> None:
    assert {*engine_args(settings(), is_cpu=True), *engine_args(settings(devices="0", kv_cache_memory_mib=1), is_cpu=False)} - {
        *OURS
    } == {"block_size", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens", "use_tqdm_on_load"}
    for name in OURS:
        with pytest.raises(ConfigError, match=rf"rollout\.vllm\.engine_args\.{name} = 1: asyncrl sets this"):
            engine_args(settings(engine_args={name: 1}), is_cpu=True)


def test_the_refusal_names_the_key_to_set() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 9: .*; set rollout\.max_model_len instead"):
        check_free_args({"max_model_len": 9})


def test_an_argument_that_vllm_lacks_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.quantisation: this vLLM has no such argument; did you mean quantization"):
        check_free_args({"quantisation": "fp8"}, known=frozenset({"quantization"}))


def test_free_arguments_win_over_what_a_platform_needs() -> None:
    assert engine_args(settings(engine_args={"block_size": 64}), is_cpu=True)["block_size"] == 64


def test_a_cpu_never_cuts_a_prompt() -> None:
    args = engine_args(settings(), is_cpu=True)
    assert (args["enable_chunked_prefill"], args["max_num_batched_tokens"]) == (False, 4096)
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        engine_args(settings(engine_args={"enable_chunked_prefill": True}), is_cpu=True)


@pytest.mark.parametrize(("mib", "size"), [(0, 256 << 20), (1, 1 << 20)])
def test_the_cache_of_a_cpu_has_a_size(mib: int, size: int) -> None:
    assert engine_args(settings(kv_cache_memory_mib=mib), is_cpu=True)["kv_cache_memory_bytes"] == size


def test_a_gpu_is_named_to_vllm_and_keeps_its_share() -> None:
    args = engine_args(settings(devices=" 2, 3", tensor_parallel_size=2, gpu_memory_utilization=0.4), is_cpu=False)
    assert (args["device_ids"], args["tensor_parallel_size"], args["gpu_memory_utilization"]) == ([2, 3], 2, 0.4)
    assert "kv_cache_memory_bytes" not in args
    assert "enable_chunked_prefill" not in args


def test_the_cpu_build_has_no_devices_to_choose_from() -> None:
    with pytest.raises(ConfigError, match=r"rollout.vllm.devices: '0,1' are GPUs.*leave the key out"):
        engine_args(settings(devices="0,1"), is_cpu=True)


def test_the_cpu_build_broadcasts_nothing() -> None:
    """Else it is told after the start, below a page of vLLM's traceback."""
    with pytest.raises(ConfigError, match=r'rollout.weight_transfer = "nccl" needs GPUs.* set "shm" or "directory"'):
        engine_args(settings(weight_transfer="nccl"), is_cpu=True)


@pytest.mark.parametrize(("transfer", "backend"), [("shm", "asyncrl_shm"), ("nccl", "nccl"), ("directory", "asyncrl_shm")])
def test_the_transfer_names_the_backend_of_the_workers(transfer: str, backend: str) -> None:
    assert engine_args(settings(weight_transfer=transfer), is_cpu=False)["weight_transfer_config"] == {"backend": backend}
