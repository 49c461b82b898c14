"""Weight updates of a vLLM engine: checked, opened, and loaded.

Weights are loaded while requests are paused; the adapter of a version is loaded beside those of
earlier versions, and pauses nothing.

`VllmEngine` inherits these methods, which call the engine's worker processes
(`weights/vllm_worker.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.core.deadlines import StallClock, deadline
from turnwise.core.json_types import JsonObject
from turnwise.engine.adapter_table import AdapterTable, LoadedAdapter
from turnwise.engine.adapters import POLICY
from turnwise.engine.protocol import PAUSE_MODES, InFlight, WeightUpdate
from turnwise.engine.token_streams import TokenStreams
from turnwise.engine.worker_calls import answered, call_workers
from turnwise.errors import WeightUpdateError, text_of

if TYPE_CHECKING:
    from turnwise.engine.vllm_api import AsyncLLM

_T = TypeVar("_T")
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0
"""Time after the workers' own deadlines, whose errors are more specific."""


class UpdatableEngine:
    """The weight updates of an engine; `VllmEngine` is the only subclass.

    Example:
        version = await engine.update_weights(manifest, in_flight="keep")
    """

    name: str
    _llm: "AsyncLLM"
    _vllm: ModuleType
    _timeout: float
    _clock: StallClock
    _adapters: AdapterTable
    _streams: TokenStreams
    _cache_salt: str | None

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        async with self._deadline(f"checking weight update {manifest.version}", self._timeout):
            replies = await self._ask("check_update", manifest.to_dict())
        return [reply["device"] for reply in replies]

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        seconds = timeout or self._timeout
        opening = ("open_update", manifest.to_dict(), seconds)
        return await self._load(f"weight update {manifest.version}", opening, seconds, in_flight)

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], object]]
    ) -> None:
        plain = {
            name: (tuple(shape), str(dtype).removeprefix("torch."))
            for name, (shape, dtype) in state_dict_info.items()
        }
        async with self._deadline("preparing for weight updates", self._timeout):
            await self._ask("expect_tensors", plain)

    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout: float | None = None,
    ) -> None:
        seconds = timeout or self._timeout
        async with self._deadline("joining a process group", seconds + _GRACE_SECONDS):
            await self._ask(
                "join_collective", rank_prefix, ip, port, world_size, train_world_size, seconds
            )

    async def update_weights_via_ipc_zmq(
        self, address: str = "", timeout: float | None = None, in_flight: InFlight = "keep"
    ) -> None:
        """Load the weights that an `IpcSender` sends; the default address is the device's.

        Raises:
            WeightUpdateError, DeadlineError: as `update_weights` does.
        """
        seconds = timeout or self._timeout
        opening = ("open_stream", "ipc", address, seconds)
        await self._load("an update by ipc", opening, seconds, in_flight)

    async def update_weights_from_collective(
        self, timeout: float | None = None, in_flight: InFlight = "keep"
    ) -> None:
        """Load the weights that the trainer broadcasts.

        Raises:
            WeightUpdateError, DeadlineError: as `update_weights` does.
        """
        seconds = timeout or self._timeout
        opening = ("open_stream", "collective", "", seconds)
        await self._load("an update by collective", opening, seconds, in_flight)

    async def _load(
        self, what: str, opening: tuple[object, ...], seconds: float, in_flight: InFlight
    ) -> int:
        """Open an update in all workers, and load it; requests run until its first chunk arrives.

        Args:
            opening: The worker's method that opens the update, and its arguments.

        Returns:
            The version that was loaded.
        """
        async with self._deadline(what, seconds + _GRACE_SECONDS):
            try:
                method, *args = opening
                offers = await self._ask(str(method), *args)
                while not all(offers):
                    await asyncio.sleep(_POLL_SECONDS)
                    offers = await self._ask("poll_update")
                versions = {offer["version"] for offer in offers}
                if len(versions) > 1:
                    raise WeightUpdateError(f"{self.name} was offered versions {versions} at once")
                version = int(versions.pop())
                if self._adapters.trained is not None:
                    loaded = await self._load_adapter(version, in_flight)
                else:
                    async with self._swapping(version, in_flight):
                        loaded = await self._ask("load_update")
                if not all(reply["ended"] for reply in loaded):
                    # A step behind: workers answer between two steps of the engine.
                    await self._ask("end_update", "")
                return version
            except BaseException as error:
                with suppress(Exception):  # the first error is the one to report
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._ask("end_update", text_of(error))
                raise

    async def _load_adapter(self, version: int, in_flight: InFlight) -> list[JsonObject]:
        """Load the open update as the adapter of new requests; those in flight keep theirs.

        Their adapter is removed early only with `abort`, or if an engine would hold more than
        `VERSIONS` of them: its requests then end with finish reason `abort`, as in other updates.
        """
        adapter = self._adapters.new(POLICY, version)
        try:
            loaded = await self._ask("load_adapter", adapter.number, self._adapters.trained)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                await self._ask("remove_adapter", adapter.number)
            raise
        self._adapters.add(POLICY, adapter)  # before others are aborted: they go on with this one
        for old in self._adapters.excess():
            await self._drop(old)
        if in_flight == "abort":
            for old in self._adapters.older:
                await self._abort(old)
        return loaded

    async def _drop(self, adapter: LoadedAdapter) -> None:
        """Abort the requests of an adapter, and remove it, in this order: vLLM cannot compute a
        request whose adapter is missing."""
        await self._abort(adapter)
        await self._ask("remove_adapter", adapter.number)

    async def _abort(self, adapter: LoadedAdapter) -> None:
        await self._streams.abort(adapter.users)
        await self._llm.abort(list(adapter.users))

    async def _ask(self, method: str, *args: object) -> list[JsonObject]:
        return await call_workers(self._llm, self.name, method, *args)

    @asynccontextmanager
    async def _swapping(self, version: int, in_flight: InFlight = "keep") -> AsyncIterator[None]:
        """Pause requests in flight around the loading of weights, and resume them under `version`.

        A failure leaves the engine paused: it must not serve half an update.
        """
        keep_cache = in_flight == "keep_cache"
        mode = PAUSE_MODES[in_flight]
        await self._answered(self._vllm.pause(self._llm, mode, clear_cache=not keep_cache))
        if keep_cache:
            self._cache_salt = f"weights {version}"
        with self._clock.held():
            yield
            await self._answered(self._llm.update_weight_version(str(version)))
            await self._answered(self._llm.resume_generation())
        self._restart_clock()

    async def _answered(self, call: Coroutine[Any, Any, _T], what: str = "a weight update") -> _T:
        return await answered(self._llm, self.name, what, call)

    def _restart_clock(self) -> None:
        self._clock.moved()
        self._clock.stopped = False

    def _deadline(self, what: str, seconds: float) -> AbstractAsyncContextManager[None]:
        return deadline(seconds, f"{self.name} did not finish {what}")
