"""What an actor's silence means, for each of Ray's words for it."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import ray.exceptions as ray_errors
from ray.exceptions import RAY_EXCEPTION_TYPES, RayError, RayTaskError

from turnwise.config import Config
from turnwise.core import actor as actors
from turnwise.core import fork_server
from turnwise.core.actor import ActorHandle, get_with_deadline, is_death
from turnwise.core.ray import start_ray
from turnwise.errors import EngineError, InputError, TrainerError

SENTENCES = {
    "OutOfMemoryError": r"w died \(its node ran out of memory, and Ray ended it\)",
    "NodeDiedError": r"w died \(its node is gone\)",
    "LocalRayletDiedError": r"w died \(Ray's own process on its node is gone\)",
    "ActorUnschedulableError": r"w died \(no node has room for it\)",
    "ActorUnavailableError": r"w died \(it cannot be reached\)",
}
KINDS = {kind.__name__: kind for kind in RAY_EXCEPTION_TYPES} | {
    name: getattr(ray_errors, name)
    for name in ("OutOfMemoryError", "NodeDiedError", "RaySystemError", "WorkerCrashedError")
}


def made(kind: type[RayError]) -> RayError:
    """An error of a kind, whatever its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "as Ray says it")
    return error


async def failing(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


DEATHS = [name for name, kind in KINDS.items() if not issubclass(kind, RayTaskError | TimeoutError)]


@pytest.mark.parametrize("name", sorted(DEATHS))
async def test_every_ray_error_for_a_gone_actor_counts_as_its_death(name: str) -> None:
    class Silent(KINDS[name]):  # type: ignore[misc, name-defined]
        def __str__(self) -> str:
            return "as Ray says it"

    for kind in (EngineError, TrainerError):
        sentence = SENTENCES.get(name, "the process of w died")
        with pytest.raises(kind, match=sentence) as caught:
            await get_with_deadline(failing(made(Silent)), "w", "answer", 60.0, kind)
        assert is_death(caught.value)


async def test_what_an_actor_raises_itself_is_no_death() -> None:
    def raised(cause: Exception) -> Any:
        return RayTaskError("call", "a traceback", cause).as_instanceof_cause()

    with pytest.raises(EngineError, match="w failed to answer: ValueError"):
        await get_with_deadline(
            failing(raised(ValueError("bad"))), "w", "answer", 60.0, EngineError
        )
    error = raised(ray_errors.NodeDiedError("somebody else's"))
    with pytest.raises(EngineError, match=r"w failed to answer: .*NodeDied") as caught:
        await get_with_deadline(failing(error), "w", "answer", 60.0, EngineError)
    assert not is_death(caught.value)
    with pytest.raises(InputError, match="its own words"):
        await get_with_deadline(failing(raised(InputError("its own words"))), "w", "answer", 60.0)


def unconnected(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None]) -> None:
    """Make this process one without Ray, for which `init` stands."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(**options: object) -> None:  # as ray.init does on a machine with too much to do
        raise Exception("The current node timed out during startup.")

    unconnected(monkeypatch, slow)
    with pytest.raises(InputError, match="cannot be reached on this machine: The current node"):
        start_ray(None)


def test_a_cluster_that_asks_for_a_token_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, **options: object) -> None:  # as ray.init, after 20 seconds
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}") from RuntimeError(
            "Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n"
            "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token "
            "is missing or incorrect."
        )

    unconnected(monkeypatch, refused)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(InputError) as caught:
            start_ray(address)
    expected = f"Ray cannot be reached at {address}: it asks for a token: set RAY_AUTH_MODE"
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


class Variables:
    """An actor that tells its environment."""

    def get(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]


async def test_all_actors_have_the_variables_of_ray_env(
    ray_started: None, make_config: Callable[..., Config]
) -> None:
    """Also in place of those that we set ourselves."""
    config = make_config(ray_env={"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "true"})
    actor = ActorHandle.create(Variables, name="reader", config=config, log="reader")
    names = ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "TURNWISE_LOG_LEVEL")
    try:
        found = await actor.call("get", *names, what="read its environment", seconds=120)
    finally:
        actor.kill()
    assert found == ["INFO", "true", config.log_level]


def test_ray_starts_with_the_variables_of_ray_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the fork server, whose libraries have read other ones."""
    asked: dict[str, Any] = {}

    def init(**options: Any) -> None:
        asked.update(options["runtime_env"]["env_vars"])
        raise RuntimeError("enough")

    unconnected(monkeypatch, init)
    with pytest.raises(InputError, match="enough"):
        start_ray(None, {"HF_HOME": "/data/hf", "PYTHONPATH": "elsewhere"})
    assert asked["HF_HOME"] == "/data/hf"
    assert asked["PYTHONPATH"] != "elsewhere"
    assert fork_server.VARIABLE not in asked


def test_a_head_that_hangs_holds_up_nobody_who_ends_an_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop of the driver kills workers, and everything else runs on it."""
    answers, killed = threading.Event(), []
    monkeypatch.setattr(actors, "_HEAD_SECONDS", 0.1)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor) or answers.wait(60))
    handle: Any = ActorHandle("its actor", "worker-0")  # type: ignore[arg-type]
    began = time.monotonic()
    handle.kill()
    assert time.monotonic() < began + 30
    answers.set()
    assert killed == ["its actor"]

    def refuse(actor: object) -> None:
        raise ValueError("no actor")

    monkeypatch.setattr(ray, "kill", refuse)
    monkeypatch.setattr(actors, "_HEAD_SECONDS", 60.0)
    with pytest.raises(ValueError, match="no actor"):
        handle.kill()


def test_a_node_that_reports_itself_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    from turnwise.internals import ray as internals

    asked: list[str] = []

    def late(address: str, node: str) -> str:
        asked.append(node)
        if len(asked) < 3:
            raise RuntimeError("no such node")
        return node

    monkeypatch.setattr(services, "get_node", services.get_node)  # which is put back
    monkeypatch.setattr(internals, "_get_node", late)
    with internals.lean_ray(None):
        assert services.get_node("address", "mine") == "mine"
    assert len(asked) == 3
