"""The engine's side of every transport, as an extension of vLLM's worker.

vLLM imports this module because `worker_extension_cls` names a class in it; the import registers
the backend for weight transfers. Tensors are loaded in the same way as a checkpoint. vLLM keeps the
tensors of a layer until the layer is complete, so tensors in a reused buffer are copied first. LoRA
adapters are made of tensors in memory, and only their owner, `VllmEngine`, removes adapters, so
vLLM never looks for an adapter's folder.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import ParamSpec

import torch
from safetensors.torch import load_file

from turnwise.core import logs
from turnwise.core.json_types import JsonObject
from turnwise.engine.adapters import WEIGHTS, by_policy, read_adapter
from turnwise.engine.logits_adapter import take_failure, take_forced
from turnwise.engine.protocol import WEIGHT_BACKEND
from turnwise.errors import InputError, TurnwiseError, WeightUpdateError, text_of
from turnwise.internals import vllm, vllm_cpu
from turnwise.weights.manifest import Manifest
from turnwise.weights.process_group import ProcessGroup, device_name
from turnwise.weights.transport import Receiver, ReceiverOptions, find_transport

_P = ParamSpec("_P")
logs.register_stacks()  # vLLM may start a worker's process without forking


class TransferEngine(vllm.WeightTransferEngine):  # type: ignore[misc]
    """Loads the update in progress into the model; vLLM makes one instance for each worker."""

    # These classes have no fields, because the receiver has all information.
    init_info_cls = vllm.WeightTransferInitInfo
    update_info_cls = vllm.WeightTransferUpdateInfo

    receiver: Receiver | None = None
    """The update in progress."""
    _reloading = False

    def init_transfer_engine(self, init_info: vllm.WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._reloading:  # an earlier update failed half-way, so drop its tensors
            vllm.finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = True
        if vllm.current_platform.is_cpu():
            for module in self.model.modules():
                vllm_cpu.pack_experts_again(module)
            vllm_cpu.packing.loading = True
        vllm.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: vllm.WeightTransferUpdateInfo) -> None:
        assert self.receiver is not None
        name = ""

        def copied(
            tensors: Iterable[tuple[str, torch.Tensor]],
        ) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal name
            for name, tensor in tensors:
                yield name, tensor.clone()

        for tensors in self.receiver.chunks():
            if not self.receiver.reuses_buffers:
                self.model.load_weights(tensors)
                continue
            try:
                self.model.load_weights(copied(tensors))
            except Exception as error:
                raise WeightUpdateError(f"{name} cannot be loaded: {error}") from error

    def finish_weight_update(self) -> None:
        vllm.finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False
        if not vllm.current_platform.is_cpu():
            return
        # vLLM's reload of tied weights does not update the head's packed copy.
        for module in self.model.modules():
            if isinstance(module, vllm.ParallelLMHead) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        vllm_cpu.packing.finish()

    def end_update(self, error: str) -> None:
        if self.receiver is not None:
            self.receiver.end(error)
            self.receiver = None

    def shutdown(self) -> None:
        self.end_update("the engine was shut down")


def _replying(method: Callable[_P, JsonObject | None]) -> Callable[_P, JsonObject]:
    """Make a method return its errors as plain values: the error's class as `error`, and its text
    as `message`."""

    @wraps(method)
    def reply(*args: _P.args, **kwargs: _P.kwargs) -> JsonObject:
        try:
            return method(*args, **kwargs) or {}
        except Exception as error:
            kind = type(error) if isinstance(error, TurnwiseError) else WeightUpdateError
            return {"error": kind.__name__, "message": text_of(error)}

    return reply


class WorkerExtension:
    """Methods that are added to vLLM's worker; they may return only plain values."""

    weight_transfer_engine: TransferEngine
    device: torch.device
    rank: int
    model_runner: vllm.LoRAModelRunnerMixin
    start_weight_update: Callable[[], None]
    update_weights: Callable[[JsonObject], None]
    finish_weight_update: Callable[[], None]
    _validated: Manifest | None  # the last update that was checked; None once an update is opened

    @_replying
    def report_device_id(self) -> JsonObject:
        """Return the name of the worker's `device`; on a CPU the name is unique to this worker."""
        name = device_name(self.device)
        return {"device": name if self.device.type == "cuda" else f"{name}-{os.getpid()}"}

    @_replying
    def take_processor_failure(self, request_id: str) -> JsonObject:
        """Return a dictionary; its `why` is the reason why a logits processor failed in a request,
        or "" if none failed."""
        return {"why": take_failure(request_id)}

    @_replying
    def take_forced_tokens(self, request_id: str) -> JsonObject:
        """Return a dictionary; its `places` are the result of `take_forced` for a request."""
        return {"places": take_forced(request_id)}

    @_replying
    def expect_tensors(self, info: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Set the tensors that every update must contain from now on."""
        self._options.expected = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in info.items()
        }

    @_replying
    def join_collective(
        self, rank_prefix: int, ip: str, port: int, world_size: int, ranks: int, seconds: float
    ) -> None:
        """Join the process group of a trainer with `ranks` ranks; replace an earlier group."""
        self._options.group = None
        group = (ranks + rank_prefix + self.rank, ip, port, world_size, ranks)
        self._options.group = ProcessGroup(*group, self.device, seconds)

    @_replying
    def check_update(self, manifest: JsonObject) -> JsonObject:
        """Check that an update can be loaded; return the worker's `device`."""
        self._validate(Manifest.from_dict(manifest))
        return {"device": device_name(self.device)}

    @_replying
    def open_update(self, manifest: JsonObject, seconds: float) -> JsonObject:
        """Begin to receive an update; return the result of `poll_update`.

        The manifest of a stream may lack tensors; the trainer then sends its own manifest first.
        """
        update = Manifest.from_dict(manifest)
        transport = find_transport(update.transport)
        unknown = transport.streamed and not update.tensors
        if not unknown and update != getattr(self, "_validated", None):
            self._validate(update)
        self._validated = None  # a check is valid for one update only
        vllm.forget_update(self)
        if update.checksum is None:  # the copy would no longer equal the model's weights
            self._options.held = None
        engine = self.weight_transfer_engine
        engine.end_update("the engine began another update")
        engine.receiver = transport.receive(update, self._options, seconds)
        return self.poll_update()

    @_replying
    def poll_update(self) -> JsonObject:
        """Return the `version` that can be loaded, or {} if it has not arrived yet."""
        assert self.weight_transfer_engine.receiver is not None
        version = self.weight_transfer_engine.receiver.poll()
        return {} if version is None else {"version": version}

    @_replying
    def load_update(
        self, numbers: Mapping[str, int] | None = None, config: JsonObject | None = None
    ) -> JsonObject:
        """Load the update in progress, and return whether it has `ended`. It has not ended if the
        trainer still waits for the workers' reports.

        Args:
            numbers: vLLM's ids of new adapters, by policy; None if the update contains the model's
                weights.
            config: PEFT's configuration of these adapters.
        """
        engine = self.weight_transfer_engine
        receiver = engine.receiver
        assert receiver is not None
        if numbers is None or config is None:
            self.start_weight_update()
            self.update_weights({})
            self.finish_weight_update()
        else:
            # Copies, because vLLM scales B in place, and the sender may reuse the tensors' memory.
            copies = (
                (name, tensor.detach().clone())
                for chunk in receiver.chunks()
                for name, tensor in chunk
            )
            for policy, tensors in by_policy(copies).items():
                _put(self.model_runner.lora_manager, numbers[policy], tensors, config)
        if not receiver.reports:
            engine.end_update("")
        return {"ended": not receiver.reports}

    @_replying
    def remove_adapter(self, number: int) -> None:
        self.model_runner.lora_manager.remove_adapter(number)

    @_replying
    def capture_experts(self) -> None:
        """Start to capture the experts of each token; call it before the first request."""
        vllm_cpu.capture_experts(self.model_runner)

    @_replying
    def prepare_adapters(self) -> None:
        """Exclude the output head from adapters; call it before the first request.

        If adapters may change the head, vLLM 0.32 cannot compute a prompt's log-probs, which the
        canary check needs, in a batch with other requests.
        """
        slots = vllm.adapter_slots(self.model_runner.lora_manager)
        for name, module in list(slots.model.named_modules()):
            if isinstance(module, vllm.LogitsProcessorWithLoRA):
                parent, _, own = name.rpartition(".")
                setattr(slots.model.get_submodule(parent), own, module.base_layer)
                slots.modules = {n: one for n, one in slots.modules.items() if one is not module}

    @_replying
    def put_adapter(self, number: int, path: str, key: str) -> None:
        """Load the adapter in a folder under the id `number`; `key` names the adapter in errors."""
        folder, config = read_adapter(path, key)
        tensors = load_file(folder / WEIGHTS)
        try:
            _put(self.model_runner.lora_manager, number, tensors, config)
        except (WeightUpdateError, ValueError, RuntimeError) as error:
            raise InputError(f"{key}: {path} does not fit the model: {error}") from error

    @_replying
    def end_update(self, error: str) -> None:
        """End the update in progress, and report its result to the trainer: an error, or "" for
        success."""
        self.weight_transfer_engine.end_update(error)

    @cached_property
    def _options(self) -> ReceiverOptions:
        return ReceiverOptions(self.device, self.rank)

    def _validate(self, manifest: Manifest) -> None:
        options = self._options
        try:
            if error := manifest.mismatch(options.expected):
                raise WeightUpdateError(error)
            find_transport(manifest.transport).validate(manifest, options)
        except TurnwiseError as error:
            raise WeightUpdateError(f"refused a weight update: {error}") from error
        self._validated = manifest


def _put(
    manager: vllm.LRUCacheWorkerLoRAManager,
    number: int,
    tensors: dict[str, torch.Tensor],
    config: JsonObject,
) -> None:
    """Copy an adapter into a slot of the model runner.

    Args:
        number: The adapter's id in requests.
        tensors: The adapter's tensors, by PEFT's names.
        config: The adapter's configuration, in PEFT's form.
    """
    slots = vllm.adapter_slots(manager)
    helper = vllm.PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    lora = vllm.LoRAModel.from_lora_tensors(
        number,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        skip_prefixes=getattr(slots.model, "lora_skip_prefixes", None),
    )
    vllm.check_experts_of(slots, lora)
    if len(slots) >= slots.capacity:
        raise WeightUpdateError(f"the engine already holds {slots.capacity} adapters (max_loras)")
    slots.add_adapter(lora)  # packs the layers that vLLM has fused
    try:
        for name, layer in lora.loras.items():
            if name not in slots.modules:
                raise WeightUpdateError(f"vLLM applies no adapter to {name} of this model")
            for a, b, held_a, held_b in _shards(slots.modules[name], layer):
                own, wanted = (a.shape[1], b.shape[0]), (held_a.shape[-1], held_b.shape[-2])
                if own != wanted:
                    raise WeightUpdateError(
                        f"{name} is {wanted[0]} -> {wanted[1]} in the model, and {own[0]} -> "
                        f"{own[1]} in the adapter"
                    )
        slots.activate_adapter(number)
        slot = slots.lora_index_to_id.index(number)
        for name, layer in lora.loras.items():  # check that the slot has the adapter, bit for bit
            for a, b, held_a, held_b in _shards(slots.modules[name], layer):
                for tensor, held in ((a, held_a), (b, held_b)):
                    arrived = held[slot, 0, : tensor.shape[0], : tensor.shape[1]]
                    if not torch.equal(arrived.cpu(), tensor.to(held.dtype).cpu()):
                        raise WeightUpdateError(f"{name} of the adapter did not arrive in its slot")
    except BaseException:
        slots.remove_adapter(number)
        raise


def _shards(
    module: vllm.BaseLayerWithLoRA, layer: vllm.LoRALayerWeights
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield this worker's A and B of a layer, and the slots that hold A and B: one such tuple, or
    one for each of the layers that vLLM has fused. For embeddings and experts, whose slots have a
    different form, yield nothing."""
    if not isinstance(module.lora_a_stacked, tuple):
        return
    a, b = layer.lora_a, layer.lora_b
    if isinstance(b, list) and len(b) != len(module.lora_b_stacked):
        return
    if module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    pairs = zip(a, b, strict=True) if isinstance(b, list) else [(a, b)]
    slots = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
    for (own_a, own_b), (slots_a, slots_b) in zip(pairs, slots, strict=True):
        if own_a is not None and own_b is not None:
            yield own_a, own_b, slots_a, slots_b


# Drop vLLM's warning about an update that contains only some layers. Such an update is complete,
# because the manifest lists its tensors and the canary checks the result.
vllm.reload_logger.addFilter(lambda record: "Failed to load weights" not in record.getMessage())

vllm.add_transfer_engine(WEIGHT_BACKEND, TransferEngine)
if vllm.current_platform.is_cpu():
    vllm_cpu.clear_every_layer()
