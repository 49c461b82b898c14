"""Two clients of one server, which number and name everything alike: whatever one does, the other
sees nothing of it. Without engines: see `bench`; `tests/engine/test_shared_cache.py` has those."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.tinker.bench import Client
from tests.tinker.test_tinker_state import get, load, sampled, save, snapshot, train


async def as_other(request: httpx.Request) -> None:
    request.headers["x-api-key"] = "tml-two"


async def diverge(other: Client) -> None:
    await train(other, 1, 1)
    await other.step(3, learning_rate=1e36)
    await train(other, 4, 1)
    await snapshot(other, 6, 0)
    await sampled(other, f"{other.session}:sample:0", 0)


async def vanish(other: Client) -> None:
    await train(other, 1, 1)
    await other.tree("asample", {"sampling_session_id": await snapshot(other, 3, 0)} | ASKED)
    await other.tree(f"sessions/{other.session}/finish")


async def overwrite(other: Client) -> None:
    for seq in (1, 4):
        await train(other, seq, 1)
        assert "path" in await save(other, seq + 2, "latest", overwrite=True)
    await load(other, f"tinker://{other.model}/weights/latest")


ASKED: dict[str, Any] = {
    "seq_id": 0,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "sampling_params": {"max_tokens": 60},
}


@pytest.mark.parametrize("deed", [diverge, vanish, overwrite], ids=lambda deed: deed.__name__)
async def test_a_client_sees_nothing_of_what_another_does(
    client: Client, deed: Callable[[Client], Awaitable[None]]
) -> None:
    other = Client(
        httpx.AsyncClient(
            transport=client.http._transport,
            base_url="http://server",
            event_hooks={"request": [as_other]},
        )
    )
    await client.open()
    await other.open()
    await train(client, 1, 2)
    path = (await save(client, 5, "latest"))["path"]
    sampler = await snapshot(client, 6, 0)
    expected = await sampled(client, sampler, 0), await train(client, 7, 2)
    await load(client, path)
    again, _ = await asyncio.gather(train(client, 1, 2), deed(other))
    assert (await sampled(client, sampler, 0), again) == expected
    await load(client, path, 2)
    assert await train(client, 1, 2) == expected[1]
    listed = (await get(client, "checkpoints"))["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]
    assert (await other.post("weights_info", {"tinker_path": path})).status_code == 404
