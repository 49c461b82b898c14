"""Addresses of listeners: ports of a range, ports that are taken, Ray's head, open servers."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from turnwise.config import ServingConfig
from turnwise.core import ray
from turnwise.core.ray import _host_and_port, _probe_port, watching_ray
from turnwise.errors import InputError, TurnwiseError
from turnwise.serving import channel, front_process
from turnwise.serving.openai.address import listen

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[str]:
    """A range of three ports, the middle one of which is taken."""
    for _ in range(100):
        with socket.socket() as middle, socket.socket() as first, socket.socket() as last:
            middle.bind((HOST, 0))
            middle.listen()
            number = middle.getsockname()[1]
            try:
                first.bind((HOST, number - 1))
                last.bind((HOST, number + 1))
            except OSError:
                continue
            first.close()
            last.close()
            yield f"{number - 1}-{number + 1}"
            return
    raise AssertionError("no three ports in a row are free")


async def test_listeners_take_the_free_ports_of_a_range(ports: str) -> None:
    first, last = map(int, ports.split("-"))
    with listen(HOST, 0, ports) as one:
        assert one.getsockname()[1] == first
        worker = await channel.listen(HOST, lambda opened: opened.close(), ports)
        assert worker.port == last
        with pytest.raises(InputError, match=rf"no port of {ports} \(serving.ports\) is free on"):
            listen(HOST, 0, ports)
        await (await channel.connect(worker)).closed


@pytest.mark.parametrize("ports", ["40000", "2-1", "0-5", "1-65536", "a-b", "-", "1-2-3", " 1-2"])
def test_a_range_of_ports_is_checked(ports: str) -> None:
    with pytest.raises(ValidationError, match="is no range of ports such as 40000-40999"):
        ServingConfig(ports=ports)
    assert ServingConfig(ports="40000-40000").ports == "40000-40000"


async def test_a_session_process_whose_port_is_taken_gets_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_process, "_PORT_SECONDS", 1.0)
    assert await front_process._free_port(HOST, 0) == 0
    with listen(HOST, 0) as taken:
        port = taken.getsockname()[1]
        asyncio.get_running_loop().call_later(0.3, taken.close)  # by the process that died
        assert await front_process._free_port(HOST, port) == port
    assert not caplog.records
    with listen(HOST, 0) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        assert await front_process._free_port(HOST, port) == 0
    assert f"cannot listen on {HOST}:{port}" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_rays_head_is_found_at_either_kind_of_address(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "_PROBE_SECONDS", 0.05)
    try:
        head = listen(host, 0)
    except InputError:
        pytest.skip(f"this machine has no {host}")
    port = head.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert _host_and_port(address) == (host, port)
    context = SimpleNamespace(gcs_address=address, get_worker_id=lambda: "")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)

    async def watch() -> None:
        async with watching_ray(None):
            await asyncio.Event().wait()

    with head:
        _probe_port(address)
        watching = asyncio.create_task(watch())
        for _ in range(4):  # the probe above, and three of the watch
            connection, _ = await asyncio.to_thread(head.accept)
            connection.close()
        assert not watching.done()
    async with asyncio.timeout(60):
        with pytest.raises(TurnwiseError, match=r"Ray's head process \(gcs_server at .* is gone"):
            await watching
    with pytest.raises(OSError, match="refused"):
        _probe_port(address)


def test_an_address_without_a_port_is_rays_own_business() -> None:
    _probe_port("auto")
    with pytest.raises(ValueError, match="host:port or `auto`"):
        _probe_port("ray://host:10001")


def test_a_ray_that_we_started_requires_a_token(ray_started: None) -> None:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    assert is_token_auth_enabled()
    assert os.environ["RAY_AUTH_MODE"] == "token"
