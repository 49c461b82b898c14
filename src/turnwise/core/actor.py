"""Handles of Ray actors: started with our environment, called with deadlines."""

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle as RayActor
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
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from turnwise.config import Config
from turnwise.core import logs
from turnwise.core.aio import call_within
from turnwise.core.deadlines import deadline, deadline_error
from turnwise.core.ray import actor_variables
from turnwise.errors import TurnwiseError

_T = TypeVar("_T")
_HEAD_SECONDS = 1.0  # time for Ray's head to answer a call that nothing depends on
CPU_SHARE = 0.001
"""Number of cores that each bundle of a placement group reserves; it is almost 0, because the
operating system divides the real cores among actors."""
_remote: Callable[[type], RayActor] = functools.cache(ray.remote)


class ActorHandle:
    """One Ray actor, which ends when its last handle is deleted.

    Messages of errors refer to the actor by its `name`, such as "policy rank 0". Its death, and its
    exceptions other than a `TurnwiseError`, are raised as `failure`.
    """

    def __init__(
        self, actor: RayActor, name: str, failure: type[TurnwiseError] = TurnwiseError
    ) -> None:
        self.actor = actor
        self.name = name
        self._failure = failure

    @classmethod
    def create(
        cls,
        actor_class: type,
        *arguments: object,
        name: str,
        config: Config,
        log: str,
        threads: int = 1,
        num_gpus: float = 0,
        placement: PlacementGroupSchedulingStrategy
        | NodeAffinitySchedulingStrategy
        | str = "DEFAULT",
        max_concurrency: int | None = None,
        environment: Mapping[str, str] | None = None,
        failure: type[TurnwiseError] = TurnwiseError,
    ) -> "ActorHandle":
        """Start an actor of a plain class, whose constructor gets `arguments`; do not wait for its
        process.

        Args:
            log: Name of its log file in the run folder's `logs/`; see `logs.redirect_output`.
            threads: Number of threads of its OpenMP pools.
            max_concurrency: Maximum number of calls that run at once; None leaves Ray's default,
                which is 1, or 1000 if the class has coroutines.
        """
        variables = {
            **actor_variables(),
            **logs.environment(config.run_folder, config.log_level, log),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
            **config.ray_env,
        }
        options = _remote(actor_class).options(
            num_cpus=0,
            num_gpus=num_gpus,
            scheduling_strategy=placement,
            runtime_env={"env_vars": variables},
            max_concurrency=max_concurrency,
        )
        actor = options.remote(*arguments)
        return cls(actor, name, failure)

    async def call(self, method: str, *arguments: object, what: str, seconds: float) -> Any:
        """Call one of the actor's methods, which errors describe as `what` ("score a text"); raise
        as `get_with_deadline` does."""
        reply = getattr(self.actor, method).remote(*arguments)
        return await get_with_deadline(reply, self.name, what, seconds, self._failure)

    def kill(self) -> None:
        """End the actor's process at once."""
        if ray.is_initialized():  # else `ray.kill` starts a new Ray
            _ask_head(lambda: ray.kill(self.actor))


def _ask_head(call: Callable[[], None]) -> None:
    """Call Ray's head, but wait only a moment: it may hang, and would block the event loop."""
    with suppress(TimeoutError):
        call_within(call, _HEAD_SECONDS)


def on_node(node: str | None = None, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """Return the placement on a node, by its id (None: this node). If `soft`, another node will do
    when that node is gone."""
    node = node or ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=soft)


@contextmanager
def killed_on_failure(*handles: ActorHandle) -> Iterator[None]:
    """Kill these actors if the block raises, such as during their setup."""
    try:
        yield
    except BaseException:
        for handle in handles:
            handle.kill()
        raise


async def create_placement_group(
    count: int, gpus: float, resources: Mapping[str, float], who: str, key: str, seconds: float
) -> PlacementGroup:
    """Reserve a bundle of GPUs and `resources` for each of `count` actors, on as few nodes as
    possible; raise DeadlineError when there is no room within `seconds`. The message of this
    error contains `who`, a plural noun for the actors (such as "workers"), and `key`, the section
    of the configuration."""
    # Ray does not accept an empty bundle.
    bundle = {"CPU": CPU_SHARE, **({"GPU": gpus} if gpus else {}), **resources}
    group = placement_group([bundle] * count, strategy="PACK")
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items() if name != "CPU")
    what = f"a cluster with {asked or 'room'} for each of {count} {who}"
    try:
        await get_with_deadline(
            group.ready(), what, f"become available ({key}.resources, GPUs)", seconds
        )
    except BaseException:
        remove_bundles(group)
        raise
    return group


def remove_bundles(group: PlacementGroup) -> None:
    """End a reservation of bundles, and the actors in them."""
    with suppress(Exception):  # Ray's head may be gone
        _ask_head(lambda: remove_placement_group(group))


async def get_with_deadline(
    reply: Awaitable[_T],
    who: str,
    what: str,
    seconds: float,
    failure: type[TurnwiseError] = TurnwiseError,
) -> _T:
    """Wait for an actor's reply, and return it.

    Raises:
        DeadlineError: when the reply is late ("`who` did not `what` within ...").
        TurnwiseError: the actor's own TurnwiseError, or `failure` if it raised any other error, or
            died.
    """
    try:
        async with deadline(seconds, f"{who} did not {what}"):
            return await reply
    except RayTaskError as error:
        if isinstance(error.cause, TurnwiseError):
            raise error.cause from None
        raise failure(f"{who} failed to {what}: {error.cause!r}") from error
    except RayError as error:
        raise failure(death(who, error)) from error


def death(who: str, error: BaseException) -> str:
    """Describe an actor's death in a clause, with the cause that Ray reports."""
    why = next((why for kind, why in _DEATHS.items() if isinstance(error, kind)), "")
    if "its node has died" in str(error):  # an ActorDiedError reports it in its message only
        why = _DEATHS[NodeDiedError]
    return f"the process of {who} died{why and f' ({why})'}"


def is_death(error: BaseException | None) -> bool:
    """Return whether a function of this module raised this error because an actor died."""
    cause = error.__cause__ if isinstance(error, TurnwiseError) else None
    return isinstance(cause, RayError) and not isinstance(cause, RayTaskError)


def may_be_alive(error: BaseException | None) -> bool:
    """Return whether an error only means that Ray has lost its connection to the actor."""
    return is_death(error) and isinstance(error and error.__cause__, ActorUnavailableError)


_DEATHS: dict[type[RayError], str] = {
    OutOfMemoryError: "its node ran out of memory, and Ray ended it",
    NodeDiedError: "its node is gone",
    LocalRayletDiedError: "Ray's own process on its node is gone",
    ActorUnschedulableError: "no node has room for it",
    ActorUnavailableError: "it cannot be reached",
}
"""Causes of death by Ray's errors; every `RayError` except a `RayTaskError` is a death."""


def get_all_with_deadline(
    replies: Mapping[str, ray.ObjectRef], what: str, seconds: float, failure: type[TurnwiseError]
) -> list[Any]:
    """Wait, without an event loop, for the replies of several actors, keyed by name. Raise
    DeadlineError when a reply is late, and `failure` as soon as an actor raised an error or
    died."""
    references = list(replies.values())
    try:
        return list(ray.get(references, timeout=seconds))
    except GetTimeoutError:
        _, late = ray.wait(references, num_returns=len(references), timeout=0)
        who = ", ".join(name for name, reply in replies.items() if reply in late)
        raise deadline_error(seconds, f"{who} did not {what}") from None
    except RayError as error:
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        causes = []
        for who, reply in replies.items():
            try:
                if reply in done:
                    ray.get(reply)
            except RayTaskError as raised:
                causes.append(f"{who} failed to {what}: {raised.cause!r}")
            except RayError as died:
                causes.append(death(who, died))
        raise failure("; ".join(causes) or death("Ray", error)) from error
