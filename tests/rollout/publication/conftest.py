"""Real vLLMs for the tests of publication: two for the whole session."""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.rollout.publication.kit import TIED, UNTIED, Start, Vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied(make_lm: "Callable[..., PreTrainedModel]", tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    """One worker; the head is the embedding."""
    async for vllm in Start(make_lm, tmp_path_factory.mktemp("tied"), TIED, 1).run():
        yield vllm


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied(make_lm: "Callable[..., PreTrainedModel]", tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    """Two workers by tensor parallelism; a head of its own."""
    async for vllm in Start(make_lm, tmp_path_factory.mktemp("untied"), UNTIED, 2).run():
        yield vllm
