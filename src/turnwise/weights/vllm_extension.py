"""The engine's side of every transport, as vLLM's worker sees it.

vLLM imports this module because `worker_extension_cls` names its class; importing registers the
backend. Tensors are loaded as a checkpoint would be, layer by layer. vLLM keeps those of a layer
until the layer is complete, so what lies in a buffer that is written again is copied first.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from turnwise.engine import vllm_names as vllm
from turnwise.engine.logits_adapter import take_failure
from turnwise.errors import TurnwiseError, WeightUpdateError
from turnwise.weights import BACKEND, disk, in_process, ipc, shm
from turnwise.weights.collective import CollectiveReceiver, Group
from turnwise.weights.ipc import IpcReceiver, device_address, device_name
from turnwise.weights.manifest import Manifest
from turnwise.weights.stream import Receiver, StateDictInfo, misfit


@dataclass
class InitInfo(vllm.WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first update."""


@dataclass
class UpdateInfo(vllm.WeightTransferUpdateInfo):  # type: ignore[misc]
    manifest: dict[str, Any] | None = None
    """Of what lies ready; None loads the stream that is open."""


class TransferEngine(vllm.WeightTransferEngine):  # type: ignore[misc]
    """Loads weights from another process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    expected: StateDictInfo | None = None
    group: Group | None = None
    stream: Receiver | None = None
    _reloading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._reloading:  # an update failed half-way: drop what it brought
            vllm.finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = True
        vllm.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.manifest is not None:
            self.model.load_weights(_published(Manifest.from_dict(update_info.manifest)))
            return
        assert self.stream is not None
        for tensors in self.stream.chunks():
            self._load(tensors)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        name = ""

        def copies() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal name
            for name, tensor in tensors:
                yield name, tensor.clone()

        try:
            self.model.load_weights(copies())
        except Exception as error:
            raise WeightUpdateError(f"{name} cannot be loaded: {error}") from error

    def finish_weight_update(self) -> None:
        vllm.finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False
        if vllm.current_platform.is_cpu():
            self._repack_output_heads()

    def _repack_output_heads(self) -> None:
        """On a CPU the head computes from a packed copy that a reload of tied weights misses."""
        for module in self.model.modules():
            if isinstance(module, vllm.ParallelLMHead) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def end_stream(self, error: str) -> None:
        if self.stream is not None:
            self.stream.end(error)
            self.stream = None

    def shutdown(self) -> None:
        self.end_stream("the engine was shut down")


def _replying(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Makes an error a plain value: its class as `error`, its words as `message`."""

    @wraps(method)
    def reply(*args: Any) -> dict[str, Any]:
        try:
            return method(*args) or {}
        except Exception as error:
            kind = type(error) if isinstance(error, TurnwiseError) else WeightUpdateError
            return {"error": kind.__name__, "message": str(error) or repr(error)}

    return reply


class WorkerExtension:
    """Methods that vLLM's worker gains; they may return only plain values."""

    weight_transfer_engine: TransferEngine
    device: torch.device
    rank: int
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool

    @_replying
    def report_device_id(self) -> dict[str, Any]:
        """The `device` of this worker alone."""
        name = device_name(self.device)
        return {"device": name if self.device.type == "cuda" else f"{name}-{os.getpid()}"}

    @_replying
    def take_processor_failure(self, request_id: str) -> dict[str, Any]:
        """`why` a logits processor failed in a request; "" when none did."""
        return {"why": take_failure(request_id)}

    @_replying
    def expect_tensors(self, info: dict[str, Any]) -> None:
        """What every update must bring from now on."""
        self.weight_transfer_engine.expected = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in info.items()
        }

    @_replying
    def check_update(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Refuse an update that cannot be loaded; tells the worker's `device`."""
        self._weight_update_active = False  # vLLM leaves it set when an update is cut short
        manifest = Manifest.from_dict(tree)
        expected = self.weight_transfer_engine.expected
        why = misfit(manifest.version, manifest.tensors, expected)
        if not why and manifest.transport == "shm":
            why = shm.refusal(manifest)
        elif not why and manifest.transport == "disk":
            why = disk.refusal(manifest)
        elif not why and manifest.transport == "in_process":
            why = in_process.refusal(manifest.version)
        elif not why and manifest.transport == "ipc":
            why = ipc.refusal(manifest.path or device_address(self.device, self.rank))
        if why:
            raise WeightUpdateError(f"refused a weight update: {why}")
        return {"device": device_name(self.device)}

    @_replying
    def join_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        seconds: float,
    ) -> None:
        """Become a rank of the trainer's process group; the one before it is left."""
        engine = self.weight_transfer_engine
        engine.group = None
        rank = train_world_size + rank_prefix + self.rank
        engine.group = Group(rank, ip, port, world_size, train_world_size, self.device, seconds)

    @_replying
    def open_stream(self, transport: str, address: str, seconds: float) -> None:
        """Begin to look out for a trainer."""
        self._weight_update_active = False  # vLLM leaves it set when an update is cut short
        engine = self.weight_transfer_engine
        engine.end_stream("the engine began another update")
        if transport == "collective" and engine.group is None:
            raise WeightUpdateError("init_collective must come before the first update")
        if engine.expected is None:
            raise WeightUpdateError("prepare_refit_info must come before the first update")
        if engine.group is not None and transport == "collective":
            engine.stream = CollectiveReceiver(engine.group, engine.expected, self.device, seconds)
        else:
            address = address or device_address(self.device, self.rank)
            engine.stream = IpcReceiver(address, engine.expected, self.device, seconds)

    @_replying
    def poll_stream(self) -> dict[str, Any]:
        """The `version` that lies ready, if one does."""
        assert self.weight_transfer_engine.stream is not None
        version = self.weight_transfer_engine.stream.poll()
        return {} if version is None else {"version": version}

    @_replying
    def load_update(self, manifest: dict[str, Any] | None = None) -> None:
        """Load what the manifest names or, without one, what the open stream brings."""
        self.start_weight_update()
        self.update_weights({"manifest": manifest})
        self.finish_weight_update()

    @_replying
    def end_stream(self, error: str) -> None:
        """Tell the trainer how its update ended."""
        self.weight_transfer_engine.end_stream(error)


def _published(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version that lies ready."""
    if manifest.transport == "in_process":
        return iter(in_process.published(manifest.version).items())
    if manifest.transport == "disk":
        return disk.load(manifest)
    return shm.load(manifest)


if BACKEND not in vllm.WeightTransferEngineFactory._registry:
    vllm.WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)
