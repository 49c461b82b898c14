"""Start of a vLLM engine from a configuration: its arguments, its processes, and its errors.

Importing this module does not import vLLM, which takes seconds.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from turnwise.config import EngineConfig, ModelConfig
from turnwise.config.serving import CPU_KV_CACHE_GIB
from turnwise.core import fork_server
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import load_object
from turnwise.core.precision import precision
from turnwise.engine.adapters import NO_ADAPTERS, EngineAdapters
from turnwise.engine.logits_processors import ADAPTER, KEY, SETTINGS
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.internals.vllm import AsyncLLM

_ERROR_LINE = re.compile(r"\b(?:\w+Error|\w+Exception): (.+)")
_UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""A dotted name, because vLLM rewrites the short name "uni" to "mp" on CPUs."""
_FORKED_EXECUTOR = "turnwise.engine.forked_executor.ForkedExecutor"
logger = logging.getLogger(__name__)

_CPU_BLOCK_SIZE = 32


def import_vllm() -> ModuleType:
    """Import vLLM's names, and prepare the process from which engines are forked."""
    context = multiprocessing.get_context("forkserver")
    if not fork_server.share_with_engines():
        context.set_forkserver_preload(["turnwise.engine.preload"])
        multiprocessing.forkserver.ensure_running()  # it imports vLLM while this process does
    from turnwise.internals import vllm

    vllm.use_process_context(context)
    return vllm


def start_llm(path: str, arguments: JsonObject, metrics: bool) -> "AsyncLLM":
    """Start vLLM's engine, with statistics for Prometheus if `metrics` is set. Raise InputError
    when vLLM refuses an argument or the model; errors call the model `path`."""
    from turnwise.internals import vllm  # seconds to import

    try:
        # The loggers are explicit, because vLLM's default adds a logger whose output nobody reads.
        loggers = [vllm.PrometheusStatLogger] if metrics else []
        return vllm.AsyncLLM.from_engine_args(
            vllm.AsyncEngineArgs(**arguments), stat_loggers=loggers
        )
    except (ValueError, TypeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = " ".join(lines[:3]) or type(error).__name__
        raise InputError(f"vLLM cannot serve {path}: {cause}") from error
    except RuntimeError as error:  # the engine's process failed, and the reason is in the log
        log = Path(os.readlink("/proc/self/fd/2"))  # the engine's process also writes to this file
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        errors = (match[1] for line in reversed(lines) if (match := _ERROR_LINE.search(line)))
        cause = next((text for text in errors if "root cause" not in text), "") or str(error)
        raise InputError(f"vLLM cannot serve {path}: {cause}") from error


def engine_arguments(
    model: ModelConfig,
    engine: EngineConfig,
    deterministic: bool,
    adapters: EngineAdapters = NO_ADAPTERS,
) -> JsonObject:
    """Return the arguments of vLLM's AsyncEngineArgs for a configuration. Raise InputError when
    vLLM cannot run the configuration on this machine."""
    from turnwise.internals import vllm  # seconds to import

    classes: list[str] = []
    callables: list[str] = []
    for name in engine.logits_processors:  # vLLM's batch classes, or plain callables
        loaded = load_object(name, KEY)
        if not callable(loaded):
            raise InputError(f"{KEY}: {name} is not callable")
        batched = isinstance(loaded, type) and issubclass(loaded, vllm.LogitsProcessor)
        (classes if batched else callables).append(name)
    adapted = bool(callables or engine.logits_processors_allowed is not None)
    arguments: JsonObject = {
        "model": resolve_model(model.path),
        "tokenizer": resolve_tokenizer(model),
        "dtype": precision(model, vllm.current_platform.is_cuda()),
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_model_len": model.max_length,
        "max_num_seqs": 1 if deterministic else engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.prefix_caching and not deterministic,
        "enable_return_routed_experts": engine.routing_replay,
        "logits_processors": [*classes, *([ADAPTER] if adapted else [])] or None,
        "logprobs_mode": "processed_logprobs",
        # Text models ignore the next two. `engine.vllm_images` processes each image once and keeps
        # the result, so vLLM does not need a cache.
        "limit_mm_per_prompt": {"image": engine.images_per_prompt, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
        # The model's own processor normalises images, as it does for the trainer. vLLM's
        # normalisation reads only the processor's files, and omits settings that are not in them.
        "mm_device_do_normalize": False,
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if engine.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
    if vllm.current_platform.is_cpu():
        if engine.pipeline_parallel_size > 1:
            raise InputError(
                "engine.pipeline_parallel_size: vLLM splits an engine's layers over GPUs only; "
                "on a CPU set it to 1 and raise engine.tensor_parallel_size"
            )
        arguments.setdefault("kv_cache_memory_bytes", int(CPU_KV_CACHE_GIB * 2**30))
        arguments |= {
            "block_size": _CPU_BLOCK_SIZE,
            "enforce_eager": True,
            "distributed_executor_backend": (
                _UNIPROC_EXECUTOR if engine.devices == 1 else _FORKED_EXECUTOR
            ),
        }
    elif vllm.current_platform.is_cuda():
        arguments["enable_sleep_mode"] = True
    arguments |= adapters.arguments(vllm.current_platform.is_cpu()) | engine.vllm_args
    if vllm.current_platform.is_cpu() and (short := -arguments["block_size"] % _CPU_BLOCK_SIZE):
        arguments["block_size"] += short
        logger.warning(
            "a block of the KV cache has %d tokens, because on a CPU it must be a multiple of %d "
            "(engine.vllm_args.block_size)",
            *(arguments["block_size"], _CPU_BLOCK_SIZE),
        )
    if adapted:
        settings = {"always": callables, "allowed": engine.logits_processors_allowed}
        own = arguments.get("additional_config", {})  # a dictionary, or an engine's actors
        arguments["additional_config"] = own | {SETTINGS: settings}
    return arguments
