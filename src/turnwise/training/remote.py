"""The policy's ranks in processes of their own: Ray actors, and the caller's side of them.

Every call goes to all ranks at once. When a rank dies, the others fail or hang in whatever they
were computing together, so the error that is raised is that of the one that died.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise import logs
from turnwise.config import Config
from turnwise.errors import DeadlineError, TrainerError, TurnwiseError
from turnwise.ray_calls import is_death, reply_of, reserve
from turnwise.serving.worker_host import WorkerHost
from turnwise.training.batching import Share, plan
from turnwise.training.metrics import merge
from turnwise.training.sample import Sample
from turnwise.weights.meeting import LOOPBACK

if TYPE_CHECKING:
    from turnwise.training.policy import ModelName

_GRACE_SECONDS = 5.0
"""How long after one rank's error the others' are waited for: one of them may be the cause."""
_PING_SECONDS = 2.0


@ray.remote
class PolicyActor(WorkerHost):
    """Hosts one rank of the policy; on request an engine's worker too."""

    def __init__(self) -> None:
        logs.follow()

    def node(self) -> str:
        """The address of this rank's node."""
        return str(ray.util.get_node_ip_address())

    def open_store(self, host: str) -> str:
        """Open a place for the ranks to meet at, on one address of this node; returns host:port."""
        from turnwise.weights.meeting import open_store

        # Open from here on: a port that is only looked up may be somebody else's a moment later.
        self._store = open_store(host, 0)
        return f"{host}:{self._store.port}"

    def start(self, config: Config, place: Any, folder: str) -> tuple[int, int, bool]:
        """Build the rank; returns its process's id, the parameters of the whole model, and
        whether it packs micro-batches."""
        from turnwise.training.policy import Policy, packs

        self._policy = Policy(config, place, Path(folder))
        return os.getpid(), self._policy.parameters, packs(config.training, self._policy.device)

    def call(self, method: str, *args: Any) -> Any:
        """Call any method of the rank."""
        return getattr(self._policy, method)(*args)

    def ping(self) -> None:
        pass


class RemotePolicy:
    """The policy as other processes see it; methods are those of `Policy`, on all ranks.

    Raises from every call: `TrainerError` naming the rank that died or failed, `DeadlineError`
    naming the one that did not answer within `training.step_timeout` seconds.
    """

    def __init__(self, config: Config, actors: Sequence[Any]) -> None:
        self.pids: list[int] = []
        self.parameters = 0
        self.version = 0
        self.packed = False
        self.canary: tuple[list[int], list[float]] = [], []
        """A prompt, and the published weights' log-probs of its tokens from the second on."""
        self._config = config
        self._actors = list(actors)
        """Held here, so that Ray keeps them."""
        self._timeout = config.training.step_timeout

    @classmethod
    async def start(cls, config: Config, folder: Path, *, num_gpus: float = 0) -> "RemotePolicy":
        """Start all ranks, each on `num_gpus` of a GPU and with `training.resources`.

        Raises:
            InputError: when the model cannot be loaded or does not fit.
            DeadlineError: when the cluster has no room.
        """
        from turnwise.training.policy import Place, threads_of

        training = config.training
        group = await reserve(
            training.ranks,
            num_gpus,
            training.resources,
            "ranks of the trainer",
            "training",
            config.engine.start_timeout,
        )
        environment = {
            "OMP_NUM_THREADS": str(threads_of(training)),
            "OMP_WAIT_POLICY": "PASSIVE",  # idle trainer threads must not spin beside the engine
            "TOKENIZERS_PARALLELISM": "false",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what deterministic algorithms ask for
        }
        actors = [
            PolicyActor.options(  # type: ignore[attr-defined]
                num_cpus=0,
                num_gpus=num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                runtime_env={"env_vars": environment | logs.environment(config, f"policy-{rank}")},
            ).remote()
            for rank in range(training.ranks)
        ]
        remote = cls(config, actors)
        try:
            address = await remote._meeting_place() if len(actors) > 1 else ""
            started = await remote._all(
                "start",
                lambda rank, actor: actor.start.remote(
                    config, Place(rank, training.ranks, address), str(folder)
                ),
            )
        except BaseException:
            remote.kill()
            raise
        remote.pids = [pid for pid, _, _ in started]
        _, remote.parameters, remote.packed = started[0]
        return remote

    async def _meeting_place(self) -> str:
        """Where the ranks meet: nobody else reaches it where all are on one node."""
        nodes = await self._all("tell its address", lambda _, actor: actor.node.remote())
        host = LOOPBACK if len(set(nodes)) == 1 else nodes[0]
        opened = self._actors[0].open_store.remote(host)
        return str(await self._one(0, opened, "open a meeting place"))

    @property
    def actors(self) -> dict[str, Any]:
        """Handles of the ranks by the names that errors call them."""
        return {_name(rank): actor for rank, actor in enumerate(self._actors)}

    async def train(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Take `training.updates_per_step` optimizer steps; returns the step's metrics."""
        training = self._config.training
        shares: list[list[Share]] = await asyncio.to_thread(
            plan,
            samples,
            training.updates_per_step,
            training.ranks,
            training.micro_batch_tokens,
            self.packed,
        )
        reports = await self._all(
            "train", lambda rank, actor: actor.call.remote("train", shares[rank])
        )
        self.version = reports[0].version
        return merge(reports)

    async def score(
        self, name: "ModelName", token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """What one of the policy's models says of sequences.

        Args:
            token_ids: For each sequence its T tokens.
            masks: For each sequence T times 1 (a token to be scored) or 0; a first token, before
                which nothing stands, is never scored.

        Returns:
            For each sequence T floats, 0.0 where a token is not scored: the log-prob of the token
            under `sampling`, or, of the value model, the return that it expects before it.

        Raises:
            InputError: when the policy has no such model.
        """
        training = self._config.training
        samples = [
            Sample.of(ids, mask, [0.0] * len(ids), [-1] * len(ids), 0.0, number)
            for number, (ids, mask) in enumerate(zip(token_ids, masks, strict=True))
        ]
        found: dict[int, list[float]] = {}
        if any(sample.trained for sample in samples):
            planned = await asyncio.to_thread(
                plan, samples, 1, training.ranks, training.micro_batch_tokens, self.packed
            )
            replies = await self._all(
                f"score tokens with the {name} model",
                lambda rank, actor: actor.call.remote("score", name, planned[rank][0]),
            )
            found = {number: values for reply in replies for number, values in reply}
        return [_spread(sample, found.get(sample.sequence, [])) for sample in samples]

    async def publish(self) -> dict[str, Any]:
        """Returns rank 0's manifest; `canary` is that of the published version from here on."""
        published = await self._same("publish its weights", "publish")
        manifest: dict[str, Any]
        manifest, prompt, expected = published[0]
        self.canary = prompt, expected
        return manifest

    async def send(self, devices: Sequence[str]) -> None:
        await self._same("send its weights", "send", devices)

    async def offload(self) -> int:
        """Returns the bytes that all ranks have put away."""
        return sum(await self._same("put its tensors away", "offload"))

    async def rendezvous(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._one(
            0, self._actors[0].call.remote("rendezvous"), "open a meeting place"
        )
        return address

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await self._same("join the engines", "join", ip, port, engine_workers, timeout)

    async def save(self, folder: Path) -> None:
        await self._same(f"save {folder}", "save", folder)

    async def load(self, folder: Path) -> int:
        """Returns the version that the checkpoint holds."""
        versions = await self._same(f"load {folder}", "load", folder)
        self.version = versions[0]
        return self.version

    async def watch(self) -> None:
        """Never returns; raises `TrainerError` soon after a rank died, whoever else waits."""
        while True:
            await asyncio.sleep(_PING_SECONDS)
            await self._all("answer", lambda _, actor: actor.ping.remote())

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _same(self, what: str, method: str, *args: Any) -> list[Any]:
        return await self._all(what, lambda _, actor: actor.call.remote(method, *args))

    async def _all(self, what: str, call: Callable[[int, Any], Any]) -> list[Any]:
        """The ranks' replies, in their order."""
        waits = [
            asyncio.ensure_future(self._one(rank, call(rank, actor), what))
            for rank, actor in enumerate(self._actors)
        ]
        try:
            _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await self._wait_for_cause(waits)
            errors = [e for w in waits if w.done() and (e := w.exception()) is not None]
            if errors:
                raise min(errors, key=_rank_of_cause)
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _wait_for_cause(self, waits: Sequence["asyncio.Future[Any]"]) -> None:
        """One rank has failed: the others get some time to say whether they died."""
        deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            failed = [w for w in waits if w.done() and w.exception() is not None]
            if any(_rank_of_cause(w.exception()) == 0 for w in failed):
                return
            pending = [wait for wait in waits if not wait.done()]
            if not pending:
                return
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _one(self, rank: int, reply: Any, what: str) -> Any:
        return await reply_of(reply, _name(rank), what, self._timeout, TrainerError)


def _spread(sample: Sample, values: Sequence[float]) -> list[float]:
    """A value for each token of a sequence, of those of its masked tokens."""
    rest = iter(values)
    return [next(rest) if scored else 0.0 for scored in sample.response_mask_T]


def _name(rank: int) -> str:
    return f"policy rank {rank}"


def _rank_of_cause(error: BaseException | None) -> int:
    """Where an error stands among several: a death explains all others."""
    if is_death(error):
        return 0
    if isinstance(error, TurnwiseError) and not isinstance(error, TrainerError | DeadlineError):
        return 1
    return 2 if isinstance(error, TrainerError) else 3
