"""The `shm` transport's engine side, as vLLM's worker sees it.

vLLM imports this module because `worker_extension_cls` names its class; importing registers the
backend. Tensors are read where the trainer wrote them, without a copy, and loaded as a
checkpoint would be.
"""

import mmap
import os
from dataclasses import dataclass
from typing import Any

from turnwise.engine import vllm_names as vllm
from turnwise.weights import BACKEND
from turnwise.weights.in_process import IN_PROCESS, published, refusal
from turnwise.weights.manifest import Manifest


@dataclass
class ShmInitInfo(vllm.WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first update."""


@dataclass
class ShmUpdateInfo(vllm.WeightTransferUpdateInfo):  # type: ignore[misc]
    manifest: dict[str, Any]


class ShmWeightTransferEngine(vllm.WeightTransferEngine):  # type: ignore[misc]
    """Loads weights from another process's shared memory."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        vllm.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        manifest = Manifest.from_dict(update_info.manifest)
        if manifest.path == IN_PROCESS:
            self.model.load_weights(iter(published(manifest.version).items()))
            return
        buffer = _map(manifest)
        self.model.load_weights((entry.name, entry.view(buffer)) for entry in manifest.tensors)

    def finish_weight_update(self) -> None:
        vllm.finalize_layerwise_reload(self.model, self.model_config)
        if vllm.current_platform.is_cpu():
            self._repack_output_heads()

    def _repack_output_heads(self) -> None:
        """On a CPU the head computes from a packed copy that a reload of tied weights misses."""
        for module in self.model.modules():
            if isinstance(module, vllm.ParallelLMHead) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


class ShmWorkerExtension:
    """Methods that vLLM's worker gains; they may return only plain values."""

    def check_manifest(self, tree: dict[str, Any]) -> str:
        """Why an update cannot be read, or "" when it can; touches no weight."""
        manifest = Manifest.from_dict(tree)
        names = [entry.name for entry in manifest.tensors]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            return f"{repeated} stands twice in the manifest of version {manifest.version}"
        for entry in manifest.tensors:
            if entry.offset + entry.nbytes > manifest.nbytes:
                return f"{entry.name} lies beyond the buffer of version {manifest.version}"
        if manifest.path == IN_PROCESS:
            return refusal(manifest.version)
        try:
            size = os.stat(manifest.path).st_size
        except OSError as error:
            return (
                f"the buffer of version {manifest.version} cannot be opened ({error.strerror}); "
                "trainer and engine must share a host"
            )
        if size < manifest.nbytes:
            return (
                f"the buffer of version {manifest.version} is {size} bytes, not {manifest.nbytes}"
            )
        return ""


def _map(manifest: Manifest) -> mmap.mmap:
    file = os.open(manifest.path, os.O_RDWR)
    try:
        return mmap.mmap(file, manifest.nbytes)
    finally:
        os.close(file)


if BACKEND not in vllm.WeightTransferEngineFactory._registry:
    vllm.WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
