"""Starting Ray, or joining the Ray of this program or of a cluster, and detecting that its head
process is gone. This module shuts down only what it has started."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import ray

from turnwise.core import fork_server, logs, process
from turnwise.core.aio import task_group
from turnwise.errors import InputError, TurnwiseError
from turnwise.internals.python import signal_handler_kept
from turnwise.internals.ray import lean_ray, report_to

_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 1.0
_PATIENCE, _CLUSTER_PATIENCE = 3, 30
"""Number of failed probes in a row after which Ray's head counts as gone: first if we started Ray,
then in a cluster, whose head may restart."""
_RECONNECT_SECONDS = 30
"""Time without a head after which the processes of a Ray that we started end themselves."""
_OBJECT_STORE_BYTES = 128 * 2**20
"""Weights travel by their own transports; Ray's store carries calls and samples only."""
_TOKEN_NEEDED = (
    "it asks for a token: set RAY_AUTH_MODE to token, and RAY_AUTH_TOKEN to what "
    "`ray get-auth-token` prints on the head's node"
)
"""A head requires an authentication token as soon as its user has one, and everybody who ever
started Ray without a cluster has one. A program that joins Ray at an address does not send its
token automatically."""


_lock = threading.Lock()
_ours: str | None = None
"""Ray's id of this process if `start_ray` connected it; None if it never did."""
_users = 0
"""Number of callers of `start_ray` that still use that connection."""


def start_ray(address: str | None, environment: Mapping[str, str] | None = None) -> float:
    """Join the Ray that this program is connected to, or connect the program to a cluster, or start
    Ray on this machine; return Ray's number of GPUs. `leave_ray` is the counterpart.

    If this call connects to Ray or starts it, all actors also get the variables of `environment`.

    Raises:
        InputError: when Ray cannot be reached, or the program is connected to a cluster that is not
            the one at `address`.
    """
    global _ours, _users
    with _lock:
        if ray.is_initialized():
            head = _join(address)
            _users += _is_ours()
        else:
            try:
                _connect(address, environment)
                _ours, _users = ray.get_runtime_context().get_worker_id(), 1
            except BaseException:
                ray.shutdown()  # the connection may be half made
                raise
            head = "on this machine"
        try:
            gpus = float(ray.cluster_resources().get("GPU", 0))
        except Exception as error:
            raise _unreachable(head, error) from error
    context = ray.get_runtime_context()
    logs.link_ray(str(Path(context.get_temp_dir(), context.get_session_name())))
    return gpus


def leave_ray() -> None:
    """Shut down the connection that `start_ray` made, with all actors of this program, once nobody
    uses it. A connection that the program made itself stays."""
    global _users
    with _lock:
        if ray.is_initialized() and _is_ours():
            _users -= 1
            if _users <= 0:
                ray.shutdown()


def outlives_run() -> bool:
    """Return whether Ray and all actors of this program go on when one more user leaves Ray."""
    return ray.is_initialized() and not (_is_ours() and _users == 1)


def _is_ours() -> bool:
    return _ours is not None and ray.get_runtime_context().get_worker_id() == _ours


def _join(address: str | None) -> str:
    """Check that this program's Ray can be used, and is at `address` unless that is None or
    "auto"; return where its head is."""
    from ray.util.client import ray as client

    if client.is_connected():
        raise InputError(
            "this program is connected to Ray by its client (ray://): connect with "
            "ray.init('auto') on a node of the cluster instead"
        )
    head = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto") and _endpoints(str(address)).isdisjoint(_endpoints(head)):
        raise InputError(
            f"ray_address is {address}, and this program is connected to Ray at {head}: leave "
            "ray_address out, or connect the program to that cluster"
        )
    try:
        _probe_port(head)
    except OSError as error:
        raise _unreachable(f"at {head}", error) from error
    return f"at {head}"


def _endpoints(address: str) -> set[tuple[str, int]]:
    """Return the pairs of IP address and port that an address resolves to."""
    host, port = _host_and_port(address)
    try:
        return {(str(found[4][0]), port) for found in socket.getaddrinfo(host, port)}
    except OSError:
        return {(host, port)}


def _unreachable(where: str, error: Exception) -> InputError:
    why = _TOKEN_NEEDED if "InvalidAuthToken" in str(error.__cause__) else error
    return InputError(f"Ray cannot be reached {where}: {why}")


def actor_variables() -> dict[str, str]:
    """Return the variables that each of our actors needs, whoever started Ray: the path of imports
    and the run's secret."""
    # Plug-ins are imported from the working directory, in actors as in this process.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    secret = os.environ.setdefault(process.SECRET, secrets.token_hex(16))
    return {"PYTHONPATH": paths, process.SECRET: secret}


def _connect(address: str | None, environment: Mapping[str, str] | None) -> None:
    """Connect this program to a cluster, or start Ray on this machine."""
    variables = {**(environment or {}), **actor_variables()}
    options: dict[str, object] = {
        "log_to_driver": False,
        "logging_level": logs.quiet("ray"),
        "logging_format": logs.FILE_FORMAT,
        "runtime_env": {"env_vars": variables},
    }
    lean: AbstractContextManager[None] = nullcontext()
    if address is None:
        # Other machines have no fork server, so workers of a cluster start without one. So do
        # workers with an `environment`, because libraries that the server has imported have read
        # their variables.
        server = None if environment else fork_server.address()
        if server is not None:
            variables[fork_server.VARIABLE] = server
        lean = lean_ray(None if server is None else fork_server.CLIENT)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray starts its workers at niceness 15, where any other program would starve the engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # they would lack our variables
    try:
        if address is None:
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_RECONNECT_SECONDS))
            # Do not record every call for Ray's dashboard: the memory of Ray's head would grow.
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
            options["object_store_memory"] = _OBJECT_STORE_BYTES
        else:
            _probe_port(address)
        with signal_handler_kept(signal.SIGTERM), lean:
            # Without "local", Ray would join a cluster that is still running on this machine.
            ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises a plain Exception if a node starts too slowly
        raise _unreachable(f"at {address}" if address else "on this machine", error) from error
    report_to(lambda lines: logging.getLogger("ray").info("%s", "\n".join(map(str, lines))))


def join_ray(address: str, namespace: str) -> None:
    """Connect a child process to the cluster that its parent is connected to."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, on_sigterm)  # instead of Ray's handler


def _probe_port(address: str) -> None:
    """Fail at once if nothing listens at the address; Ray itself would try for minutes."""
    if "://" in address:
        raise ValueError("give the cluster's own address, host:port or `auto`")
    host, port = _host_and_port(address)
    if port:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()


def _host_and_port(address: str) -> tuple[str, int]:
    """Split an address (for IPv6, `[::1]:6379`) into host and port. The port is 0 if the address
    does not contain a port, as in `auto`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdigit() else 0


@asynccontextmanager
async def watching_ray(address: str | None) -> AsyncIterator[None]:
    """Raise TurnwiseError from the `async with` block when Ray's head process has accepted no
    connection for some seconds, because without the head, no actor can be started, found or
    ended."""
    head = ray.get_runtime_context().gcs_address
    patience = _PATIENCE if address is None and _is_ours() else _CLUSTER_PATIENCE

    async def watch() -> None:
        host, port = _host_and_port(head)
        failures = 0  # in a row
        while failures < patience:
            await asyncio.sleep(_PROBE_SECONDS)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                failures = 0
            except (OSError, TimeoutError):
                failures += 1
        raise TurnwiseError(
            f"Ray's head process (gcs_server at {head}) is gone, which ends the run"
        )

    async with task_group() as tasks:
        watching = tasks.create_task(watch())
        yield
        watching.cancel()
