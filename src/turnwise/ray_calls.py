"""Ray with deadlines: starting it, and waiting for an actor's reply by name."""

import asyncio
import ctypes
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group

from turnwise import fork_server
from turnwise.errors import DeadlineError, InputError, TurnwiseError

_T = TypeVar("_T")
_CONNECT_SECONDS = 5.0
_CPU_SHARE = 0.001
_SIGNAL_HANDLER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(
    ("PyOS_getsig", ctypes.pythonapi)
)
_SET_SIGNAL_HANDLER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    ("PyOS_setsig", ctypes.pythonapi)
)
"""The C handlers, for any thread; Python's `signal` sets them in the main thread alone."""
_OBJECT_STORE_BYTES = 128 * 2**20
"""Weights travel by their own transports; Ray's store carries calls and samples only."""


def start_ray(address: str | None) -> float:
    """Connect to a cluster, or start Ray on this machine; returns the GPUs it has.

    Raises:
        InputError: when no cluster answers at the address.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Plug-ins are imported from the working directory, in actors as in this process.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    variables = {"PYTHONPATH": paths}
    options["runtime_env"] = {"env_vars": variables}
    # Other machines have no fork server: in a cluster, workers start plainly.
    if address is None and (server := fork_server.address()) is not None:
        variables[fork_server.VARIABLE] = server
        options["runtime_env"]["py_executable"] = shlex.join(fork_server.command(server))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray starts its workers at niceness 15: whatever else runs here would starve the engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # workers without our variables
    handler = _SIGNAL_HANDLER(signal.SIGTERM)
    try:
        if address is None:
            # "local": without it Ray would join a cluster that somebody left running here.
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        else:
            _knock(address)
            ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        where = f"at {address}" if address else "on this machine"
        raise InputError(f"Ray cannot be reached {where}: {error}") from error
    finally:
        # Ray puts its own in its place, below Python, which prints C++ frames and aborts.
        _SET_SIGNAL_HANDLER(signal.SIGTERM, handler)
    return float(ray.cluster_resources().get("GPU", 0))


def join_ray(address: str, namespace: str) -> None:
    """Connect a child process to the cluster that its parent is connected to."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray put its own there


def _knock(address: str) -> None:
    """Fail at once where nobody listens; Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ValueError("give the cluster's own address, host:port or `auto`")
    if port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


async def reserve(
    count: int, gpus: float, resources: Mapping[str, float], who: str, key: str, seconds: float
) -> Any:
    """A placement group with a bundle for each of `count` actors, near each other if possible.

    Raises:
        DeadlineError: when the cluster has no room for all within `seconds`.
    """
    # A bundle must hold something; actors share the cores as the operating system has it.
    bundle = {"CPU": _CPU_SHARE, **({"GPU": gpus} if gpus else {}), **resources}
    group = placement_group([bundle] * count, strategy="PACK")
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items() if name != "CPU")
    what = f"a cluster with {asked or 'room'} for each of {count} {who}"
    try:
        await reply_of(group.ready(), what, f"turn up ({key}.resources, GPUs)", seconds)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


async def reply_of(
    reply: Awaitable[_T],
    who: str,
    what: str,
    seconds: float,
    failure: type[TurnwiseError] = TurnwiseError,
) -> _T:
    """Wait for an actor.

    Raises:
        DeadlineError: when it did not answer within `seconds`.
        TurnwiseError: the one that the actor raised; or `failure` when it raised anything
            else, or died.
    """
    try:
        async with asyncio.timeout(seconds):
            return await reply
    except TimeoutError:
        raise DeadlineError(f"{who} did not {what} within {seconds:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, TurnwiseError):
            raise error.cause from None
        raise failure(f"{who} failed to {what}: {error.cause!r}") from error
    except RayActorError as error:
        raise failure(f"the process of {who} died") from error


def replies_of(
    replies: Mapping[str, Any], what: str, seconds: float, failure: type[TurnwiseError]
) -> list[Any]:
    """Wait, without an event loop, for the replies of several actors, given by their names.

    Raises:
        DeadlineError: when not all answered within `seconds`.
        TurnwiseError: `failure`, as soon as one of them raised anything or died.
    """
    references = list(replies.values())
    try:
        return list(ray.get(references, timeout=seconds))
    except GetTimeoutError:
        _, late = ray.wait(references, num_returns=len(references), timeout=0)
        who = ", ".join(name for name, reply in replies.items() if reply in late)
        raise DeadlineError(f"{who} did not {what} within {seconds:g} s") from None
    except (RayTaskError, RayActorError) as error:
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        causes = [_cause(reply, who, what) for who, reply in replies.items() if reply in done]
        raise failure("; ".join(filter(None, causes))) from error


def _cause(reply: Any, who: str, what: str) -> str:
    try:
        ray.get(reply)
    except RayTaskError as error:
        return f"{who} failed to {what}: {error.cause!r}"
    except RayActorError:
        return f"the process of {who} died"
    return ""
