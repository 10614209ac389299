"""What an engine cannot do, and layouts of engines that do not add up, are refused with the configuration."""

import pytest

from asyncrl.config import TrainRun, parse_run
from tests.test_config import HELD_OUT, SERVERS, VLLM, Tree, refusal, tree


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**VLLM, "rollout__deterministic": True},
            'rollout.name = "vllm" with rollout.deterministic = true: only the engine "torch" makes rows independent of each other',
        ),
        (
            {**VLLM, "model__lora_rank": 4, "model__lora_publish": "adapter"},
            'rollout.name = "vllm" with model.lora_publish = "adapter": it takes whole weights; set lora_publish = "merged"',
        ),
        (
            {**SERVERS, "model__dtype": "float64"},
            'rollout.name = "openai" with model.dtype = "float64": it computes in float32 or bfloat16',
        ),
        (
            {**VLLM, "rollout__temperature": 2.5},
            'rollout.name = "vllm" with rollout.temperature = 2.5: vLLM samples at temperatures of 0.01 to 2 alone',
        ),
        (
            {**SERVERS, **HELD_OUT, "eval__temperature": 0.001},
            'rollout.name = "openai" with eval.temperature = 0.001: vLLM samples at temperatures of 0.01 to 2 alone',
        ),
        (
            {"rollout__num_engines": 2, "rollout__slow_after_s": 300},
            "rollout.slow_after_s = 300 is not less than half of rollout.request_timeout_s = 600, at which an engine is started "
            "anew",
        ),
        (
            {**VLLM, "rollout__num_engines": 2, "rollout__vllm__devices": "0"},
            "rollout.vllm.devices = ['0'] has 1 entries, and rollout.num_engines is 2: give one entry an engine",
        ),
        (
            {**VLLM, "rollout__vllm__devices": ["0,1"]},
            "rollout.vllm.devices: '0,1' names 2 devices, and rollout.vllm.tensor_parallel_size is 1",
        ),
        (
            {**VLLM, "rollout__vllm__devices": ["0,"], "rollout__vllm__tensor_parallel_size": 2},
            "rollout.vllm.devices: '0,' names 1 devices, and rollout.vllm.tensor_parallel_size is 2",
        ),
        (
            {"rollout__name": "openai"},
            'rollout.name = "openai" needs rollout.openai.base_urls, such as ["http://localhost:8000"]',
        ),
        (
            {"rollout__name": "openai", "rollout__openai__base_urls": "localhost:8000"},
            "rollout.openai.base_urls.0: 'localhost:8000' is no address of the form http://host:port",
        ),
        (
            {"rollout__name": "openai", "rollout__openai__base_urls": "http://a:8000/v1/"},
            "rollout.openai.base_urls.0: 'http://a:8000/v1': leave out /v1, which is added to it where it belongs",
        ),
        (
            {"rollout__name": "openai", "rollout__openai__base_urls": ["http://a:1", ""]},
            "rollout.openai.base_urls.1: an address is empty; give one of the form http://host:port",
        ),
        (
            {"rollout__name": "openai", "rollout__openai__base_urls": "http://me:secret@a:1"},
            "rollout.openai.base_urls.0: give scheme, host, port and path alone; a key goes into the variable that "
            "api_key_env names",
        ),
        (
            {**SERVERS, "rollout__openai__api_key_env": "sk-1234"},
            "rollout.openai.api_key_env: give the name of an environment variable, such as JUDGE_API_KEY; the key itself is its "
            "value",
        ),
        (
            {"rollout__name": "openai", "rollout__openai__base_urls": ["http://a:1", "http://a:1/"]},
            "rollout.openai.base_urls = ['http://a:1', 'http://a:1'] names a server twice",
        ),
        (
            {**SERVERS, **HELD_OUT, "eval__where": "snapshot"},
            'eval.where = "snapshot" needs a second engine, and rollout.name = "openai" starts none; set eval.where = "between"',
        ),
        (
            {**SERVERS, "rollout__openai__base_urls": "http://10.0.0.7:8000"},
            'rollout.weight_transfer = "directory" to servers needs rollout.openai.weights_dir: a folder that they reach under the '
            "same path",
        ),
        (
            {**SERVERS, "rollout__openai__base_urls": "http://10.0.0.7:8000", "rollout__weight_transfer": "shm"},
            'rollout.weight_transfer = "shm" does not reach http://10.0.0.7:8000, which is another machine; use "directory"',
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(settings: Tree, message: str) -> None:
    assert refusal(tree(**settings)) == message


def test_the_layout_of_engines_follows_from_the_keys() -> None:
    one, two = parse_run(TrainRun, tree()).rollout, parse_run(TrainRun, tree(rollout__num_engines=2)).rollout
    assert (one.has_pool, one.count, two.has_pool, two.count) == (False, 1, True, 2)
    embedded = parse_run(TrainRun, tree(**VLLM)).rollout
    assert (embedded.has_pool, embedded.count, embedded.transfer, embedded.hung_after_s) == (True, 1, "shm", 300.0)
    servers = parse_run(TrainRun, tree(**SERVERS)).rollout
    assert (servers.has_pool, servers.count, servers.transfer) == (True, 2, "shm")
    far = {**SERVERS, "rollout__openai__base_urls": "http://[fe80::1]:8000", "rollout__openai__weights_dir": "shared"}
    assert parse_run(TrainRun, tree(**far)).rollout.transfer == "directory"
    nccl = parse_run(TrainRun, tree(**VLLM, rollout__weight_transfer="nccl")).rollout
    assert nccl.transfer == "nccl"


def test_free_arguments_of_an_engine_are_taken_as_they_are() -> None:
    free = {"quantization": "fp8", "compilation_config": {"level": 3}, "max_num_batched_tokens": 4096}
    run = parse_run(TrainRun, tree(**VLLM, rollout__vllm__engine_args=free))
    assert run.rollout.vllm.engine_args == free


def test_the_model_length_follows_the_data_unless_set() -> None:
    lengths = {"data__max_prompt_length": 30, "data__max_response_length": 70}
    assert parse_run(TrainRun, tree(**lengths)).max_model_len == 100
    assert parse_run(TrainRun, tree(**lengths, rollout__max_model_len=128)).max_model_len == 128
