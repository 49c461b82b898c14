"""Ray with deadlines: starting it, and waiting for an actor's reply by name."""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import placement_group, remove_placement_group

from turnwise import fork_server, logs, secret
from turnwise.errors import DeadlineError, InputError, TurnwiseError

_T = TypeVar("_T")
_CONNECT_SECONDS = 5.0
_KNOCK_SECONDS = 1.0
_PATIENCE, _CLUSTER_PATIENCE = 3, 30
"""Knocks in a row that Ray's head may miss: our own, and a cluster's, which may be restarted."""
_RECONNECT_SECONDS = 30
"""After so long without its head, each process of a Ray that we started ends itself."""
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
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logs.quiet("ray"),
        "logging_format": logs.FILE_FORMAT,
    }
    # Plug-ins are imported from the working directory, in actors as in this process.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    variables = {"PYTHONPATH": paths, secret.VARIABLE: secret.make()}
    options["runtime_env"] = {"env_vars": variables}
    # Other machines have no fork server: in a cluster, workers start plainly.
    if address is None and (server := fork_server.address()) is not None:
        variables[fork_server.VARIABLE] = server
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray starts its workers at niceness 15: whatever else runs here would starve the engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # workers without our variables
    handler = _SIGNAL_HANDLER(signal.SIGTERM)
    try:
        if address is None:
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_RECONNECT_SECONDS))
            # "local": without it Ray would join a cluster that somebody left running here.
            with _lean_ray(fork_server.VARIABLE in variables):
                context = ray.init(
                    address="local", object_store_memory=_OBJECT_STORE_BYTES, **options
                )
        else:
            _knock(address)
            context = ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        where = f"at {address}" if address else "on this machine"
        raise InputError(f"Ray cannot be reached {where}: {error}") from error
    finally:
        # Ray puts its own in its place, below Python, which prints C++ frames and aborts.
        _SET_SIGNAL_HANDLER(signal.SIGTERM, handler)
    # Ray prints what its processes report (and the last lines of their logs) past any logger.
    ray._private.worker.print_to_stdstream = _log
    logs.link_ray(context.address_info["session_dir"])
    return float(ray.cluster_resources().get("GPU", 0))


@contextmanager
def _lean_ray(forked: bool) -> Iterator[None]:
    """Have `ray.init` start less, and its workers sooner.

    Ray's dashboard, autoscaler and log collector are not used here, and each process imports Ray
    by itself. So does the script by which Ray starts a worker; where workers are `forked`, the
    fork server's client replaces it.
    """
    node = ray._private.node.Node
    begin, start_dashboard = node.__init__, node.start_api_server

    def begin_lean(self: Any, ray_params: Any, *args: Any, **kwargs: Any) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False)
        if forked:
            ray_params.update(setup_worker_path=str(fork_server.CLIENT))
        begin(self, ray_params, *args, **kwargs)

    node.__init__, node.start_api_server = begin_lean, lambda self, **_: None
    try:
        yield
    finally:
        node.__init__, node.start_api_server = begin, start_dashboard


def _log(report: Mapping[str, Any], ignore_prefix: bool) -> None:
    logging.getLogger("ray").info("%s", "\n".join(map(str, report["lines"])))


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


@asynccontextmanager
async def watching_ray(address: str | None) -> AsyncIterator[None]:
    """End the `async with` block when Ray's head process is gone, without which no actor can be
    started, found or ended.

    Args:
        address: As `start_ray` got it.

    Raises:
        TurnwiseError: when the head took no connection for seconds.
    """
    task, head = asyncio.current_task(), ray.get_runtime_context().gcs_address
    patience = _PATIENCE if address is None else _CLUSTER_PATIENCE
    gone = False

    async def watch() -> None:
        nonlocal gone
        await _until_silent(head, patience)
        gone = True
        if task is not None:
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        if gone and task is not None:
            task.uncancel()
            raise TurnwiseError(
                f"Ray's head process (gcs_server at {head}) is gone, and the run with it"
            ) from None


async def _until_silent(address: str, patience: int) -> None:
    """Return when an address took no connection `patience` times in a row."""
    host, _, port = address.rpartition(":")
    failures = 0
    while failures < patience:
        await asyncio.sleep(_KNOCK_SECONDS)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            failures = 0
        except (OSError, TimeoutError):
            failures += 1


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
    except RayError as error:
        raise failure(death(who, error)) from error


def death(who: str, error: BaseException) -> str:
    """Ray's error for an actor that will not answer, as a sentence."""
    why = next((why for kind, why in _DEATHS.items() if isinstance(error, kind)), "")
    if "its node has died" in str(error):  # an ActorDiedError says so in words alone
        why = _DEATHS[NodeDiedError]
    return f"the process of {who} died{why and f' ({why})'}"


def is_death(error: BaseException | None) -> bool:
    """Whether `reply_of` or `replies_of` raised this because an actor died."""
    cause = error.__cause__ if isinstance(error, TurnwiseError) else None
    return isinstance(cause, RayError) and not isinstance(cause, RayTaskError)


_DEATHS: dict[type[RayError], str] = {
    OutOfMemoryError: "its node ran out of memory, and Ray ended it",
    NodeDiedError: "its node is gone",
    LocalRayletDiedError: "Ray's own process on its node is gone",
    ActorUnschedulableError: "no node has room for it",
    ActorUnavailableError: "it cannot be reached",
}
"""What Ray knows of a death; every `RayError` that an actor did not raise itself is one."""


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
    except RayError as error:
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        causes = [_cause(reply, who, what) for who, reply in replies.items() if reply in done]
        raise failure("; ".join(filter(None, causes)) or death("Ray", error)) from error


def _cause(reply: Any, who: str, what: str) -> str:
    try:
        ray.get(reply)
    except RayTaskError as error:
        return f"{who} failed to {what}: {error.cause!r}"
    except RayError as error:
        return death(who, error)
    return ""
