"""The channel between a worker and its clients."""

import asyncio
import pickle
from typing import Any

from turnwise.serving.channel import Address, Channel, connect, listen

SECONDS = 60


class Unpickled:
    """Counts the objects of this class that were unpickled."""

    count = 0

    def __setstate__(self, state: object) -> None:
        Unpickled.count += 1

    def __getstate__(self) -> dict[str, int]:
        return {"any": 1}


async def test_messages_of_any_size_arrive_in_order() -> None:
    opened: asyncio.Queue[Channel] = asyncio.Queue()
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    async with asyncio.timeout(SECONDS):
        mine = await connect(await listen("127.0.0.1", opened.put_nowait))
        theirs = await opened.get()
        mine.received = arrived.put_nowait
        sent = [b"", b"x" * 3_000_000, {"a": [1.5, None]}, *range(100)]
        for message in sent:
            theirs.send(message)
        assert [await arrived.get() for _ in sent] == sent
        mine.close()
        await theirs.closed
        theirs.send("nobody reads this")


async def test_nothing_of_a_client_without_the_token_is_unpickled() -> None:
    opened: list[Channel] = []
    host, port, token = await listen("127.0.0.1", opened.append)
    data = pickle.dumps(Unpickled())
    frame = len(data).to_bytes(8, "big") + data
    async with asyncio.timeout(SECONDS):
        for beginning in (b"", b"x" * len(token)):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(beginning + frame * 10)
            assert await reader.read() == b""
            writer.close()
        assert not opened
        assert not Unpickled.count
        channel = await connect(Address(host, port, token))
        channel.send(Unpickled())
        while not Unpickled.count:
            await asyncio.sleep(0.01)
