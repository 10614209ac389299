"""Is vLLM there, and does it import? Asked before a run is anything; nothing here imports it but `import_vllm`."""

import importlib
import logging
import os
import threading
from importlib.util import find_spec

from asyncrl.errors import ConfigError
from asyncrl.wording import named_message_of

MODULES = ("vllm", "vllm.v1.engine.async_llm")


def check_installed(wanted_by: str = 'rollout.name = "vllm"') -> None:
    """Raises ConfigError when there is no vLLM. Imports nothing."""
    if find_spec("vllm") is None:
        raise ConfigError(
            f"{wanted_by} needs vLLM, which is not installed: pip install 'asyncrl[vllm]' on a machine with a GPU, or "
            "make setup-vllm for its CPU build"
        )


def import_vllm() -> None:
    """Seconds of work; nothing the second time. Raises ConfigError when it is not there, or is broken, with the cause."""
    check_installed()
    errors: list[Exception] = []
    # A thread of its own: vLLM keeps the errors of packages that it can do without, and with them the frames that had led there,
    # with all that they held.
    thread = threading.Thread(target=_import, args=(errors,), name="asyncrl-import", daemon=True)
    thread.start()
    thread.join()
    for error in errors:
        raise ConfigError(
            f"vLLM is installed, but cannot be imported: {named_message_of(error)}; often a package beside it is of another build "
            "than torch: remove torchvision, torchaudio and torchcodec"
        ) from error


def _import(errors: list[Exception]) -> None:
    try:
        _quiet()
        for module in MODULES:
            importlib.import_module(module)
    except Exception as error:  # whatever a package beside it raises while it is imported; raised where it is waited for
        errors.append(error)


def _quiet() -> None:
    """vLLM sets its log level when an engine starts, and has told the terminal about missing GPU packages by then; so has torch."""
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
