"""The handle with which other processes call the trainer's ranks, which are Ray actors.

Every call goes to all ranks at once. When a rank dies, the other ranks fail or hang in their common
computation, so the error of the dead rank is raised.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.actor import ActorHandle as RayActor
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import AlgorithmConfig, Config
from turnwise.config.schema import stream_mistake
from turnwise.core import logs
from turnwise.core.actor import ActorHandle, create_placement_group, is_death, remove_bundles
from turnwise.core.aio import run_in_thread
from turnwise.core.fork_server import SPIN_COUNT
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import load_object
from turnwise.core.precision import precision
from turnwise.core.ray import outlives_run
from turnwise.errors import DeadlineError, InputError, TrainerError, TurnwiseError
from turnwise.serving.colocated.host import WorkerHost
from turnwise.training import linear
from turnwise.training.batching import (
    Layouts,
    RankBatches,
    micro_batch_tokens,
    plan_micro_batches,
    threads_of,
)
from turnwise.training.reports import (
    CONFIGURED,
    OF_STEPS,
    OptimSettings,
    TrainedSample,
    by_sample,
    joined,
    merge,
    of_policies,
    of_step,
)
from turnwise.training.sample import Sample
from turnwise.weights.manifest import Manifest
from turnwise.weights.process_group import LOOPBACK, open_store
from turnwise.weights.sync import check_transport

if TYPE_CHECKING:
    from turnwise.training.algorithms import Loss

logger = logging.getLogger(__name__)

_RANK = "turnwise.training.rank:TrainerRank"  # imported only in the ranks' processes
_GRACE_SECONDS = 5.0
"""Seconds to wait for other ranks' errors after the first error; a later one may be the cause."""
_PING_SECONDS = 2.0


class TrainerActor:
    """The process of one rank of the policy."""

    def __init__(self) -> None:
        logs.redirect_output()

    def node(self) -> str:
        return str(ray.util.get_node_ip_address())

    def open_store(self, host: str) -> str:
        """Open the ranks' rendezvous store on one address of this node; return host:port."""
        # Keep the store open: a port that is only looked up may be taken a moment later.
        self._store = open_store(host, 0)
        return f"{host}:{self._store.port}"

    def start(
        self, config: Config, folder: str, kind: str, rank: int, ranks: int, address: str
    ) -> tuple[int, Layouts, str, str]:
        """Build the rank; return its process id, the layouts of micro-batches, a sentence about the
        layouts, and a sentence about layers without an adapter, or ""."""
        made = load_object(kind, "the trainer")  # this imports Transformers' models
        self._policy = policy = made(config, Path(folder), rank=rank, ranks=ranks, address=address)
        return os.getpid(), policy.layouts, policy.layouts_note, policy.adapters_note

    def call(self, method: str, *args: object) -> object:
        result: object = getattr(self._policy, method)(*args)
        return result

    def ping(self) -> None:
        pass


class ColocatedTrainerActor(TrainerActor, WorkerHost):
    """One rank of the policy, and one rank of an engine's model in the same process."""


class TrainerGroup:
    """All ranks of the trainer; its methods call the same methods of `TrainerRank` on all ranks.

    Every call may raise a `TrainerError` that names the rank that died or failed, or a
    `DeadlineError` that names the rank that did not answer within `training.step_timeout` seconds.
    """

    def __init__(
        self,
        config: Config,
        ranks: Sequence[ActorHandle],
        on_gpu: bool = False,
        bundles: PlacementGroup | None = None,
    ) -> None:
        self.pids: list[int] = []
        self.version = 0
        self.dtype = precision(config.model, on_gpu)
        """Precision of the policy's forward passes."""
        self.layouts = Layouts()
        self.trained_tokens: list[TrainedSample] = []
        """The last step's samples, with the values of their trained tokens."""
        self._config = config
        self._ranks = list(ranks)
        self._bundles = bundles
        self._on_gpu = on_gpu
        self._timeout = config.training.step_timeout

    @classmethod
    async def start(cls, config: Config, folder: Path, *, num_gpus: float = 0) -> Self:
        """Start all ranks, each in an actor with `training.resources` and `num_gpus` GPUs."""
        training = config.training
        kind = ColocatedTrainerActor if training.colocated else TrainerActor
        # Refuse a wrong transport before ranks start.
        check_transport(config.weights.transport, stream_mistake(config))
        group = await create_placement_group(
            training.ranks,
            num_gpus,
            training.resources,
            "ranks of the trainer",
            "training",
            config.engine.start_timeout,
        )
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",  # idle trainer threads must not take the engine's cores
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT),  # spin only briefly
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by deterministic algorithms
            **linear.ENVIRONMENT,
        }
        ranks = [
            ActorHandle.create(
                kind,
                name=f"policy rank {rank}",
                config=config,
                log=f"policy-{rank}",
                threads=threads_of(training),
                num_gpus=num_gpus,
                placement=PlacementGroupSchedulingStrategy(group, rank),
                environment=environment,
                failure=TrainerError,
            )
            for rank in range(training.ranks)
        ]
        trainer = cls(config, ranks, num_gpus > 0, group)
        try:
            address = ""
            if len(ranks) > 1:  # ranks on one node meet at its loopback address
                nodes = await trainer._each("report its address", "node")
                host = LOOPBACK if len(set(nodes)) == 1 else nodes[0]
                address = await trainer._first("open a rendezvous address", "open_store", host)
            given = config, str(folder), _RANK
            arguments = [(*given, n, len(ranks), address) for n in range(len(ranks))]
            started = await trainer._each("start", "start", arguments)
        except BaseException:
            trainer.kill()
            raise
        trainer.pids = [pid for pid, *_ in started]
        _, trainer.layouts, said, adapters_note = started[0]
        logger.info("%s", said)
        if adapters_note:
            logger.warning("%s", adapters_note)
        return trainer

    @property
    def actors(self) -> dict[str, RayActor]:
        """Ray's handles of the ranks, by their names in errors."""
        return {rank.name: rank.actor for rank in self._ranks}

    async def train(self, samples: Sequence[Sample]) -> JsonObject:
        """Take the optimizer steps of a training step (`Config.versions_per_step` of them if all
        policies have samples); return the step's metrics."""
        self.trained_tokens = []
        size, made = self._config.training.context_parallel, dict[str, JsonObject]()
        version = self.version if self._config.rollout.policies else None
        for name, own in self._by_policy(samples).items():
            shares = await self._shares(own, self._config.training.updates_per_step)
            given = [("train", share, name, version) for share in shares]
            reports = await self._each("train", "call", given)
            self.version = reports[0].version
            self.trained_tokens += by_sample(shares[::size], reports[::size])
            made[name] = merge(reports, size)
        return self._together(made)

    def _by_policy(self, samples: Sequence[Sample]) -> dict[str, list[Sample]]:
        """Return the samples of each policy that has samples to train."""
        names = self._config.policies
        if others := {sample.policy for sample in samples} - {*names}:
            raise InputError(
                f"the policies of this run are {', '.join(names)}, and a sample is of "
                f"{min(others)}: give samples of its rollouts"
            )
        parts = {name: [each for each in samples if each.policy == name] for name in names}
        alone = len(names) == 1
        return {n: own for n, own in parts.items() if alone or not all(s.counted_only for s in own)}

    def _together(self, made: dict[str, JsonObject]) -> JsonObject:
        """Join the policies' metrics; if there are several policies, also include each one's."""
        return of_policies(made) if self._config.rollout.policies else joined([*made.values()])

    async def forward_backward(
        self,
        samples: Sequence[Sample],
        algorithm: AlgorithmConfig | None = None,
        loss: "Loss | None" = None,
        adapter: str | None = None,
        learns: bool = True,
    ) -> JsonObject:
        """Add the gradient of samples to the gradients that wait for `optim_step`; see
        `TrainerRank.forward_backward`. Return the metrics of the loss.

        Args:
            adapter: The added adapter to train; None: train each sample's policy.
        """
        self.trained_tokens = []
        size, made = self._config.training.context_parallel, dict[str, JsonObject]()
        parts = self._by_policy(samples) if adapter is None else {adapter: samples}
        for name, own in parts.items():
            shares = await self._shares(own, 1)
            how = algorithm, loss, name, learns
            arguments = [("forward_backward", share[0], *how) for share in shares]
            reports = await self._each("compute a gradient", "call", arguments)
            self.trained_tokens += by_sample(shares[::size], reports[::size])
            merged = merge(reports, size)
            made[name] = {k: v for k, v in merged.items() if k not in OF_STEPS}
        return self._together(made)

    async def optim_step(
        self, settings: OptimSettings = CONFIGURED, adapter: str | None = None
    ) -> JsonObject:
        """Take an optimizer step of all policies, or of an added adapter, with the gradients that
        wait for it; return the step's metrics."""
        replies = await self._same("take a step", "optim_step", settings, adapter)
        self.version, reports = replies[0]
        return self._together({name: of_step(report) for name, report in reports.items()})

    async def drop(self, name: str | None = None) -> None:
        """Drop the gradients of all policies, or of an added adapter, that wait for a step."""
        await self._same("drop its gradient", "drop", name)

    async def adapter(self, method: str, name: str, *arguments: object) -> None:
        """Call a method of `Adapters`: add, remove or read on all ranks, or write on one rank."""
        call = self._first if method == "write" else self._same
        given = ("call", "adapter") if method == "write" else ("adapter",)
        await call(f"{method} {name}", *given, method, name, *arguments)

    async def begin_adapters(self) -> int:
        """Free the memory of the policy's own adapter, in a trainer of added adapters only; return
        the number of ids that the model knows."""
        await self._same("make room for adapters", "remove_policy")
        return int(await self._first("report its vocabulary", "call", "vocabulary"))

    async def _shares(self, samples: Sequence[Sample], updates: int) -> list[list[RankBatches]]:
        """Return each rank's share of each update; all ranks of a context group get the same
        share."""
        training = self._config.training
        size = training.context_parallel
        planned = await run_in_thread(
            plan_micro_batches,
            samples,
            updates,
            training.ranks // size,
            micro_batch_tokens(training, self._on_gpu),
            self.layouts,
        )
        return [share for share in planned for _ in range(size)]

    async def forward(self, name: str, samples: Sequence[Sample]) -> list[list[float]]:
        """Score the trained tokens of samples with a model of the trainer. If the name is "policy",
        each sample is scored with its own policy.

        Returns:
            For each sample T floats, 0.0 where a token is not trained: the token's log-prob under
            the distribution that it was drawn from, or the value model's expected return before it.
        """
        numbered = [  # each sample may be in any micro-batch
            replace(each, sequence=n, pair_id=n, trajectory=n, counted_only=False)
            for n, each in enumerate(samples)
        ]
        found: dict[int, list[float]] = {}
        scored = [sample for sample in numbered if sample.trained]
        parts = self._by_policy(scored) if name == "policy" else {name: scored}
        for model, own in parts.items() if scored else ():
            planned = await self._shares(own, 1)
            replies = await self._each(
                f"score tokens with the {model} model",
                "call",
                [("forward", model, share[0]) for share in planned],
            )
            found |= {number: values for reply in replies for number, values in reply}
        spread = []
        for sample in numbered:
            values = iter(found.get(sample.sequence, []))
            spread.append([next(values) if own else 0.0 for own in sample.response_mask_T])
        return spread

    async def publish(self) -> Manifest:
        """Publish the weights; return rank 0's manifest, which contains this version's canary."""
        published: list[Manifest] = await self._same("publish its weights", "publish")
        self.version = published[0].version  # newer than known if a step failed half-way
        return published[0]

    async def send(self, devices: Sequence[str]) -> None:
        await self._same("send its weights", "send", devices)

    async def offload(self) -> int:
        return sum(await self._same("offload its tensors", "offload"))

    async def rendezvous(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._first(
            "open a rendezvous address", "call", "rendezvous"
        )
        return address

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await self._same("join the engines", "join", ip, port, engine_workers, timeout)

    async def save(self, folder: Path) -> None:
        await self._same(f"save {folder}", "save", folder)

    async def holds(self, version: int, seconds: float) -> bool:
        """Return whether all ranks have the weights of a version and have ended their step; return
        False if a rank is dead or does not answer for `seconds`."""
        what = "report its version"
        asked = [
            rank.call("call", "whole_version", what=what, seconds=seconds) for rank in self._ranks
        ]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        return all(reply == version for reply in replies)

    async def load(self, folder: Path) -> int:
        versions = await self._same(f"load {folder}", "load", folder)
        self.version = versions[0]
        return self.version

    async def watch(self) -> None:
        """Watch the ranks forever; raise `TrainerError` soon after a rank has died."""
        while True:
            await asyncio.sleep(_PING_SECONDS)
            await self._each("answer", "ping")

    async def close(self) -> None:
        """Release what the weight transport keeps outside the ranks' processes, such as files; dead
        and busy ranks are skipped. End the ranks if Ray would keep them running."""
        calls = [
            rank.call("call", "close", what="release its weights", seconds=_PING_SECONDS)
            for rank in self._ranks
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.info("the trainer's weights are not released: %s", outcome)
        if outlives_run():
            self.kill()

    def kill(self) -> None:
        """End all ranks at once, and give their resources (placement group bundles) back."""
        for rank in self._ranks:
            rank.kill()
        if self._bundles is not None:
            remove_bundles(self._bundles)

    async def _same(self, what: str, method: str, *arguments: object) -> list[Any]:
        """Call a method of `TrainerRank` with the same arguments on all ranks."""
        return await self._each(what, "call", [(method, *arguments)] * len(self._ranks))

    async def _first(self, what: str, method: str, *arguments: object) -> Any:
        """Call a method of rank 0's actor only."""
        return await self._ranks[0].call(method, *arguments, what=what, seconds=self._timeout)

    async def _each(
        self, what: str, method: str, arguments: Sequence[Sequence[object]] | None = None
    ) -> list[Any]:
        """Call a method of all ranks' actors, each with its own arguments; return the replies."""
        waits = [
            asyncio.ensure_future(rank.call(method, *own, what=what, seconds=self._timeout))
            for rank, own in zip(self._ranks, arguments or [()] * len(self._ranks), strict=True)
        ]
        try:
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            with suppress(TimeoutError):  # a rank's death may follow, and explain the failure
                async with asyncio.timeout(_GRACE_SECONDS):
                    while pending and not any(is_death(wait.exception()) for wait in done):
                        more, pending = await asyncio.wait(
                            pending, return_when=asyncio.FIRST_COMPLETED
                        )
                        done |= more
            errors = [e for w in waits if w.done() and (e := w.exception()) is not None]
            if errors:
                raise min(errors, key=_rank_of_cause)
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def _rank_of_cause(error: BaseException | None) -> int:
    """Return an error's order as the cause, lowest first; a rank's death is 0, as it explains other
    errors."""
    if is_death(error):
        return 0
    if isinstance(error, TurnwiseError) and not isinstance(error, TrainerError | DeadlineError):
        return 1
    return 2 if isinstance(error, TrainerError) else 3
