"""New weights by way of the engine over HTTP: publications that fail, are cut off, or wait for the requests at the server."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from aiohttp import web

from asyncrl.errors import BrokenWeightsError, EngineError
from asyncrl.ports import GenerateRequest
from tests.rollout.openai.fake_server import GENERATE, FakeServer
from tests.rollout.openai.kits import Fakes, Snapshot, fake_snapshot, spell, until

RequestMaker = Callable[..., GenerateRequest]


async def test_a_publication_that_fails_half_way_ends_the_engine(fakes: Fakes, request_of: RequestMaker) -> None:
    for path in ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"):
        server, url = fakes.servers.add()
        async with fakes.engine(url) as engine:
            task = asyncio.create_task(engine.generate(request_of(max_tokens=100)))
            fakes.servers.call(server.pause)
            await until(lambda server=server: server.num_running == 1)  # type: ignore[misc]
            server.refusals[path] = (500, '{"error": {"message": "no luck"}}')
            with pytest.raises(BrokenWeightsError, match=f"version 1 failed.*{path} answered 500 .*no luck"):
                await engine.publish(1, fake_snapshot(1))
            with pytest.raises(EngineError, match="version 1 failed"):
                await task
            assert "version 1 failed" in str(engine.failure)


async def test_caches_that_are_kept_end_the_engine(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    server.keeps_cache = True
    async with fakes.engine(url) as engine:
        with pytest.raises(BrokenWeightsError, match="kept its prefix cache"):
            await engine.publish(1, fake_snapshot(1))


async def test_a_snapshot_that_does_not_fit_changes_nothing(fakes: Fakes, request_of: RequestMaker) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.calls.clear()
        with pytest.raises(EngineError, match="'version' has shape"):
            await engine.publish(1, Snapshot(tensors={"version": torch.zeros(2)}))
        with pytest.raises(EngineError, match="version -1: the engine already has version 0"):
            await engine.publish(-1, fake_snapshot(0))
        assert server.calls == []
        assert (await engine.generate(request_of(max_tokens=3))).token_versions() == [0, 0, 0]
        assert engine.version == 0


async def test_an_engine_of_fixed_weights_takes_none(fakes: Fakes) -> None:
    _, url = fakes.servers.add()
    async with fakes.engine(url, trains=False) as engine:
        with pytest.raises(EngineError, match="opened without a way to publish"):
            await engine.publish(1, fake_snapshot(1))
        assert engine.failure is None


async def test_a_publication_cut_off_half_way_ends_the_engine(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    came = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hang(request: web.Request) -> web.Response:
        loop.call_soon_threadsafe(came.set)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async with fakes.engine(url) as engine:
        server.handlers["/update_weights"] = hang
        task = asyncio.create_task(engine.publish(1, fake_snapshot(1)))
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "version 1 did not come to its end" in str(engine.failure)


async def drop(request: web.Request) -> web.Response:
    """Without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_an_update_whose_answer_is_lost_is_not_repeated(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.handlers["/update_weights"] = drop
        with pytest.raises(BrokenWeightsError, match="ServerDisconnectedError"):
            await engine.publish(1, fake_snapshot(1))
        assert server.calls.count("/update_weights") == 1


async def test_a_pause_whose_answer_is_lost_ends_the_engine(fakes: Fakes) -> None:
    server, url = fakes.servers.add()
    async with fakes.engine(url) as engine:
        server.handlers["/pause"] = drop
        server.calls.clear()
        with pytest.raises(EngineError, match="ServerDisconnectedError"):
            await engine.pause()
        assert server.calls.count("/pause") == 3  # it may be repeated
        assert "the server is gone" in str(engine.failure)


# --- without versions -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(fakes: Fakes) -> tuple[FakeServer, str]:
    """A server with OpenAI's route alone."""
    server, url = fakes.servers.add()
    server.refusals[GENERATE] = (404, "")
    return server, url


async def test_a_publication_waits_for_the_requests_at_the_server(
    fakes: Fakes, plain: tuple[FakeServer, str], request_of: RequestMaker
) -> None:
    server, url = plain
    async with fakes.engine(url, context_len=3000) as engine:
        fakes.servers.call(server.pause)
        old = asyncio.create_task(engine.generate(request_of(max_tokens=2000)))
        await until(lambda: server.num_running == 1)
        publication = asyncio.create_task(engine.publish(1, fake_snapshot(1)))
        await asyncio.wait({publication}, timeout=0.02)
        new = asyncio.create_task(engine.generate(request_of(max_tokens=9)))
        await asyncio.wait({new}, timeout=0.02)
        assert (server.num_running, "/update_weights" in server.calls) == (1, False)
        fakes.servers.call(server.go_on)
        await publication
        assert old.done()
        assert set(old.result().token_versions()) == {0}
        assert set((await new).token_versions()) == {1}
        assert len(old.result().token_ids) == 2000
        assert server.version == 1


async def test_a_pause_waits_for_them_too_and_weights_may_come_meanwhile(
    fakes: Fakes, plain: tuple[FakeServer, str], request_of: RequestMaker
) -> None:
    server, url = plain
    async with fakes.engine(url, context_len=3000) as engine:
        fakes.servers.call(server.pause)
        old = asyncio.create_task(engine.generate(request_of(max_tokens=1000)))
        await until(lambda: server.num_running == 1)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.wait({pausing}, timeout=0.02)
        assert not pausing.done()
        fakes.servers.call(server.go_on)
        await pausing
        assert old.done()
        new = asyncio.create_task(engine.generate(request_of(max_tokens=9)))
        await engine.publish(1, fake_snapshot(1))
        await engine.pause()  # twice is once
        assert (engine.stats()["waiting"], engine.stats()["running"], new.done()) == (1, 0, False)
        await engine.resume()
        await engine.resume()
        assert ((await old).version_spans[0].version, (await new).version_spans[0].version) == (0, 1)
        await engine.pause()  # resuming twice was once, too
        late = asyncio.create_task(engine.generate(request_of(max_tokens=1)))
        await asyncio.wait({late}, timeout=0.02)
        assert not late.done()
        await engine.resume()
        await late


async def test_a_stop_string_closes_the_connection(fakes: Fakes, plain: tuple[FakeServer, str], request_of: RequestMaker) -> None:
    server, url = plain
    async with fakes.engine(url, context_len=3000) as engine:
        whole = await engine.generate(request_of(max_tokens=50))
        cut = await engine.generate(request_of(max_tokens=2000, stop_strings=(spell(whole.token_ids[9:12]),)))
        assert len(cut.token_ids) <= 12
        await until(lambda: server.num_running == 0)
        assert server.num_unfinished == 1
