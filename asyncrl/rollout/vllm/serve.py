"""A vLLM server that `rollout.name = "openai"` can train through: `python -m asyncrl.rollout.vllm.serve MODEL --context-len N`.

OpenAIEngine -> HTTP -> [this process: vLLM's API server] -> EngineCore -> workers, with WorkerExtension

vLLM's own server needs a dozen arguments and variables for that: ids in and out, log-probs of the distribution sampled from, routes
and a worker extension for new weights. This sets them, and runs it. What stands behind `--` goes to vLLM as it is.

Security. Covered: it listens on this machine alone unless told otherwise; with VLLM_API_KEY set, requests for tokens need the key.
Not covered: vLLM asks for no key on the routes for new weights. Whoever reaches the port can change the model and call methods of
the workers; keep it within a network that you trust.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from asyncrl.errors import ModelError, UserError
from asyncrl.rollout.vllm.environment import REMOVED, child_environment
from asyncrl.rollout.vllm.installed import import_vllm
from asyncrl.rollout.vllm.settings import VLLMSettings, engine_args
from asyncrl.rollout.vllm.tether import NAME, Tether

LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Ends the process with 2 and one line when vLLM is missing or refuses its arguments."""
    own, free = _split(sys.argv[1:] if argv is None else list(argv))
    options = _parser().parse_args(own)
    os.environ.update(server_environment(options.threads))
    for name in REMOVED:
        os.environ.pop(name, None)
    try:
        import_vllm()
        if not Path(options.model).is_dir():
            raise ModelError(f"{options.model!r}: no such folder")
        arguments = server_args(options, engine_args(settings_of(options)))
    except UserError as error:
        _refuse(error)
    sys.stderr.write(words_of(options))
    try:
        _serve(options.model, [*arguments, *free])
    except UserError as error:
        _refuse(error)


def _refuse(error: UserError) -> NoReturn:
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and vLLM's behind `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.rollout.vllm.serve", description="A vLLM server to train through.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--context-len", type=int, required=True, help="tokens of prompt plus answer")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", default="", help="the model's name for clients (default: its folder)")
    parser.add_argument("--dtype", default="auto", help='"float32", "bfloat16" or "auto", the model\'s own')
    parser.add_argument("--max-num-seqs", type=int, default=64, help="rows that decode together")
    parser.add_argument("--threads", type=int, default=1, help="of each worker, on a CPU")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--devices", default="", help='GPUs, such as "0" or "2,3" (default: all that are visible)')
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--kv-cache-memory-mib", type=int, default=0, help="0: on a CPU 256, on a GPU what is left")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-transfer", choices=("shm", "nccl", "directory"), default="shm")
    return parser


def settings_of(options: argparse.Namespace) -> VLLMSettings:
    """The engine's share of the options."""
    return VLLMSettings(
        model=options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        context_len=options.context_len,
        num_threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
        devices=options.devices,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_mib=options.kv_cache_memory_mib,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        weight_transfer=options.weight_transfer,
    )


def server_environment(num_threads: int) -> dict[str, str]:
    """With the routes for new weights."""
    return {**child_environment(num_threads), "VLLM_SERVER_DEV_MODE": "1"}


def words_of(options: argparse.Namespace) -> str:
    """What is told at the start."""
    words = f"starting vLLM: {options.model} at http://{options.host}:{options.port}\n"
    if options.host == LOOPBACK:
        return words
    return f"{words}warning: whoever reaches this address can change the model's weights\n"


def server_args(options: argparse.Namespace, engine: Mapping[str, object]) -> list[str]:
    """Of vLLM's server. engine: arguments of AsyncEngineArgs."""
    names = ["--served-model-name", options.name] if options.name else []
    where = ["--host", options.host, "--port", str(options.port), *names]
    return [*where, "--enable-scale-out", "--disable-uvicorn-access-log", *command_line(engine)]


def command_line(args: Mapping[str, object]) -> list[str]:
    """Arguments of AsyncEngineArgs as vLLM's server reads them."""
    words: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _serve(model: str, arguments: list[str]) -> None:
    """vLLM's own way from its arguments to the end of its server. Its workers end with this process, however it ends."""
    import uvloop
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from asyncrl.rollout.vllm.launch import check_head_size

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    check_head_size(model, AsyncEngineArgs.from_cli_args(args).create_engine_config())
    args.additional_config = {**(args.additional_config or {}), NAME: Tether()}
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
