"""NeMo-RL's generation worker: each Ray call takes a batch of tensors and returns tensors."""

import asyncio
import os
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from turnwise.config import Config, ConfigSource, SamplingConfig, load_config, set_key
from turnwise.config.base import NEEDED_KEYS, Tree
from turnwise.config.load import read_tree
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Completion, Rendezvous, Request, generate
from turnwise.errors import EngineError, InputError, TurnwiseError
from turnwise.serving.openai.serving_host import ServingHost
from turnwise.trajectory import Prompt
from turnwise.trajectory.prefix import replace_prefix

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from turnwise.internals.vllm import AsyncLLM
    from turnwise.serving.openai.server import OpenAIServer
    from turnwise.trajectory import ChatTemplate

_Row = TypeVar("_Row")
_P = ParamSpec("_P")
_Stops = Sequence[Sequence[str] | None]
"""Stop strings of each prompt, in addition to the configuration's."""
_VLLM_CONFIG = {
    "model_name": "model.path",
    "max_new_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "stop_strings": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "vllm_cfg.max_model_len": "model.max_length",
    "vllm_cfg.precision": "model.dtype",
    "vllm_cfg.tensor_parallel_size": "engine.tensor_parallel_size",
    "vllm_cfg.pipeline_parallel_size": "engine.pipeline_parallel_size",
    "vllm_cfg.enable_return_routed_experts": "engine.routing_replay",
    "vllm_cfg.expose_http_server": "serving.worker_servers",
    "vllm_cfg.gpu_memory_utilization": "engine.vllm_args.gpu_memory_utilization",
    "vllm_cfg.enforce_eager": "engine.vllm_args.enforce_eager",
    "vllm_cfg.kv_cache_dtype": "engine.vllm_args.kv_cache_dtype",
}
"""Our keys, by the keys of NeMo-RL's `VllmConfig` that change what a worker samples."""


def _replace_prefix_tokens(
    tokenizer: Foreign,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """Return `turnwise.replace_prefix_tokens` under NeMo-RL's name. As in NeMo-RL, the template may
    leave out the text before a call, and a tokenizer needs no more than `eos_token_id`."""
    given = model_prefix_token_ids, template_prefix_token_ids, template_token_ids
    return replace_prefix(tokenizer, *given, drops_content=True).tolist()


def worker_config(source: ConfigSource) -> Config:
    """Return a worker's configuration, which may be a `VllmConfig` of NeMo-RL: a dictionary with
    the section `vllm_cfg`. Its keys for refits, ports and logs have no counterpart in a worker."""
    if isinstance(source, Config):
        return source
    tree = read_tree(source)
    if "vllm_cfg" not in tree:
        return load_config(tree, optional=NEEDED_KEYS)
    if (backend := tree.get("backend", "vllm")) != "vllm":
        raise InputError(f"backend must be vllm, not {backend}")
    made: Tree = {}
    for theirs, ours in _VLLM_CONFIG.items():
        section, _, leaf = theirs.rpartition(".")
        if (value := (tree[section] if section else tree).get(leaf)) is not None:
            set_key(made, ours, value)
    for name, value in (tree.get("vllm_kwargs") or {}).items():
        set_key(made, f"engine.vllm_args.{name}", value)
    return load_config(made, optional=NEEDED_KEYS)


def _once_started(
    method: "Callable[Concatenate[VllmAsyncGenerationWorker, _P], Awaitable[_Row]]",
) -> "Callable[Concatenate[VllmAsyncGenerationWorker, _P], Coroutine[object, object, _Row]]":
    """Make a method start the engine if it has not been started."""

    @wraps(method)
    async def call(
        self: "VllmAsyncGenerationWorker", /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _Row:
        await self.ready()
        return await method(self, *args, **kwargs)

    return call


class VllmAsyncGenerationWorker(ServingHost):
    """An actor class that hosts one `VllmEngine`, with the methods and hooks of NeMo-RL's worker.

    Args:
        config: Our configuration, in any form that `load_config` takes, or a `VllmConfig` of
            NeMo-RL. The other arguments are those of `EngineHost`.

    A subclass may override `_create_engine`, and the methods that begin with `_setup_vllm`.

    The worker's server (`serving.worker_servers`) listens on the address of its node, unless
    `serving.host` is set. "Your trainer, our engines" in the documentation shows a training loop.

    Example:
        worker = ray.remote(VllmAsyncGenerationWorker).remote(config)
        await worker.post_init_async.remote()
        batch = {"input_ids": torch.tensor([[5, 6, 7]]), "input_lengths": torch.tensor([3])}
        async for reply in worker.generate_async.remote(batch):
            index, row = await reply
    """

    _start: "Callable[..., AsyncLLM]"
    _starting: "asyncio.Future[tuple[int, str | None]] | None" = None
    llm: "AsyncLLM | None" = None
    """vLLM's engine, once it has started."""
    server_thread: threading.Thread | None = None
    base_url: str | None = None
    """Base URL of this worker's OpenAI server; None without a server."""
    http_server: "uvicorn.Server | None" = None

    def __init__(self, config: ConfigSource, *args: Any, **kwargs: Any) -> None:
        super().__init__(worker_config(config), *args, **kwargs)

    async def post_init_async(self) -> int:
        """Build the engine, which takes seconds, and return this process's id. The first other call
        builds the engine if this method has not been called."""
        return (await self.start())[0]

    async def start(self) -> tuple[int, str | None]:
        if self._starting is None:
            self._starting = asyncio.ensure_future(super().start())
        return await asyncio.shield(self._starting)

    async def ready(self) -> None:
        """Wait until the engine has started, and start it if nobody has."""
        if self._starting is not None or not hasattr(self, "_engine"):
            await self.start()

    def _start_llm(self, path: str, llm_kwargs: JsonObject, metrics: bool) -> "AsyncLLM":
        self._start = partial(super()._start_llm, path, metrics=metrics)
        self._create_engine(llm_kwargs)
        if self.llm is None:
            raise InputError("_create_engine must set self.llm, as the one it overrides does")
        return self.llm

    def _create_engine(self, llm_kwargs: JsonObject) -> None:
        """Start vLLM's engine as `self.llm`.

        A hook: a subclass may change the arguments of vLLM's AsyncEngineArgs, or start the engine
        itself.
        """
        self.llm = self._start(llm_kwargs=llm_kwargs)

    def _listen(self, server: "OpenAIServer") -> str:
        self.server_thread, self.base_url, self.http_server = self._setup_vllm_server()
        return self.base_url

    def _setup_vllm_server(self) -> "tuple[threading.Thread, str, uvicorn.Server]":
        """Open this worker's OpenAI server; a hook for subclasses.

        The server answers requests only after this method has returned. The server runs on the
        engine's event loop, so code on that loop must never join the thread.

        Returns:
            A thread that ends with the server, the base URL, and uvicorn's server, which ends when
            its `should_exit` is set.
        """
        assert self.server is not None
        server = self.server.listen()
        thread = threading.Thread(target=self.server.ended.wait, daemon=True)
        thread.start()
        return thread, self.server.base_url, server

    @property
    def _extension(self) -> "Callable[[FastAPI], FastAPI]":
        return self._setup_vllm_openai_api_server

    def _setup_vllm_openai_api_server(self, app: "FastAPI") -> "FastAPI":
        """Return the server's application, which has all routes already.

        A hook: a subclass may add routes and middleware. Middleware runs around all requests that
        have the server's key. Middleware and async routes run on the engine's event loop, which
        they must not block; plain routes run in threads.
        """
        return app

    @_once_started
    async def report_dp_openai_server_base_url(self) -> str | None:
        """Return the base URL of this worker's OpenAI server; None without a server."""
        return self.base_url

    async def shutdown(self, exit_after: float | None = None) -> bool:
        if self.http_server is not None:
            self.http_server.should_exit = True
        return await super().shutdown(exit_after)

    async def generate_async(
        self, data: Mapping[str, Foreign], greedy: bool = False
    ) -> AsyncIterator[tuple[int, dict[str, torch.Tensor]]]:
        """Sample one completion for each row, and yield each as soon as it is ready.

        A row has no deadline while the engine samples (see `engine.request_timeout`). If a row
        fails, the other rows are still yielded, and the error is raised at the end.

        Args:
            data: Tensors of B prompts: `input_ids` [B, T], right-padded, and `input_lengths` [B].
                Optionally `stop_strings`: for each prompt None or a list of stop strings, in
                addition to the configuration's.
            greedy: Whether to sample with temperature 0 instead of the configured temperature.

        Yields:
            The row's index, and a dictionary of tensors, where W is the length of its prompt and
            completion: `output_ids` [1, W] (of the type of `input_ids`), `logprobs` [1, W] (nats; 0
            for the prompt), `weight_versions` [1, W] (-1 for the prompt), `generation_lengths` [1],
            `unpadded_sequence_lengths` [1], `truncated` [1] (max_tokens or the context cut the
            completion; false if the context had no room for one). All are on the device of
            `input_ids`.
        """
        input_ids_BT, lengths_B = data.get("input_ids"), data.get("input_lengths")
        if not (isinstance(input_ids_BT, torch.Tensor) and isinstance(lengths_B, torch.Tensor)):
            raise InputError("generate_async needs the tensors input_ids [B, T], input_lengths [B]")
        if input_ids_BT.ndim != 2 or lengths_B.shape != input_ids_BT.shape[:1]:
            raise InputError(
                "generate_async needs input_ids [B, T] and input_lengths [B], not "
                f"{list(input_ids_BT.shape)} and {list(lengths_B.shape)}"
            )
        if not len(input_ids_BT):
            return
        width = input_ids_BT.shape[1]
        if not all(0 < length <= width for length in lengths_B.tolist()):
            raise InputError(f"input_lengths must be between 1 and {width}")
        await self._check_padding(input_ids_BT, lengths_B)
        stops = _stop_strings(data.get("stop_strings"), len(lengths_B))
        if any(map(len, data.get("vllm_images") or ())):
            raise InputError("vllm_images: this worker takes prompts of text alone")

        async def one(index: int) -> dict[str, torch.Tensor]:
            prompt_L = input_ids_BT[index, : int(lengths_B[index])]
            return await self._complete(prompt_L, self._sampling(greedy, stops[index]))

        await self.ready()
        async with aclosing(as_ready(one, len(lengths_B))) as ready:
            async for row in ready:
                yield row

    async def _check_padding(self, input_ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Raise InputError if a row is padded on the left, or with anything but padding."""
        padding_BT = torch.arange(input_ids_BT.shape[1]) >= lengths_B.cpu()[:, None]
        if not (found := set(input_ids_BT.cpu()[padding_BT].tolist())):
            return
        if found != {0}:
            tokenizer = (await run_in_thread(lambda: self._template)).tokenizer
            found -= {0, tokenizer.pad_token_id, tokenizer.eos_token_id}
        if found - {0}:
            raise InputError(
                "input_ids must be right-padded: after the first input_lengths ids of a row comes "
                f"{min(found)}, which is not the tokenizer's padding"
            )

    def _sampling(self, greedy: bool, stop: Sequence[str] | None) -> SamplingConfig:
        changes: dict[str, object] = {"temperature": 0.0} if greedy else {}
        if stop:
            changes["stop"] = [*self._config.sampling.stop, *stop]
        return self._config.sampling.model_copy(update=changes)

    async def _complete(
        self, prompt_L: torch.Tensor, sampling: SamplingConfig
    ) -> dict[str, torch.Tensor]:
        room = self._config.model.max_length - len(prompt_L)
        completion = Completion([], [], [], "stop")
        if room > 0:
            name = f"{self._name}-{os.urandom(8).hex()}"
            request = Request(Prompt(prompt_L.tolist()), sampling.within(room), name)
            completion = await generate(self.turns, request)
        like, whole = prompt_L.new_tensor, len(prompt_L) + len(completion.token_ids)

        def after_1W(values: Sequence[float], fill: float, dtype: torch.dtype) -> torch.Tensor:
            before_L = torch.full_like(prompt_L, fill, dtype=dtype)
            return torch.cat([before_L, like(values, dtype=dtype)])[None]

        return {
            "output_ids": torch.cat([prompt_L, like(completion.token_ids)])[None],
            "logprobs": after_1W(completion.logprobs, 0.0, torch.float32),
            "weight_versions": after_1W(completion.weight_versions, -1, torch.long),
            "generation_lengths": like([len(completion.token_ids)], dtype=torch.long),
            "unpadded_sequence_lengths": like([whole], dtype=torch.long),
            "truncated": like([completion.finish_reason != "stop"], dtype=torch.bool),
        }

    async def generate_text_async(
        self, data: Mapping[str, Foreign], greedy: bool = False
    ) -> AsyncIterator[tuple[int, JsonObject]]:
        """Complete texts without a chat template. As in vLLM, the tokenizer's BOS is added.

        Args:
            data: `prompts`, the texts, and optionally `stop_strings`, as in `generate_async`.
            greedy: Whether to sample with temperature 0 instead of the configured temperature.

        Yields:
            For each row, as soon as it is ready: its index, and a batch of one completion, with the
            lists `texts`, `token_ids`, `logprobs` (nats) and `truncated` (max_tokens or the context
            cut the completion).
        """
        template, prompts = self._template, data.get("prompts")
        if not isinstance(prompts, Sequence) or isinstance(prompts, str):
            raise InputError("generate_text_async needs prompts, a list of texts")
        stops = _stop_strings(data.get("stop_strings"), len(prompts))

        async def one(index: int) -> JsonObject:
            prompt_L = torch.tensor(template.encode(prompts[index], add_special_tokens=True))
            output = await self._complete(prompt_L, self._sampling(greedy, stops[index]))
            start = len(prompt_L)
            token_ids = output["output_ids"][0, start:].tolist()
            return {
                "texts": [template.decode(token_ids)],
                "token_ids": [token_ids],
                "logprobs": [output["logprobs"][0, start:].tolist()],
                "truncated": [bool(output["truncated"])],
            }

        await self.ready()
        async with aclosing(as_ready(one, len(prompts))) as ready:
            async for row in ready:
                yield row

    @_once_started
    async def prepare_refit_info_async(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], str | torch.dtype]]
    ) -> None:
        """Declare the tensors that every update must contain: shape and dtype, by name."""
        await self._engine.prepare_refit_info(state_dict_info)

    @_once_started
    async def init_collective_async(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int
    ) -> None:
        """Join the trainer's process group (gloo on a CPU, NCCL on GPUs). This worker's first rank
        in the group is `train_world_size + rank_prefix`."""
        group = Rendezvous(rank_prefix, ip, port, world_size, train_world_size)
        await self._engine.init_collective(group)

    @_once_started
    async def update_weights_via_ipc_zmq_async(self) -> bool:
        """Load the weights that `refit_sender("ipc", ...)` sends on this device; return True.

        Raises:
            WeightUpdateError, DeadlineError: when the update fails.
        """
        await self._engine.receive_weights("ipc", in_flight=self._config.weights.in_flight)
        return True

    @_once_started
    async def update_weights_from_collective_async(self) -> bool:
        """Load the weights that `refit_sender("collective", ...)` broadcasts; return True.

        Raises:
            WeightUpdateError, DeadlineError: when the update fails.
        """
        await self._engine.receive_weights("collective", in_flight=self._config.weights.in_flight)
        return True

    @_once_started
    async def reset_prefix_cache_async(self) -> None:
        """Drop all cached prefixes."""
        await self._engine.reset_prefix_cache()

    @_once_started
    async def sleep_async(self) -> None:
        """Abort running requests, and free memory if the platform can; new requests wait."""
        await self._engine.sleep()

    @_once_started
    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        """Resume serving. `tags` selects the memory to restore ("weights", "kv_cache"); None
        restores all of it."""
        await self._engine.wake_up(tags)

    @_once_started
    async def report_device_id_async(self) -> list[str]:
        """Return the device of each shard: a GPU's UUID, or on a CPU `HOST-PROCESS_ID`."""
        return await self._engine.device_ids()

    def _server_config(self) -> Config:
        """Return the configuration; without `serving.host`, the server listens on the node's
        address, so that other nodes can reach it."""
        if "host" in self._config.serving.model_fields_set:
            return self._config
        from ray.util import get_node_ip_address  # reads the environment when it is imported

        return self._config.changed({"serving": {"host": get_node_ip_address()}})

    @cached_property
    def _template(self) -> "ChatTemplate":
        from turnwise.chat.template import load_template, read_tokenizer

        return load_template(
            self._config.model,
            self._config.sampling,
            self._config.engine,
            read_tokenizer(self._config.model),
        )


def _stop_strings(stops: _Stops | None, count: int) -> list[list[str] | None]:
    """Return each row's stop strings: a list, or None."""
    if stops is None:
        return [None] * count
    if len(stops) != count or any(isinstance(stop, str) for stop in stops):
        raise InputError(f"stop_strings needs {count} lists of strings, one for each row")
    return [list(stop) if stop is not None else None for stop in stops]


async def as_ready(
    one: Callable[[int], Awaitable[_Row]], count: int
) -> AsyncGenerator[tuple[int, _Row], None]:
    """Run `one(0)` to `one(count - 1)` concurrently; yield index and result of each as it finishes.

    At the end, raise the error of the failed row with the lowest index.
    """

    async def ended(index: int) -> tuple[int, _Row | Exception]:
        try:
            return index, await one(index)
        except Exception as error:
            return index, error

    failed: dict[int, Exception] = {}
    tasks = [asyncio.create_task(ended(index)) for index in range(count)]
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
