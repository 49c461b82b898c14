"""LoRA adapters in PEFT's format that an engine applies to its model.

This module reads adapters without importing vLLM or PEFT, so that mistakes are reported before
anything slow starts.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError, safe_open

from turnwise.config import Config, LoraConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_adapter
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.internals.vllm import LoRARequest, WeightVersionSpan

_Tensor = TypeVar("_Tensor")
POLICY = ""  # among adapters, the name of the model that is trained or served
WEIGHTS = "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks for which vLLM can reserve memory
VERSIONS = 4
"""Number of versions of a trained adapter that an engine holds between updates, including the
newest."""
_SLOTS = 8
"""Default number of served adapters that one batch may use (engine.vllm_args.max_loras)."""
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "biases in LoRA layers",
    "modules_to_save": "fully trained modules (modules_to_save)",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
}
"""Features of PEFT that vLLM does not apply, by their keys in adapter_config.json."""


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """The adapters that an engine must hold from its start."""

    paths: Mapping[str, str] = field(default_factory=dict)
    """Folder or Hugging Face name of each adapter, by the adapter's name. A request that does not
    name an adapter uses the adapter under `POLICY`."""
    trained: JsonObject | None = None
    """PEFT's configuration of the adapters in weight updates; None if updates contain the model's
    weights."""
    policies: Sequence[str] = (POLICY,)
    """Names of the adapters in weight updates."""
    rank: int = 0
    """The largest rank of all adapters; 0 without adapters."""

    @classmethod
    def of(cls, config: Config) -> "EngineAdapters":
        """Read and check `model.adapter`, `serving.adapters` and, for training, `model.lora`."""
        paths = dict(config.serving.adapters)
        if config.model.adapter is not None:
            paths[POLICY] = config.model.adapter
        read = [read_adapter(path, key_of(name)) for name, path in paths.items()]
        ranks = [_rank(settings) for _, settings in read]
        trained, lora = None, config.model.lora
        policies = [name for name in config.rollout.policies or [POLICY] if name not in paths]
        if lora.rank and config.weights.lora == "adapter" and policies:
            trained = peft_settings(lora) | {"target_modules": lora.target_modules}
            ranks.append(lora.rank)
        if max(ranks, default=0) > RANKS[-1]:
            raise InputError(
                f"model.lora.rank {lora.rank} is above {RANKS[-1]}, the largest that vLLM applies: "
                "set weights.lora to merged"
            )
        return cls(paths, trained, policies, max(ranks, default=0))

    def arguments(self, on_cpu: bool) -> JsonObject:
        """Return the arguments of vLLM's AsyncEngineArgs that reserve memory for the adapters."""
        if not self.rank:
            return {}
        # The engine holds `VERSIONS` versions of each policy's adapter while it loads one more.
        versions = (VERSIONS + 1) * len(self.policies) if self.trained is not None else 0
        count = len(self.paths) + versions
        return {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.rank),
            "max_loras": count if on_cpu else min(len(self.paths), _SLOTS) + versions,
            "max_cpu_loras": count,
        }


NO_ADAPTERS = EngineAdapters()


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that an engine holds."""

    number: int
    """vLLM's id of the adapter."""
    name: str
    request: "LoRARequest"
    version: int | None = None
    """Weight version of a trained adapter; None for adapters that are only served."""
    users: set[str] = field(default_factory=set)
    """Ids of the requests in flight that use the adapter."""
    brought: bool = False
    """Whether the adapter was loaded for a request; only such adapters may be removed to free a
    slot."""

    def spans(self) -> "list[WeightVersionSpan] | None":
        """Return one span with the adapter's version, for all tokens of a request; None if the
        adapter has no version."""
        from turnwise.internals import vllm  # seconds to import

        if self.version is None:
            return None
        return [vllm.WeightVersionSpan(version=str(self.version), start=0, end=sys.maxsize)]


class AdapterTable:
    """The adapters of an engine by name, and the requests that use each adapter.

    Every loaded adapter gets a new number, name and path in vLLM, so a request never reads cache
    entries of another adapter. A request keeps the version that was the newest when the request
    began. Each update removes the older versions that no request uses any more.
    """

    def __init__(self, adapters: EngineAdapters = NO_ADAPTERS) -> None:
        self.trained = adapters.trained
        self.policies = adapters.policies
        self.older: list[LoadedAdapter] = []
        """Versions of trained adapters except the newest versions, in order from the oldest."""
        self._by_name: dict[str, LoadedAdapter] = {}
        """Ordered from least to most recently used."""
        self._numbers = 0

    def new(self, name: str, version: int | None = None) -> LoadedAdapter:
        """Return an adapter with a new number; requests may not use the adapter before `add`."""
        from turnwise.internals import vllm  # seconds to import

        self._numbers += 1
        number = self._numbers
        label = f"{name or 'policy'} {number}"
        request = vllm.LoRARequest(label, number, f"memory:{number}")
        return LoadedAdapter(number, name, request, version)

    def add(self, adapter: LoadedAdapter) -> None:
        """Let new requests with this adapter's name use it, instead of an earlier version."""
        if (before := self._by_name.get(adapter.name)) is not None:
            self.older.append(before)
        self._by_name[adapter.name] = adapter

    def touch(self, name: str) -> bool:
        """Mark an adapter as the most recently used; return whether an adapter has this name."""
        if (adapter := self._by_name.pop(name, None)) is not None:
            self._by_name[name] = adapter
        return name in self._by_name

    def evict(self) -> LoadedAdapter | None:
        """Remove and return the least recently used adapter that no request uses, or the least
        recently used adapter if all are in use. Consider only adapters that were loaded for a
        request; return None if there is no such adapter."""
        brought = [name for name, each in self._by_name.items() if each.brought]
        name = min(brought, key=lambda each: bool(self._by_name[each].users), default=None)
        return None if name is None else self._by_name.pop(name)

    def __len__(self) -> int:
        return len(self._by_name) + len(self.older)

    def excess(self) -> list[LoadedAdapter]:
        """Remove and return the older versions that no request uses, and the oldest versions of
        each adapter that has more than `VERSIONS`."""
        excess = [adapter for adapter in self.older if not adapter.users]
        self.older = [adapter for adapter in self.older if adapter.users]
        for name in self.policies:
            kept = [adapter for adapter in self.older if adapter.name == name]
            excess += kept[: max(0, len(kept) + 1 - VERSIONS)]
        self.older = [adapter for adapter in self.older if adapter not in excess]
        return excess

    @contextmanager
    def using(self, name: str, request_id: str) -> Iterator[LoadedAdapter | None]:
        """Count a request as a user of an adapter, and yield the adapter; yield None for the model
        without an adapter."""
        adapter = self._by_name.get(name)
        if adapter is None:
            if name != POLICY:
                known = ", ".join(filter(None, self._by_name)) or "none"
                raise InputError(f"there is no adapter {name!r} (this engine has: {known})")
            yield None
            return
        adapter.users.add(request_id)
        try:
            yield adapter
        finally:
            adapter.users.discard(request_id)


def name_of_tensor(policy: str, name: str) -> str:
    """Return the name that a policy's tensor has in a weight update; `name` is its name in PEFT."""
    return f"{policy}:{name}" if policy else name


def by_policy(tensors: Iterable[tuple[str, _Tensor]]) -> dict[str, dict[str, _Tensor]]:
    """Group an update's tensors by policy; each tensor gets its PEFT name."""
    found: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors:
        policy, _, own = name.rpartition(":")
        found.setdefault(policy, {})[own] = tensor
    return found


def peft_settings(lora: LoraConfig) -> JsonObject:
    """Return the rank and the scaling as fields of PEFT's configuration."""
    alpha = lora.alpha or 2 * lora.rank
    whole = int(alpha) if alpha == int(alpha) else alpha
    return {"r": lora.rank, "lora_alpha": whole, "use_rslora": lora.rslora}


def key_of(name: str) -> str:
    """Return the configuration key that names an adapter in errors."""
    return "model.adapter" if name == POLICY else f"serving.adapters.{name}"


def read_adapter(path: str, key: str) -> tuple[Path, JsonObject]:
    """Return an adapter's folder and its PEFT configuration, checked against the tensors' shapes.

    If `path` is not a folder, the adapter is downloaded. `key` names the adapter in errors.
    """
    check_adapter(path, key)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # a third of a second to import

        folder = Path(snapshot_download(path, allow_patterns=["adapter_*"]))
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{key}: {folder}/adapter_config.json cannot be read: {error!r}") from None
    if config.get("peft_type", "LORA") != "LORA":
        raise InputError(f"{key}: {path} is an adapter of type {config['peft_type']}, not LORA")
    if unsupported := [text for name, text in _UNSUPPORTED.items() if config.get(name)]:
        raise InputError(f"{key}: {path} uses {unsupported[0]}, which vLLM does not apply")
    if config.get("bias", "none") != "none":
        raise InputError(f"{key}: {path} trains biases, which vLLM does not apply")
    if not isinstance(rank, int) or rank < 1 or _rank(config) > RANKS[-1]:
        raise InputError(f"{key}: {path} has rank {rank!r}, not one from 1 to {RANKS[-1]}")
    weights = folder / WEIGHTS
    try:
        with safe_open(weights, framework="numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{key}: {weights} cannot be read: {error}") from None
    ranks = config.get("rank_pattern") or {}
    for name, shape in shapes.items():  # each layer needs an A and a B tensor of the layer's rank
        layer, part, _ = name.rpartition(".lora_A.weight")
        if not part:
            if ".lora_" not in name:
                raise InputError(f"{key}: {path} has the tensor {name}, which no LoRA layer has")
            continue
        other = shapes.get(f"{layer}.lora_B.weight")
        short = layer.removeprefix("base_model.model.")
        wanted = next(
            (own for pattern, own in ranks.items() if re.fullmatch(rf"(.*\.)?({pattern})", short)),
            rank,
        )
        if other is None or shape[0] != wanted or other[1] != wanted:
            raise InputError(
                f"{key}: {path} has rank {wanted} in adapter_config.json, but {short} has tensors "
                f"{shape} and {other}"
            )
    if not shapes:
        raise InputError(f"{key}: {weights} has no tensors")
    return folder, config


def _rank(config: JsonObject) -> int:
    """Return the largest rank among an adapter's layers."""
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks)
