"""The channel between a worker and its clients."""

import asyncio
import hmac
import pickle
from typing import Any

import pytest

from turnwise.serving import channel as channels
from turnwise.serving.channel import Address, Channel, connect, listen

SECONDS = 60


class Unpickled:
    """Counts the objects of this class that were unpickled."""

    count = 0

    def __setstate__(self, state: object) -> None:
        Unpickled.count += 1

    def __getstate__(self) -> dict[str, int]:
        return {"any": 1}


def frame(message: object) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(8, "big") + data


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
    async with asyncio.timeout(SECONDS):
        for beginning in (b"", b"x" * 64, token + token):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(beginning + frame(Unpickled()) * 10)
            challenge = await reader.read()
            assert len(challenge) == 32, "a proof was given to one that gave none"
            writer.close()
        with pytest.raises(ConnectionError):
            await connect(Address(host, port, b"another token"))
        assert not opened
        assert not Unpickled.count
        channel = await connect(Address(host, port, token))
        channel.send(Unpickled())
        while not Unpickled.count:
            await asyncio.sleep(0.01)


async def test_a_recorded_handshake_opens_no_other_connection() -> None:
    """The token is never sent; a proof fits the challenges of its own connection only."""
    opened: list[Channel] = []
    host, port, token = await listen("127.0.0.1", opened.append)
    heard: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a whole connection, and keep all of it."""
        inner_reader, inner_writer = await asyncio.open_connection(host, port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                heard.append(data)
                sink.write(data)

        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    relaying = await asyncio.start_server(relay, host, 0)
    async with asyncio.timeout(SECONDS):
        through = relaying.sockets[0].getsockname()[1]
        channel = await connect(Address(host, through, token))
        assert token not in b"".join(heard)
        of_client = [block for block in heard if len(block) == 32]
        for first in of_client:
            for second in of_client:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(first + second)
                assert len(await reader.read()) == 32
                writer.close()
        assert len(opened) == 1
        channel.close()
    relaying.close()


async def test_a_client_unpickles_nothing_from_an_unproven_listener() -> None:
    """Another program may have taken the port of a worker that died."""
    before, token = Unpickled.count, b"t" * 32

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"c" * 32)
        theirs = await reader.readexactly(32)
        proof = await reader.readexactly(32)
        assert proof == hmac.digest(token, b"client" + b"c" * 32 + theirs, "sha256")
        writer.write(proof + frame(Unpickled()))  # the client's own proof is none of the worker
        await reader.read()
        writer.close()

    pretending = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = pretending.sockets[0].getsockname()[1]
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ConnectionError, match="does not know the token"):
            await connect(Address("127.0.0.1", port, token))
    assert Unpickled.count == before
    pretending.close()


async def test_connections_without_a_proof_are_few_and_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 16
    monkeypatch.setattr(channels, "_PROOF_SECONDS", 0.5)
    monkeypatch.setattr(channels, "_MAX_UNPROVEN", most)
    opened: list[Channel] = []
    address = await listen("127.0.0.1", opened.append)
    async with asyncio.timeout(SECONDS):
        idle = [await asyncio.open_connection(*address[:2]) for _ in range(most + 10)]
        for reader, _ in idle[:10]:  # the oldest
            await reader.read()
        channel = await connect(address)  # which a crowd does not keep out
        for reader, writer in idle[10:]:
            await reader.read()
            writer.close()
        late, writer = await asyncio.open_connection(*address[:2])
        await late.read()  # the time for a proof has passed for the channel, too
        writer.close()
        assert not channel.closed.done()
        assert len(opened) == 1
        channel.close()


async def test_an_unreadable_message_closes_the_channel_with_a_reason() -> None:
    opened: asyncio.Queue[Channel] = asyncio.Queue()
    async with asyncio.timeout(SECONDS):
        mine = await connect(await listen("127.0.0.1", opened.put_nowait))
        theirs = await opened.get()
        theirs._write((9).to_bytes(8, "big") + b"no pickle")
        assert "a message cannot be read: UnpicklingError" in await mine.closed
        assert await theirs.closed == ""
