"""Patches of vLLM on a CPU. `internals/vllm.py` imports this file."""

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partialmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils import rnn
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.lora import model_manager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.v1.sample import sampler

from turnwise.internals import internal

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_BUSY_SECONDS = 0.001
_LOOK_MS = 100


class _Waiting(shm_broadcast.SpinCondition):  # type: ignore[misc]
    """The wait of an engine's shards for their next step.

    vLLM's own wait polls shared memory for a second after each step, on cores that other shards
    need. On two cores, the tests of shards take 38 s with this class, and 71 s with vLLM's.
    """

    def __init__(self, is_reader: bool, context: object, notify_address: str) -> None:
        super().__init__(is_reader, context, notify_address, busy_loop_s=_BUSY_SECONDS)

    def wait(self, timeout_ms: int | None = None) -> None:
        # A notification that comes before the subscription is lost, so also read the memory after
        # a while.
        super().wait(_LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))


def _checked_experts(self: VllmConfig, check: Callable[[VllmConfig], None]) -> None:
    """Run vLLM's check of a configuration that returns experts, but allow model runner V1, because
    on a CPU vLLM does not have a newer one."""
    current_platform.is_out_of_tree = lambda: True
    try:
        check(self)
    finally:
        del current_platform.is_out_of_tree


def capture_experts(runner: "CPUModelRunner") -> None:
    """Let a CPU's model runner return the routed experts of each request with its tokens.

    On a CPU, vLLM does not return routed experts. This function connects vLLM's own recorder, which
    relies on synchronous scheduling. Call the function before the runner's first request.
    """
    from vllm.distributed.aux_output_connector import worker

    parameters = ("model", "vllm_config", "kv_cache_config")
    connect = internal(worker, "get_aux_output_connector", *parameters)
    recorder = connect(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute = internal(runner, "execute_model", "scheduler_output")
    sample = internal(runner, "sample_tokens", "grammar_output")
    internal(recorder, "begin_step", "metadata")
    internal(recorder, "prepare_output", "input_batch")

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


def clear_every_layer() -> None:
    """Let a worker on a CPU clear new blocks of the KV cache in all layers at once. vLLM clears
    only the layers of full attention there, one block at a time."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # seconds to import elsewhere

    def clear(self: CPUModelRunner, block_ids: list[int]) -> None:
        count = self.kv_cache_config.num_blocks
        caches = {each.data_ptr(): each for each in self.kv_caches}
        for cache in caches.values():  # one block may be several blocks of the kernel
            cache.unflatten(0, (count, -1))[block_ids] = 0

    internal(CPUModelRunner, "_zero_block_ids", "self", "block_ids")
    CPUModelRunner._zero_block_ids = clear


def pack_experts_again(module: torch.nn.Module) -> None:
    """Pad and pack a CPU's experts after every load. vLLM does this only after the first load."""
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    if method is None or kernel is None or "process_weights_after_loading" in vars(method):
        return
    process = method.process_weights_after_loading

    def process_and_pack(layer: torch.nn.Module) -> None:
        process(layer)
        kernel.fused_experts.process_weights_after_loading(layer)

    method.process_weights_after_loading = process_and_pack


class PackingThreads:
    """Threads in which oneDNN packs the weights of an update's layers while the next layers load.

    vLLM's engine on a CPU computes in one thread, and oneDNN needs as much time to pack a matrix as
    for four copies of the matrix. No request runs during an update. The layers must not be used
    before `finish`.
    """

    def __init__(self) -> None:
        self.loading = False
        """Whether an update is loading, so that `create` packs in the threads; otherwise it packs
        at once."""
        self._pool: ThreadPoolExecutor | None = None
        self._packing: deque[Future[None]] = deque()

    def create(self, weight: torch.Tensor, *cache_size: int) -> _custom_ops.CPUDNNLGEMMHandler:
        """Return the handle of a packed matrix (K, N), as vLLM's function does. During an update,
        the matrix may be packed only later."""
        if not self.loading:
            return _pack(weight, *cache_size)
        handle = _custom_ops.CPUDNNLGEMMHandler()
        handle.k, handle.n = weight.shape

        def pack() -> None:
            packed = _pack(weight, *cache_size)
            handle.handler_tensor, packed.handler_tensor = packed.handler_tensor, None

        threads = len(os.sched_getaffinity(0))
        self._pool = self._pool or ThreadPoolExecutor(threads, "packing")
        while len(self._packing) > threads:  # limits memory, as each task holds a matrix
            self._packing.popleft().result()
        self._packing.append(self._pool.submit(pack))
        return handle

    def finish(self) -> None:
        """Wait until all weights are packed."""
        self.loading = False
        packing, self._packing = self._packing, deque()
        for each in packing:
            each.result()


packing = PackingThreads()
_pack = internal(_custom_ops, "create_onednn_mm", "weight", "primitive_cache_size")

_method = vocab_parallel_embedding.UnquantizedEmbeddingMethod
_pack_embedding = internal(_method, "process_weights_after_loading", "self", "layer")


def _pack_if_head(self: object, layer: Any) -> None:
    """Pack an embedding matrix at once if it is an output head; otherwise pack it when logits are
    first computed with it. vLLM also packs embedding matrices that only look up tokens. The
    packed copy, which nothing uses, takes as much memory as the matrix; and in each update, packing
    it takes as long as packing the head."""

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        _pack_embedding(self, layer)
        logits: torch.Tensor = layer.cpu_linear(x, weight, bias)
        return logits

    if isinstance(layer, ParallelLMHead):
        _pack_embedding(self, layer)
    else:
        layer.cpu_linear = compute


if current_platform.is_cpu():
    _custom_ops.create_onednn_mm = packing.create
    _method.process_weights_after_loading = _pack_if_head


@lru_cache(4)
def _divide(
    adapters: tuple[int, ...],
) -> tuple[list[int], Sequence[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """Divide a step's N tokens among its A adapters.

    Returns:
        The adapters' numbers; the indices of each adapter's tokens; the same indices padded to one
        length, [A, M], or None if padding would more than double their number; and each token's
        position among the padded tokens, or else among the concatenated parts, [N].
    """
    adapters = adapters or (0,)  # a step may have no tokens
    counts = dict(sorted(Counter(adapters).items()))
    sizes, order = [*counts.values()], torch.tensor(adapters).argsort()
    parts, places = torch.split(order, sizes), torch.arange(len(order))
    padded = rnn.pad_sequence([*parts], True) if len(sizes) * max(sizes) <= 2 * len(order) else None
    if padded is not None:
        filled = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
        places = filled.flatten().nonzero().squeeze(1)
    return [*counts], parts, padded, torch.empty_like(order).index_copy_(0, order, places)


def _by_adapter(
    inputs: torch.Tensor, weights: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    """Multiply each token by the matrix of its adapter. Adapter -1 means that the token has no
    adapter; its result is 0. vLLM's functions for CPUs copy a matrix for every token, and use the
    last adapter for -1."""
    weights = (weights.squeeze(1) if weights.dim() == 4 else weights).mT
    numbers, parts, padded, places = _divide(tuple(adapters.tolist()))
    first, last = numbers[0], numbers[-1]
    if first == last >= 0:
        return inputs @ weights[first].to(inputs.dtype)
    if padded is not None:
        adjacent = first >= 0 and last - first < len(numbers)  # if so, a slice avoids a copy
        chosen = weights[first : last + 1] if adjacent else weights[numbers]
        made = torch.bmm(inputs[padded], chosen.to(inputs.dtype))
        if first < 0:
            made[0] = 0.0
        return made.flatten(0, 1)[places]
    made = torch.cat(
        [
            inputs[part] @ weights[number].to(inputs.dtype)
            if number >= 0
            else inputs.new_zeros(len(part), weights.shape[-1])
            for number, part in zip(numbers, parts, strict=True)
        ]
    )
    return made[places]


def _shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    made = _by_adapter(inputs.to(output.dtype), weights, adapters)
    output[:, : made.shape[1]] = scaling * made


def _expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    start: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    made = _by_adapter(inputs.to(output.dtype), weights, adapters)
    part = output[:, start : start + min(size, made.shape[1])]
    made = made[: len(part), : part.shape[1]]
    part.add_(made) if add_inputs else part.copy_(made)


def _expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    _expand_slice(inputs, weights, output, adapters, 0, output.shape[1], add_inputs)


_supports_adapter = internal(
    model_manager, "is_supported_lora_module", "module_name", "module", "supported_lora_modules"
)


def _may_have_adapter(module_name: str, module: torch.nn.Module, supported: list[str]) -> bool:
    """Return whether a layer may have adapters. Experts may not, because on a CPU they would need
    Triton, even in requests without an adapter."""
    experts = isinstance(module, internal(model_manager, "MoERunner"))
    return not experts and bool(_supports_adapter(module_name, module, supported))


_select_experts = internal(
    unquantized_fused_moe_method, "select_unquantized_moe_backend", "moe_config"
)


def _plain_experts(moe_config: Any) -> object:
    """Choose the same backend for experts as in an engine without adapters."""
    internal(moe_config, "is_lora_enabled")
    moe_config.is_lora_enabled = False
    chosen: object = _select_experts(moe_config)
    return chosen


if current_platform.is_cpu():
    model_manager.is_supported_lora_module = _may_have_adapter
    unquantized_fused_moe_method.select_unquantized_moe_backend = _plain_experts
    _matrices = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")
    for _name, _own, _more in (
        ("bgmv_shrink", _shrink, ("scaling",)),
        ("bgmv_expand", _expand, ("add_inputs",)),
        ("bgmv_expand_slice", _expand_slice, ("slice_offset", "slice_size", "add_inputs")),
    ):
        internal(lora_ops, _name, *_matrices, *_more)
        internal(punica_cpu, _name)
        setattr(lora_ops, _name, _own)
        setattr(punica_cpu, _name, _own)
    for _module, _name in (
        (sampler, "batched_count_greater_than"),
        (vocab_parallel_embedding, "get_masked_input_and_mask"),
    ):  # torch would compile them in each engine's first request, which takes seconds for no gain
        _function = internal(_module, _name)
        setattr(_module, _name, getattr(_function, "__wrapped__", _function))
    _wait_parameters = ("self", "is_reader", "context", "notify_address", "busy_loop_s")
    internal(shm_broadcast.SpinCondition, "__init__", *_wait_parameters)
    internal(shm_broadcast.SpinCondition, "wait", "self", "timeout_ms")
    shm_broadcast.SpinCondition = _Waiting
    _check = internal(VllmConfig, "_verify_aux_output_compatibility", "self")
    VllmConfig._verify_aux_output_compatibility = partialmethod(_checked_experts, _check)
