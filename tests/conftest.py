"""Settings for all tests: one hypothesis profile without time limits; torch seeded and single-threaded wherever it is loaded.

And the quick start's tokenizer, model folder and template, made once for all; imported inside, as most tests need no torch.
"""

import asyncio
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from asyncrl.agents.chat_template import ChatTemplate
    from asyncrl.cluster import ForkServer

# hypothesis has a profile of its own for CI machines, with a limit a example: that would be a hidden time assertion.
for _profile in ("default", "ci"):
    settings.register_profile(_profile, deadline=None, max_examples=40)
settings.load_profile("default")


_loops: "weakref.WeakKeyDictionary[asyncio.BaseEventLoop, traceback.StackSummary]" = weakref.WeakKeyDictionary()
"""Every event loop of these processes, and where it was made."""


def _note_loop(loop: asyncio.BaseEventLoop, plain: Any = asyncio.BaseEventLoop.__init__) -> None:
    plain(loop)
    _loops[loop] = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), limit=8, lookup_lines=False)


asyncio.BaseEventLoop.__init__ = _note_loop  # type: ignore[method-assign, assignment]


@pytest.fixture(autouse=True)
def _no_loop_left_open() -> Iterator[None]:
    """A loop that a test leaves open would fail another test, whenever the collector meets it: said here, where it was made."""
    before = set(_loops)
    yield
    new = [(loop, stack) for loop, stack in _loops.items() if loop not in before and not loop.is_closed()]
    # That of all vLLM tests together is made in the first of them, and pytest-asyncio closes it after the last.
    left = [(loop, stack) for loop, stack in new if not any(frame.name == "_scoped_runner" for frame in stack)]
    for loop, _ in left:
        loop.close()
    assert not left, "an event loop was left open; it was made here:\n" + "".join(reversed(left[0][1].format()))


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    """pytest-randomly seeds Python and numpy only. Tests without torch must not pay for importing it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_lm() -> "Callable[..., PreTrainedModel]":
    """make_lm("qwen2", "qwen3" or "llama", seed=0, **config): a random causal language model of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # saving a model here must not print into what a test captures

    kinds: dict[str, tuple[Any, Any]] = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}

    def make(kind: str, *, seed: int = 0, **config: object) -> "PreTrainedModel":
        torch.manual_seed(seed)
        config_of, model_of = kinds[kind]
        model: PreTrainedModel = model_of(config_of(**{**sizes, **heads, **config}))
        model.train(False)
        return model

    return make


@pytest.fixture(scope="session")
def quickstart_tokenizer() -> "PreTrainedTokenizerFast":
    from asyncrl.examples.calculator import demonstrations
    from asyncrl.examples.demonstrator import MECHANICS
    from asyncrl.examples.tiny_model import train_tokenizer
    from asyncrl.tools import load_tools

    schemas = [tool.schema for tool in load_tools(["calculator"]).values()]
    return train_tokenizer(demonstrations(MECHANICS, 300, seed=1, name="mechanics"), schemas)


@pytest.fixture(scope="session")
def model_folder(quickstart_tokenizer: "PreTrainedTokenizerFast", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random model, with its tokenizer and template."""
    from asyncrl.examples.tiny_model import build_model, save_model

    folder = tmp_path_factory.mktemp("quickstart") / "model"
    save_model(build_model(quickstart_tokenizer, seed=1), quickstart_tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def template(model_folder: Path) -> "ChatTemplate":
    """Its chat template with the calculator's schema."""
    from asyncrl.agents.chat_template import load_chat_template
    from asyncrl.config import ModelConfig
    from asyncrl.tools import load_tools

    return load_chat_template(ModelConfig(path=str(model_folder)), [load_tools(["calculator"])["calculator"].schema])


@pytest.fixture(scope="session")
def fork_server() -> "Iterator[ForkServer]":
    """One for all tests that start ranks: the heavy imports are paid once."""
    from asyncrl.cluster import ForkServer

    server = ForkServer(["torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "asyncrl.training.model"])
    yield server
    server.close()


@pytest.fixture
def run_on_ranks(fork_server: "ForkServer", monkeypatch: pytest.MonkeyPatch) -> "Callable[..., list[Any]]":
    """run_on_ranks(2, function, payload): what `function(rank: Rank, payload)` returns in each of 2 new ranks, in rank order.

    The function is a plain one of the test's file, which each rank imports (its fixtures are not there). Payload and result are
    pickled: plain data, tensors, classes of the product. timeout_s: without a sign of life. Mark the test with `ranks`.
    """
    from asyncrl.cluster import RankGroup

    def run(num_ranks: int, function: "Callable[..., Any]", payload: object = None, *, timeout_s: float = 60.0) -> list[Any]:
        monkeypatch.syspath_prepend(Path(__file__).parent / "cluster")
        group = RankGroup(num_ranks, "run_function:serve", timeout_s=timeout_s, server=fork_server)
        try:
            group.start((function.__code__.co_filename, function.__name__))
            return group.call("run", payload)
        finally:
            group.close()

    return run
