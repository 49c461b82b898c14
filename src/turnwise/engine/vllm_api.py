"""The names of vLLM that turnwise uses, except those of vLLM's HTTP server.

Those are in `serving/openai/vllm_api.py`; nothing else in turnwise imports vLLM. They were checked
against vLLM 0.32. When vLLM moves its names, change them in these two files. Importing them takes a
fifth less time without the garbage collector.

On a CPU, vLLM's runner of models returns no routed experts; `capture_experts` connects vLLM's own
recorder to it. It relies on `execute_model`, `sample_tokens`, `execute_model_state`, `input_batch`
and `query_start_loc` of the runner, on `begin_step`, `prepare_output`, `enqueue_cpu_copy` and
`process_output` of the recorder, and on synchronous scheduling.

`_collect_tokens` relies on `_attach_weight_version` and `_handle_client_request` of the engine's
process, on its `scheduler.requests`, `output_queue` and `log_stats`, and on an output's fields.

`_keep_likeliest` relies on `forward`, `gather_logprobs` and `gather_specific_token_logprobs` of the
sampler, and on the `max_num_logprobs` of a step's metadata.

`weights/vllm_adapters.py` relies on attributes of vLLM's objects for adapters: `_adapter_manager`
of the worker's manager; `modules`, `lora_index_to_id` and `_validate_moe_lora_format` of that; and
`lora_a_stacked`, `lora_b_stacked`, `slice_lora_a` and `slice_lora_b` of its layers.
"""

import gc
from collections.abc import Callable
from functools import partialmethod
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

_collecting = gc.isenabled()
gc.disable()

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import logger as reload_logger
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port
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
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, RequestStateStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.request import Request
from vllm.v1.sample import sampler
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.worker_base import WorkerWrapperBase

if _collecting:
    gc.enable()

from turnwise.engine.token_batches import TokenBatches

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner


_BUSY_SECONDS = 0.001
_LOOK_MS = 100
PRELOAD_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
)
"""Modules that an engine process on a CPU needs, imported once before it is forked."""


def _compile_nothing() -> None:
    """Replace two small functions, which torch compiles on their first call, by plain Python.

    Compiling them costs each engine's first request seconds, and saves nothing on a CPU.
    """
    compiled = (
        (sampler, "batched_count_greater_than"),
        (vocab_parallel_embedding, "get_masked_input_and_mask"),
    )
    for module, name in compiled:
        function = getattr(module, name)
        setattr(module, name, getattr(function, "__wrapped__", function))


class _Waiting(shm_broadcast.SpinCondition):  # type: ignore[misc]
    """Wait of an engine's shards for their next step, without computing meanwhile.

    vLLM's own polls shared memory for a second after each step, on the cores that another shard
    computes on.
    """

    def __init__(self, is_reader: bool, context: object, notify_address: str) -> None:
        super().__init__(is_reader, context, notify_address, busy_loop_s=_BUSY_SECONDS)

    def wait(self, timeout_ms: int | None = None) -> None:
        # A notification before the subscription is lost; the memory is looked at again anyway.
        super().wait(_LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))


def _checked_experts(self: VllmConfig, check: Callable[[VllmConfig], None]) -> None:
    """Check a configuration that returns experts as vLLM does, but for the runner of models."""
    current_platform.is_out_of_tree = lambda: True
    try:
        check(self)
    finally:
        del current_platform.is_out_of_tree


def capture_experts(runner: "CPUModelRunner") -> None:
    """Let a CPU's runner of models return the experts of each request with its tokens.

    Args:
        runner: vLLM's runner, before its first request.
    """
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    recorder = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(step: "SchedulerOutput", *arguments: object) -> "ModelRunnerOutput | None":
        recorder.begin_step(step.aux_output_connector_metadata)
        return execute(step, *arguments)

    def sample_tokens(*arguments: object) -> "ModelRunnerOutput":
        if runner.execute_model_state is None:  # nothing was computed
            return sample(*arguments)
        requests, batch = runner.input_batch.num_reqs, runner.input_batch
        computed = SimpleNamespace(
            req_ids=list(batch.req_ids),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:requests].copy(),
            query_start_loc_np=runner.query_start_loc.np[: requests + 1].copy(),
        )
        pending = recorder.prepare_output(computed)
        output = sample(*arguments)
        if pending is not None:  # only one shard of an engine records
            places = [output.req_id_to_index[request] for request in pending.request_ids]
            sampled = np.array([len(output.sampled_token_ids[place]) for place in places])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _collect_tokens() -> None:
    """Let the process of every engine send several tokens of a request together."""
    attach, handle = EngineCoreProc._attach_weight_version, EngineCoreProc._handle_client_request

    def attach_weight_version(self: EngineCoreProc, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach(self, outputs)
        if not hasattr(self, "token_batches"):
            self.token_batches = TokenBatches(self.scheduler.requests, timed=self.log_stats)
        self.token_batches.collect(outputs)

    def handle_client_request(
        self: EngineCoreProc, kind: EngineCoreRequestType, request: object
    ) -> None:
        if kind != EngineCoreRequestType.ADD and hasattr(self, "token_batches"):
            self.token_batches.release(self.output_queue.put_nowait)
        handle(self, kind, request)

    EngineCoreProc._attach_weight_version = attach_weight_version
    EngineCoreProc._handle_client_request = handle_client_request


def _keep_likeliest() -> None:
    """Let one step return given tokens to some requests, and the likeliest tokens to others.

    vLLM's sampler returns the log-probs of the given tokens (`logprob_token_ids`) alone, for every
    request of a step in which one asks for them.
    """
    cls = sampler.Sampler
    forward, gather = cls.forward, cls.gather_specific_token_logprobs

    def noting(
        self: sampler.Sampler,
        logits: torch.Tensor,
        sampling_metadata: "SamplingMetadata",  # vLLM passes it by this name
        *args: object,
        **more: object,
    ) -> object:
        self.likeliest = sampling_metadata.max_num_logprobs
        return forward(self, logits, sampling_metadata, *args, **more)

    def gathered(
        self: sampler.Sampler,
        logprobs: torch.Tensor,
        given: dict[int, list[int]],
        sampled: torch.Tensor,
    ) -> LogprobsTensors | None:
        own = gather(self, logprobs, given, sampled)
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

    cls.forward, cls.gather_specific_token_logprobs = noting, gathered


_collect_tokens()
_keep_likeliest()
if current_platform.is_cpu():
    _compile_nothing()
    shm_broadcast.SpinCondition = _Waiting
    VllmConfig._verify_aux_output_compatibility = partialmethod(
        _checked_experts, VllmConfig._verify_aux_output_compatibility
    )


def use_process_context(context: BaseContext) -> None:
    """Make vLLM start the processes of engines and shards from this multiprocessing context."""
    engine_utils.get_mp_context = multiproc_executor.get_mp_context = lambda: context


async def pause(llm: AsyncLLM, mode: str, clear_cache: bool = True) -> None:
    """Pause generation without the 20 ms that AsyncLLM.pause_generation sleeps at its end.

    Requests end through their own streams, whose order does not matter here.
    """
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def engine_processes(llm: AsyncLLM) -> list[int]:
    """Return the ids of the processes that compute; none for an engine in this process."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return [process.pid for process in getattr(manager, "processes", ())]


def weight_versions_so_far(llm: AsyncLLM, request_id: str) -> list[WeightVersionSpan]:
    """Return the versions of a running request's tokens; outputs carry them only at its end."""
    processor = llm.output_processor
    (internal,) = processor.external_req_ids[request_id]
    spans: list[WeightVersionSpan] = processor.request_states[internal]._weight_version_spans()
    return spans


__all__ = [
    "PRELOAD_MODULES",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BaseLayerWithLoRA",
    "BatchUpdate",
    "ChatCompletionRequest",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "Executor",
    "FlatLogprobs",
    "IterationStats",
    "LRUCacheWorkerLoRAManager",
    "LoRALayerWeights",
    "LoRAModel",
    "LoRAModelRunnerMixin",
    "LoRARequest",
    "LogitsProcessor",
    "LogitsProcessorWithLoRA",
    "LogprobsLists",
    "MultiprocExecutor",
    "OutputProcessorOutput",
    "PEFTHelper",
    "ParallelLMHead",
    "PrometheusStatLogger",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStateStats",
    "SamplingParams",
    "TokensInput",
    "ToolParserManager",
    "VLLMValidationError",
    "VllmConfig",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "WeightVersionSpan",
    "WorkerWrapperBase",
    "capture_experts",
    "cleanup_dist_env_and_memory",
    "current_platform",
    "enable_envs_cache",
    "engine_processes",
    "finalize_layerwise_reload",
    "get_cached_tokenizer",
    "get_distributed_init_method",
    "get_ip",
    "get_open_port",
    "initialize_layerwise_reload",
    "process_dict_updates",
    "reload_logger",
    "run_method",
    "tokens_input",
    "use_process_context",
    "weight_versions_so_far",
]
