"""vLLM: the public names that Turnwise uses, and the internals that it uses or replaces.

Apart from this file, only `internals/vllm_cpu.py`, with the patches for engines on a CPU, and
`internals/vllm_server.py` import vLLM. The three files are checked against vLLM 0.32. Every process
of an engine imports this file, which applies the patches.
"""

import gc
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

_collecting = gc.isenabled()
gc.disable()  # makes the import a fifth faster

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    get_tp_group,
    model_parallel_is_initialized,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMValidationError
from vllm.inputs import MultiModalInput, TokensInput, TokensPrompt, mm_input, tokens_input
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import logger as reload_logger
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.platforms import current_platform
from vllm.renderers import BaseRenderer
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.tasks import SupportedTask
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, RequestStateStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample import sampler
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.serial_utils import run_method
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.worker_base import WorkerWrapperBase

if _collecting:
    gc.enable()

from turnwise.internals import internal, vllm_cpu

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_worker import Worker

PRELOAD_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
)
"""Modules of an engine's process on a CPU; the fork server imports them once for all engines."""


# Internals of an engine's client


def _occupancy(self: EngineCoreProc) -> tuple[int, int, float]:
    running, waiting = self.scheduler.get_request_counts()
    return running, waiting, float(self.scheduler.kv_cache_manager.usage)


internal(Scheduler, "get_request_counts", "self")
internal(KVCacheManager, "usage")
EngineCoreProc.turnwise_occupancy = _occupancy


async def occupancy(llm: AsyncLLM) -> tuple[int, int, float]:
    """Return the number of running sequences, the number of waiting requests, and the fraction of
    the KV cache in use. vLLM itself reports them only with its statistics, which cost time in every
    step."""
    answer: tuple[int, int, float] = await llm.engine_core.call_utility_async("turnwise_occupancy")
    return answer


async def pause(llm: AsyncLLM, mode: str, clear_cache: bool = True) -> None:
    """Pause generation. `AsyncLLM.pause_generation` would also sleep for 20 ms at the end, to keep
    an order of streams that does not matter here."""
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def engine_processes(llm: AsyncLLM) -> list[int]:
    """Return the ids of the processes that compute; [] if the engine runs in this process."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return [process.pid for process in getattr(manager, "processes", ())]


def weight_versions_so_far(llm: AsyncLLM, request_id: str) -> list[WeightVersionSpan]:
    """Return the weight versions of a running request's tokens. vLLM's outputs contain them only at
    the end of the request."""
    processor = llm.output_processor
    (internal_id,) = processor.external_req_ids[request_id]
    spans: list[WeightVersionSpan] = processor.request_states[internal_id]._weight_version_spans()
    return spans


def divert_outputs(
    llm: AsyncLLM, receive: Callable[..., object], fail: Callable[[Exception], None]
) -> tuple[Callable[..., OutputProcessorOutput], Callable[[Exception], None]]:
    """Give the outputs and errors of the engine's process to `receive` and `fail`, because a
    request that only wants token ids does not need the detokenizer. Return the two replaced
    functions of vLLM, to which `receive` and `fail` can pass on all other outputs and errors."""
    processor = llm.output_processor
    own = processor.process_outputs, processor.propagate_error
    processor.process_outputs, processor.propagate_error = receive, fail
    return own


def allowed_bits(
    manager: StructuredOutputManager, made: EngineCoreRequest, token_ids: Sequence[int]
) -> Iterator[bytes]:
    """Yield, for each position of a completion, the ids that the request's grammar allows there, as
    the bit mask that the scheduler gives to the sampler. Without a grammar, yield nothing. The
    grammar is compiled once; after that, each position takes some microseconds."""
    request = Request.from_engine_core_request(made, None)
    grammar = request.structured_output_request
    if grammar is None:
        return
    manager.grammar_init(request)
    grammar.grammar = grammar._grammar.result()
    for token in token_ids:
        yield manager.grammar_bitmask({made.request_id: request}, [made.request_id], {})[
            0
        ].tobytes()
        request.append_output_token_ids(token)
        manager.accept_tokens(request, [token])


internal(StructuredOutputManager, "grammar_init", "self", "request")
_names = ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens")
internal(StructuredOutputManager, "grammar_bitmask", *_names)
internal(StructuredOutputManager, "accept_tokens", "self", "request", "new_token_ids")
internal(StructuredOutputManager, "clear_backend", "self")


def read_outputs(llm: AsyncLLM) -> None:
    """Start the task that reads the outputs of the engine's process, as vLLM's `generate` does."""
    llm._run_output_handler()


_parameters = ("self", "req_state", "engine_core_output")
count_output = internal(OutputProcessor, "_update_stats_from_output", *_parameters)
"""Method of `OutputProcessor` that counts an output of a request in vLLM's statistics."""
_parameters = ("self", "req_state", "finish_reason")
count_end = internal(OutputProcessor, "_update_stats_from_finished", *_parameters)
"""Method of `OutputProcessor` that counts the end of a request in vLLM's statistics."""


def beam_search(
    generate: Callable[..., AsyncGenerator[SimpleNamespace, None]],
    tokenizer: object,
    token_ids: list[int],
    name: str,
    width: int,
    max_tokens: int,
    ignore_eos: bool,
) -> AsyncGenerator[RequestOutput, None]:
    """Search with the algorithm of vLLM's server, with `generate` in place of the engine's method;
    answers include EOS."""
    search = BeamSearchOnlineMixin()
    watermarking = SimpleNamespace(resolve_watermarking=lambda params: False)
    search.engine_client = SimpleNamespace(generate=generate, input_processor=watermarking)
    search.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    params = BeamSearchParams(width, max_tokens, ignore_eos, include_stop_str_in_output=True)
    inputs = tokens_input(token_ids)
    found: AsyncGenerator[RequestOutput, None] = search.beam_search(inputs, name, params)
    return found


def use_process_context(context: BaseContext) -> None:
    """Make vLLM start the processes of engines and shards from this multiprocessing context,
    because vLLM's own contexts import nothing in advance."""
    engine_utils.get_mp_context = multiproc_executor.get_mp_context = lambda: context


async def process_image(llm: AsyncLLM, picture: object, name: str) -> MultiModalInput:
    """Return the input that vLLM's processor makes from a prompt that is one image. `name` is the
    image's key in vLLM's caches. The processor runs in the thread in which vLLM processes all
    prompts."""
    processor = llm.renderer.get_mm_processor().info.get_hf_processor()
    prompt = TokensPrompt(
        prompt_token_ids=[processor.tokenizer.convert_tokens_to_ids(processor.image_token)],
        multi_modal_data={"image": [picture]},
        multi_modal_uuids={"image": [name]},
    )
    made: MultiModalInput = await llm.renderer.process_for_engine_async(prompt, time.time())
    return made


internal(BaseRenderer, "process_for_engine_async", "self", "prompt", "arrival_time")
internal(BaseRenderer, "get_mm_processor", "self")
internal(BeamSearchOnlineMixin, "beam_search", "self", "prompt", "request_id", "params")
internal(AsyncLLM, "_run_output_handler", "self")
internal(OutputProcessor, "process_outputs", "self", "engine_core_outputs")
internal(OutputProcessor, "propagate_error", "self", "e")
internal(RequestState, "_weight_version_spans", "self")
internal(engine_utils, "get_mp_context")
internal(multiproc_executor, "get_mp_context")


# Internals of an engine's workers


def once_for_all_shards(compute: Callable[[], str]) -> str:
    """Call a function on an engine's first shard, and return its result on all shards.

    The function must not raise. All shards call this at the same point of their step, because they
    sample the same tokens.
    """
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return compute()
    group = get_tp_group()
    return str(group.broadcast_object(compute() if group.rank_in_group == 0 else None, src=0))


def adapter_slots(manager: LRUCacheWorkerLoRAManager) -> "LoRAModelManager":
    """Return the object that holds a worker's adapters, because vLLM's public functions load
    adapters from folders only, and only when a request names them."""
    return manager._adapter_manager


def check_experts_of(slots: "LoRAModelManager", lora: LoRAModel) -> None:
    """Check that an adapter of a model's experts has the layout that vLLM can apply."""
    slots._validate_moe_lora_format(lora)


def forget_update(worker: "Worker") -> None:
    """Let a worker begin an update even if the previous update was interrupted."""
    internal(worker, "_weight_update_active")
    worker._weight_update_active = False


def add_transfer_engine(name: str, kind: type[WeightTransferEngine]) -> None:
    """Register a weight transfer engine, unless it is registered already, because vLLM refuses a
    second registration."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, kind)


internal(LRUCacheWorkerLoRAManager._manager_cls, "_validate_moe_lora_format", "self", "lora_model")
internal(WeightTransferEngineFactory, "_registry")


# Patches of every engine's process

internal(KVCacheConfig, "needs_kv_cache_zeroing")
KVCacheConfig.needs_kv_cache_zeroing = True
"""Let every engine clear blocks of its KV cache before a request gets them. vLLM does this only for
models that read blocks before writing them. But attention also reads the unused end of a request's
last block, with probability 0, and 0 times NaN is NaN. So if the training of one adapter has
diverged, its NaNs would end the requests of other adapters."""

URGENT = -1
"""Priority of a request that does not wait for others, such as the check of a weight update."""
_add_request = internal(Scheduler, "add_request", "self", "request")
_schedule = internal(Scheduler, "schedule", "self")
internal(Scheduler, "_preempt_request", "self", "request", "timestamp")
internal(Scheduler, "_request_blocks_can_be_freed", "self", "request")


def _add_noted(self: Scheduler, request: Request) -> None:
    _add_request(self, request)
    if request.priority == URGENT:
        self.urgent = [*getattr(self, "urgent", ()), request]


def _schedule_urgent_first(self: Scheduler, *arguments: object, **more: object) -> object:
    """Begin an urgent request in the next step, whatever the scheduling policy and the queue are.
    If there is no room for the request, preempt the last running requests, as vLLM does when its
    cache is full; the preempted requests continue later."""
    if getattr(self, "urgent", None) and self._pause_state == PauseState.UNPAUSED:
        self.urgent = [each for each in self.urgent if each.status == RequestStatus.WAITING]
        for request in self.urgent:
            _make_room(self, request)
    return _schedule(self, *arguments, **more)


def _make_room(self: Scheduler, request: Request) -> None:
    if request not in self.waiting:
        return
    self.waiting.remove_request(request)
    caches, groups = self.kv_cache_manager, len(self.kv_cache_config.kv_cache_groups)
    blocks = groups * (request.num_tokens // self.block_size + 1) + caches.watermark_blocks
    while (running := self.running) and (
        len(running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs
        or caches.block_pool.get_num_free_blocks() < blocks + groups * len(running)
    ):
        if not self._request_blocks_can_be_freed(running[-1]):
            break
        other = running.pop()
        self._preempt_request(other, time.monotonic())
        self.prev_step_scheduled_req_ids.discard(other.request_id)
    self.waiting.prepend_request(request)


Scheduler.add_request = _add_noted
Scheduler.schedule = _schedule_urgent_first

TIMES = "turnwise_times"
"""Key in `kv_transfer_params` of collected outputs. Its value is a list with the time of each step,
in seconds of the engine's monotonic clock."""
_PLAIN = {"request_id", "new_token_ids", "new_logprobs", "stop_reason", "num_nans_in_logits"}
_UNHELD = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _PLAIN)
"""Fields that are None if an output has only tokens and their log-probs. An example is
`prefill_stats`, which is set with the first token. An output in which any of these fields is set is
sent at once."""


STREAM_SECONDS = 0.025
"""Seconds between two outputs of a request with a `stream_interval` of 1."""


class TokenBatches:
    """The tokens that one engine's process has not sent yet.

    vLLM's engine sends each token of each request separately, with three arrays for the log-prob,
    and the frontend collects `stream_interval` tokens. Here the engine's process collects the
    tokens, which saves most of the work in both processes. With the streams of
    `engine.vllm_requests`, a chat of 24 tokens takes 1.5 ms of the server's processor time instead
    of 2.75 ms. A request's first token and its end are sent at once. With an interval of 1, tokens
    are collected for `STREAM_SECONDS`; with an interval of None, they are not collected.

    All collected tokens are sent before the process handles any message except a new request. So
    across a pause, an abort or an update, tokens keep the version of the weights that sampled them.

    Args:
        requests: The scheduler's requests, by id.
        timed: Whether vLLM's statistics are collected; if so, outputs contain their tokens' times.
    """

    def __init__(self, requests: Mapping[str, Request], timed: bool = False) -> None:
        self._requests = requests
        self._timed = timed
        self._held: dict[str, tuple[int, list[EngineCoreOutput], list[float]]] = {}
        """By request id: index of the client, held outputs, and the time of each output."""
        self._version: str | None = None  # version of the weights that sampled all held tokens
        self._sent = WeakKeyDictionary[Request, float]()
        """Time at which tokens of each request were last sent."""

    def collect(self, step: dict[int, EngineCoreOutputs]) -> None:
        """Remove from a step's outputs (by client) the tokens that can wait, and add the collected
        tokens that are due."""
        for client, outputs in list(step.items()):
            self._version = outputs.weight_version
            due = []
            for output in outputs.outputs:
                request_id, held = output.request_id, self._held.get(output.request_id)
                request = self._requests.get(request_id)
                params = None if request is None else request.sampling_params
                if (
                    params is None
                    or (interval := params.stream_interval) is None
                    or params.detokenize  # stop strings are found in the frontend
                    or output.num_nans_in_logits
                    or any(getattr(output, name) is not None for name in _UNHELD)
                ):
                    due += [output] if held is None else [self._take(request_id), output]
                    if request is not None:
                        self._sent[request] = outputs.timestamp
                    continue
                if held is None:
                    held = self._held[request_id] = (client, [], [])
                held[1].append(output)
                held[2].append(outputs.timestamp)
                if interval == 1:
                    ready = outputs.timestamp >= self._sent.get(request, 0.0) + STREAM_SECONDS
                else:
                    ready = sum(len(each.new_token_ids) for each in held[1]) >= interval
                if ready:
                    due.append(self._take(request_id))
                    self._sent[request] = outputs.timestamp
            outputs.outputs = due
            if not (due or outputs.scheduler_stats or outputs.finished_requests):
                del step[client]

    def release(self, send: Callable[[tuple[int, EngineCoreOutputs]], None]) -> None:
        """Send all held tokens: for each request, one output to the request's client."""
        for request_id, (client, _, _) in list(self._held.items()):
            outputs = [self._take(request_id)]
            send((client, EngineCoreOutputs(outputs=outputs, weight_version=self._version)))

    def _take(self, request_id: str) -> EngineCoreOutput:
        """Remove a request's held tokens, and return them joined in one output."""
        _, held, times = self._held.pop(request_id)
        joined = held[0]
        if len(held) > 1:
            logprobs = None
            if rows := [each.new_logprobs for each in held if each.new_logprobs is not None]:
                # All rows of a step are as wide as the row of the request with the most log-probs.
                width = min(each.logprobs.shape[1] for each in rows)
                cut = ((each[0][:, :width], each[1][:, :width], each[2]) for each in rows)
                columns = zip(*cut, strict=True)
                logprobs = LogprobsLists(*(np.concatenate(column) for column in columns))
            tokens = [token for each in held for token in each.new_token_ids]
            joined = EngineCoreOutput(request_id, tokens, logprobs)
        if self._timed:
            joined.kv_transfer_params = {TIMES: times}
        return joined


_attach = internal(EngineCoreProc, "_attach_weight_version", "self", "outputs")
_handle = internal(EngineCoreProc, "_handle_client_request", "self", "request_type", "request")


def _attach_weight_version(self: EngineCoreProc, outputs: dict[int, EngineCoreOutputs]) -> None:
    """Make an engine's process send several tokens of a request together."""
    _attach(self, outputs)
    if not hasattr(self, "token_batches"):
        self.token_batches = TokenBatches(self.scheduler.requests, timed=self.log_stats)
    self.token_batches.collect(outputs)


def _handle_client_request(
    self: EngineCoreProc, kind: EngineCoreRequestType, request: object
) -> None:
    if kind != EngineCoreRequestType.ADD and hasattr(self, "token_batches"):
        self.token_batches.release(self.output_queue.put_nowait)
    _handle(self, kind, request)


EngineCoreProc._attach_weight_version = _attach_weight_version
EngineCoreProc._handle_client_request = _handle_client_request

_forward = internal(sampler.Sampler, "forward", "self", "logits", "sampling_metadata")
_names = ("self", "logprobs", "logprob_token_ids", "sampled")
_gather = internal(sampler.Sampler, "gather_specific_token_logprobs", *_names)
internal(sampler.Sampler, "gather_logprobs", "logprobs", "num_logprobs", "token_ids")


def _note_likeliest(
    self: sampler.Sampler,
    logits: torch.Tensor,
    sampling_metadata: "SamplingMetadata",  # vLLM passes it by this name
    *args: object,
    **more: object,
) -> object:
    self.likeliest = sampling_metadata.max_num_logprobs
    return _forward(self, logits, sampling_metadata, *args, **more)


def _gather_both(
    self: sampler.Sampler,
    logprobs: torch.Tensor,
    given: dict[int, list[int]],
    sampled: torch.Tensor,
) -> LogprobsTensors | None:
    """Let one step return the log-probs of given tokens to some requests, and the log-probs of the
    likeliest tokens to the other requests. vLLM's sampler returns only given tokens to all requests
    of a step if one of the requests asks for given tokens."""
    own: LogprobsTensors | None = _gather(self, logprobs, given, sampled)
    if own is None or not self.likeliest:
        return own
    best = self.gather_logprobs(logprobs, self.likeliest, token_ids=sampled)
    rows, width = list(given), max(own.logprobs.shape[1], best.logprobs.shape[1])
    ids = best.logprob_token_ids.new_zeros(len(sampled), width)
    values = best.logprobs.new_full((len(sampled), width), float("-inf"))
    for part, chosen in ((best, slice(None)), (own, rows)):
        ids[chosen, : part.logprobs.shape[1]] = part.logprob_token_ids[chosen]
        values[chosen, : part.logprobs.shape[1]] = part.logprobs[chosen]
    return LogprobsTensors(ids, values, best.selected_token_ranks)


sampler.Sampler.forward = _note_likeliest
sampler.Sampler.gather_specific_token_logprobs = _gather_both

internal(scheduler_output, "strip_covered_mm_data", "mm_features", "num_computed_tokens")


def _keep_images(features: list[object], *_: object, **__: object) -> list[object]:
    """Send a worker all images of a request, including images in the prefix cache. vLLM leaves
    cached images out, and its engine dies if it has to compute such an image again. This happens
    when a request is preempted, or kept during a weight update, and so loses its cached blocks."""
    return features


scheduler_output.strip_covered_mm_data = _keep_images
