"""The order of a publication, and what is left when it does not come to its end: told to a vLLM that only takes notes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import BrokenWeightsError, EngineError, ModelError
from asyncrl.ports import Json
from asyncrl.rollout.publication import Publisher, Shelf
from asyncrl.rollout.publication.placed import Where, opened
from asyncrl.world import RealWorld

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


class Notes:
    """A Control that writes down what it is told, has two workers, and fails or waits for ever at a command when told so."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.taken: Tensors = {}
        self.fails_at = ""
        self.hangs_at = ""
        self.is_hanging = asyncio.Event()

    async def _note(self, what: str) -> None:
        self.told.append(what)
        if what.split()[0] == self.fails_at:
            raise EngineError(f"no {what} today")
        if what.split()[0] == self.hangs_at:
            self.is_hanging.set()
            await asyncio.Event().wait()

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        await self._note("init")

    async def start_weight_update(self) -> None:
        await self._note("start")

    async def update_weights(self, update_info: Mapping[str, Json]) -> None:
        await self._note("update")
        self.taken = opened(Where(**json.loads(json.dumps(update_info["where"]))))

    async def finish_weight_update(self, version: str) -> None:
        await self._note(f"finish {version}")

    async def set_version(self, version: str) -> None:
        await self._note(f"version {version}")

    async def reset_caches(self) -> None:
        await self._note("caches")

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        await self._note(method)
        if method == "reload_weights":
            self.taken = load_file(Path(kwargs["weights_path"]) / "model.safetensors")
        return [{}, {}]


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    async with RealWorld() as world:
        shelf = Shelf(world=world)
        yield shelf
        await shelf.close()


@pytest.fixture
def model(make_lm: "Callable[..., PreTrainedModel]") -> "PreTrainedModel":
    return make_lm("llama", tie_word_embeddings=True)


@pytest.fixture
def folder(model: "PreTrainedModel", tmp_path: Path) -> str:
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _weights(model: "PreTrainedModel") -> Tensors:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


SHM = ["pause", "start", "update", "finish 7", "caches", "resume"]
DIRECTORY = ["pause", "reload_weights", "asyncrl_mend_tied_head", "version 7", "caches", "resume"]


@pytest.mark.parametrize(("transfer", "order"), [("shm", SHM), ("directory", DIRECTORY)])
async def test_weights_move_between_pause_and_resume(
    shelf: Shelf, model: "PreTrainedModel", folder: str, transfer: str, order: list[str]
) -> None:
    notes, publisher = Notes(), Publisher(transfer, folder, shelf)  # type: ignore[arg-type]
    await publisher.open(notes, 3)
    assert notes.told[0] == "asyncrl_version"
    assert notes.told[-1] == "version 3"
    for is_paused in (False, True):
        notes.told.clear()
        await publisher.publish(notes, 7, _weights(model), is_paused=is_paused)
        assert notes.told == (order[1:-1] if is_paused else order)
    assert {name: tensor.tolist() for name, tensor in notes.taken.items()} == {
        name: tensor.tolist() for name, tensor in _weights(model).items()
    }
    assert publisher.broken is None


async def test_a_snapshot_that_does_not_fit_changes_nothing(shelf: Shelf, model: "PreTrainedModel", folder: str) -> None:
    notes, publisher = Notes(), Publisher("shm", folder, shelf)
    await publisher.open(notes, 0)
    notes.told.clear()
    weights = _weights(model)
    with pytest.raises(EngineError, match="lacks: 'more'") as refusal:
        await publisher.publish(notes, 1, weights | {"more": torch.zeros(1)}, is_paused=False)
    assert not isinstance(refusal.value, BrokenWeightsError)
    assert notes.told == []
    await publisher.publish(notes, 1, weights, is_paused=False)  # and it goes on
    assert notes.told[-1] == "resume"


@pytest.mark.parametrize("fails_at", [command.split()[0] for command in SHM])
async def test_a_failure_once_it_has_begun_breaks_the_engine_for_good(
    shelf: Shelf, model: "PreTrainedModel", folder: str, fails_at: str
) -> None:
    notes, publisher = Notes(), Publisher("shm", folder, shelf)
    await publisher.open(notes, 0)
    notes.fails_at = fails_at
    with pytest.raises(BrokenWeightsError, match=rf"version 7 failed, .* not whole: no {fails_at}.* today"):
        await publisher.publish(notes, 7, _weights(model), is_paused=False)
    notes.told.clear()
    notes.fails_at = ""
    with pytest.raises(BrokenWeightsError, match="version 7 failed"):
        await publisher.publish(notes, 8, _weights(model), is_paused=False)
    assert notes.told == []
    assert "version 7 failed" in str(publisher.broken)


async def test_a_publication_cancelled_half_way_breaks_the_engine(shelf: Shelf, model: "PreTrainedModel", folder: str) -> None:
    notes, publisher = Notes(), Publisher("shm", folder, shelf)
    await publisher.open(notes, 0)
    notes.hangs_at = "update"
    task = asyncio.create_task(publisher.publish(notes, 5, _weights(model), is_paused=False))
    async with asyncio.timeout(30):
        await notes.is_hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert publisher.broken == "the publication of version 5 did not come to its end"
    assert notes.told[-1] == "update"  # it does not resume


async def test_a_vllm_without_our_extension_is_refused(shelf: Shelf, folder: str) -> None:
    notes = Notes()
    notes.fails_at = "asyncrl_version"
    with pytest.raises(EngineError, match=r"--worker-extension-cls asyncrl\.rollout\.vllm\.worker\.WorkerExtension, or it is gone"):
        await Publisher("directory", folder, shelf).open(notes, 0)


async def test_a_model_without_safetensors_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        await Publisher("shm", str(tmp_path), shelf).open(Notes(), 0)


async def test_many_engines_are_given_one_copy(shelf: Shelf, model: "PreTrainedModel", folder: str) -> None:
    engines = [(Notes(), Publisher("shm", folder, shelf)) for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        for notes, publisher in engines:
            group.create_task(publisher.open(notes, 0))
    weights = _weights(model)
    async with asyncio.TaskGroup() as group:
        for notes, publisher in engines:
            group.create_task(publisher.publish(notes, 1, dict(weights), is_paused=False))
    placed = await shelf.place(weights)
    for notes, _ in engines:
        assert notes.told[-1] == "resume"
    assert await shelf.place(weights) is placed
