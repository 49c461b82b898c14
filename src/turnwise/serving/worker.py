"""The generation worker: one engine in a Ray actor, under the names that the field uses.

Other processes reach it in two ways: by its methods, one Ray call each, or through
`RemoteWorker`, which carries many requests in few calls.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import torch

from turnwise import logs
from turnwise.config import Config, EngineConfig, SamplingConfig
from turnwise.engine.protocol import Chunk, collect
from turnwise.errors import EngineError, InputError, TurnwiseError
from turnwise.tasks import settle_heap
from turnwise.weights import BACKEND, WORKER_EXTENSION

HEARTBEAT_SECONDS = 10.0

Submission = tuple[str, list[int], Any, int | None]
"""A request's id, its prompt's ids, its sampling and its seed."""


class VllmAsyncGenerationWorker:
    """Hosts one `VllmEngine`; see `serving.manager` for how it is made an actor.

    Args:
        config: Model, engine, sampling and seeds.
        bundle_indices: Bundles of this actor's placement group, one for each device of the
            engine, which computes in an actor in each; None computes in this process's children.
        fraction_of_gpus: Share of each GPU's memory that the engine may take.
        seed: Of the engine's own random numbers; the configuration's where it is None.
        name: What errors call this worker.
    """

    def __init__(
        self,
        config: Config,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        name: str = "worker-0",
    ) -> None:
        self._config = config
        self._seed = config.seed if seed is None else seed
        self._name = name
        self._share = fraction_of_gpus
        self._events: list[tuple[str, Chunk | Exception]] = []
        self._happened = asyncio.Event()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._server: Any = None
        self._bundle_indices = bundle_indices

    async def post_init_async(self) -> int:
        """Build the engine, which takes seconds; returns this process's id.

        Raises:
            InputError: when vLLM refuses the model or an argument.
        """
        logs.follow()
        engine = self._config.engine
        if self._bundle_indices is not None:
            from turnwise.serving.colocated import on_bundles  # needs Ray

            engine = on_bundles(engine, self._bundle_indices, self._name)
        if self._share < 1.0:
            utilization = engine.extra.get("gpu_memory_utilization", _GPU_MEMORY) * self._share
            extra = {**engine.extra, "gpu_memory_utilization": utilization}
            engine = engine.model_copy(update={"extra": extra})
        if engine.metrics is None and self._config.serving.worker_servers:
            engine = engine.model_copy(update={"metrics": True})
        self._engine = self._create_engine(engine)
        if self._config.serving.worker_servers:
            from turnwise.serving.openai_server import OpenAIServer

            self._server = OpenAIServer(self._config, self._engine, port=0)
            await self._server.start()
        settle_heap()
        return os.getpid()

    def _create_engine(self, engine: EngineConfig) -> Any:
        """Make the `VllmEngine`; a hook for subclasses that change its arguments."""
        from turnwise.engine.vllm_engine import VllmEngine

        return VllmEngine(
            self._config.model,
            engine,
            seed=self._seed,
            deterministic=self._config.deterministic,
            worker_extension=WORKER_EXTENSION,
            weight_backend=BACKEND,
            name=self._name,
        )

    async def generate_async(
        self, data: dict[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Sample one completion for each row, and yield each as soon as it is ready.

        An answer may take any time, as long as the engine samples (`engine.request_timeout`). A row
        that fails spoils no other: its error is raised after all others were yielded.

        Args:
            data: `input_ids` [B, T], right-padded; `input_lengths` [B]; optionally
                `stop_strings`, B lists of strings (or None).
            greedy: Temperature 0 instead of the configuration's sampling.

        Yields:
            The row's index, and a dictionary of tensors: `output_ids` [1, W] (prompt and
            completion, right-padded to T + max_tokens), `logprobs` [1, W] (nats; 0 on prompt and
            padding), `weight_versions` [1, W] (-1 on prompt and padding), `generation_lengths`
            [1], `unpadded_sequence_lengths` [1], `truncated` [1] (cut by max_tokens or by the
            context, or without room to begin).

        Raises:
            InputError: when the tensors do not fit each other.
        """
        input_ids_BT, lengths_B = data.get("input_ids"), data.get("input_lengths")
        if not (isinstance(input_ids_BT, torch.Tensor) and isinstance(lengths_B, torch.Tensor)):
            raise InputError("generate_async wants the tensors input_ids [B, T], input_lengths [B]")
        if input_ids_BT.ndim != 2 or lengths_B.shape != input_ids_BT.shape[:1]:
            raise InputError(
                "generate_async wants input_ids [B, T] and input_lengths [B], not "
                f"{list(input_ids_BT.shape)} and {list(lengths_B.shape)}"
            )
        width = input_ids_BT.shape[1]
        if not all(0 < length <= width for length in lengths_B.tolist()):
            raise InputError(f"input_lengths must be between 1 and {width}")
        stops = _stop_strings(data, len(lengths_B))

        async def one(index: int) -> dict[str, Any]:
            prompt = input_ids_BT[index, : int(lengths_B[index])].tolist()
            return await self._complete(prompt, self._sampling(greedy, stops[index]), width)

        async with aclosing(as_ready(one, len(lengths_B))) as ready:
            async for row in ready:
                yield row

    def _sampling(self, greedy: bool, stop: Sequence[str] | None) -> SamplingConfig:
        changes: dict[str, Any] = {"temperature": 0.0} if greedy else {}
        if stop:
            changes["stop"] = [*self._config.sampling.stop, *stop]
        return self._config.sampling.model_copy(update=changes)

    async def _complete(
        self, prompt: list[int], sampling: SamplingConfig, width: int
    ) -> dict[str, Any]:
        total = width + sampling.max_tokens
        room = min(sampling.max_tokens, self._config.model.max_length - len(prompt))
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        truncated = True
        if room > 0:
            changes = {"max_tokens": room, "min_tokens": min(room, sampling.min_tokens)}
            stream = self._engine.stream(
                prompt, sampling.model_copy(update=changes), f"{self._name}-{os.urandom(8).hex()}"
            )
            async with aclosing(stream) as chunks:
                completion = await collect(chunks, self._name)
            token_ids, logprobs = completion.token_ids, completion.logprobs
            versions = completion.weight_versions
            truncated = completion.finish_reason != "stop"
        start, end = len(prompt), len(prompt) + len(token_ids)
        output_ids_1W = torch.zeros(1, total, dtype=torch.long)
        output_ids_1W[0, :end] = torch.tensor([*prompt, *token_ids])
        logprobs_1W = torch.zeros(1, total)
        logprobs_1W[0, start:end] = torch.tensor(logprobs)
        versions_1W = torch.full((1, total), -1, dtype=torch.long)
        versions_1W[0, start:end] = torch.tensor(versions, dtype=torch.long)
        return {
            "output_ids": output_ids_1W,
            "logprobs": logprobs_1W,
            "weight_versions": versions_1W,
            "generation_lengths": torch.tensor([len(token_ids)]),
            "unpadded_sequence_lengths": torch.tensor([end]),
            "truncated": torch.tensor([truncated]),
        }

    async def generate_text_async(
        self, data: dict[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Complete texts: `prompts`, B strings, and optionally `stop_strings`, B lists.

        Yields:
            The row's index, and its `text`, `token_ids`, `logprobs` and `truncated`.
        """
        template, prompts = self._template(), data["prompts"]
        stops = _stop_strings(data, len(prompts))

        async def one(index: int) -> dict[str, Any]:
            prompt = template.encode(prompts[index])
            output = await self._complete(prompt, self._sampling(greedy, stops[index]), len(prompt))
            start, end = len(prompt), int(output["unpadded_sequence_lengths"])
            token_ids = output["output_ids"][0, start:end].tolist()
            return {
                "text": template.decode(token_ids),
                "token_ids": token_ids,
                "logprobs": output["logprobs"][0, start:end].tolist(),
                "truncated": bool(output["truncated"]),
            }

        async with aclosing(as_ready(one, len(prompts))) as ready:
            async for row in ready:
                yield row

    async def prepare_refit_info_async(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], str | torch.dtype]]
    ) -> None:
        """Say which tensors every update must bring: shape and torch type, by name."""
        await self._engine.prepare_refit_info(state_dict_info)

    async def init_collective_async(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int
    ) -> None:
        """Join the trainer's process group (gloo on a CPU, NCCL on GPUs) with the ranks from
        `train_world_size + rank_prefix` on."""
        await self._engine.init_collective(rank_prefix, ip, port, world_size, train_world_size)

    async def update_weights_via_ipc_zmq_async(self) -> bool:
        """Load what an `IpcSender` on this device sends; returns True, or raises as the engine's
        method does."""
        await self._engine.update_weights_via_ipc_zmq(in_flight=self._config.weights.in_flight)
        return True

    async def update_weights_from_collective_async(self) -> bool:
        """Load what the trainer broadcasts; returns True, or raises as the engine's method does."""
        await self._engine.update_weights_from_collective(in_flight=self._config.weights.in_flight)
        return True

    async def reset_prefix_cache_async(self) -> None:
        """Forget every prefix."""
        await self._engine.reset_prefix_cache()

    async def sleep_async(self) -> None:
        """End what runs, as `abort`, and give memory back where the platform can; requests that
        come meanwhile wait until it is awake."""
        await self._engine.sleep()

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        """Serve again; `tags` (weights, kv_cache) wake a part, all of it if None."""
        await self._engine.wake_up(tags)

    async def report_device_id_async(self) -> list[str]:
        """List each shard's device: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`."""
        devices: list[str] = await self._engine.device_ids()
        return devices

    async def report_dp_openai_server_base_url(self) -> str | None:
        """The base URL of this worker's own OpenAI server; None if it has none."""
        return None if self._server is None else str(self._server.base_url)

    async def shutdown(self) -> bool:
        """End the server and the engine, and return True; the actor is its owner's to kill."""
        if self._server is not None:
            await self._server.stop()
        await self._engine.shutdown()
        return True

    async def call(self, method: str, *args: Any) -> Any:
        """Call any method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def submit(self, batch: Sequence[Submission]) -> None:
        """Begin requests, whose chunks `collect` returns."""
        for submission in batch:
            task = asyncio.create_task(self._run(*submission))
            self._requests[submission[0]] = task

    async def collect(self) -> list[tuple[str, Chunk | Exception]]:
        """The chunks since the last call, as soon as there is one; empty after a while without."""
        if not self._events:
            self._happened.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._happened.wait()
            except TimeoutError:
                return []
        events, self._events = self._events, []
        return events

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for."""
        for request_id in request_ids:
            if (task := self._requests.get(request_id)) is not None:
                task.cancel()

    async def _run(
        self, request_id: str, prompt: list[int], sampling: Any, seed: int | None
    ) -> None:
        ended = False
        try:
            stream = self._engine.stream(prompt, sampling, request_id, seed)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    self._tell(request_id, chunk)
                    ended = chunk.finish_reason is not None
            if not ended:  # whoever waits has no deadline of its own
                raise EngineError(f"{self._name} ended request {request_id} without a reason")
        except Exception as error:
            # What cannot travel to another process is told as text.
            known = isinstance(error, TurnwiseError)
            self._tell(request_id, error if known else EngineError(f"{self._name}: {error!r}"))
        finally:
            self._requests.pop(request_id, None)

    def _tell(self, request_id: str, event: Chunk | Exception) -> None:
        self._events.append((request_id, event))
        self._happened.set()

    def _template(self) -> Any:
        from transformers import AutoTokenizer

        from turnwise.serving.template import load_template

        model = self._config.model
        if not hasattr(self, "_chat_template"):
            tokenizer = AutoTokenizer.from_pretrained(
                model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
            )
            self._chat_template = load_template(self._config, tokenizer)
        return self._chat_template


def _stop_strings(data: Mapping[str, Any], count: int) -> list[list[str] | None]:
    """Each row's stop strings.

    Raises:
        InputError: when they are not a list of strings (or None) for each row.
    """
    stops = data.get("stop_strings")
    if stops is None:
        return [None] * count
    if len(stops) != count or any(isinstance(stop, str) for stop in stops):
        raise InputError(f"stop_strings wants {count} lists of strings, one for each row")
    return [list(stop) if stop is not None else None for stop in stops]


async def as_ready(
    one: Callable[[int], Awaitable[dict[str, Any]]], count: int
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """The results of `one(0)` to `one(count - 1)` with their numbers, in the order in which they
    come; raises at the end if some failed, in the words of the first of them."""

    async def settled(index: int) -> tuple[int, dict[str, Any] | Exception]:
        try:
            return index, await one(index)
        except Exception as error:
            return index, error

    failed: dict[int, Exception] = {}
    tasks = [asyncio.create_task(settled(index)) for index in range(count)]
    try:
        for ready in asyncio.as_completed(tasks):
            index, result = await ready
            if isinstance(result, Exception):
                failed[index] = result
            else:
                yield index, result
    finally:
        for task in tasks:
            task.cancel()
    if failed:
        index, error = min(failed.items())
        kind = type(error) if isinstance(error, TurnwiseError) else EngineError
        raise kind(f"{len(failed)} of {count} rows failed; row {index}: {error}") from error


_GPU_MEMORY = 0.9
"""vLLM's own default of gpu_memory_utilization."""
