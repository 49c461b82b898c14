"""The state of a checkpoint: weights, optimizers and each rank's own values.

A rank writes its shards with torch's distributed checkpoint (.metadata, *.distcp), which any number
of ranks can read. It writes its position in the schedule, version and random state to rank-N.pt.
8-bit moments are in rank-N.pt too, because their blocks cannot be divided over a different number
of ranks. Rates, decay, betas and the schedule are not saved, because a resumed run takes them from
its configuration.
Loading never runs code stored in a checkpoint.
"""

import io
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import Unpickler, UnpicklingError

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TurnwiseError, first_line
from turnwise.training.checkpoint import causes, translate_disk_full
from turnwise.training.optimizer import TrainableModule

_METADATA = ".metadata"
_REFERENCE = "reference"
_ALONE = "torch.distributed is disabled"  # beginning of torch's warning when there is one rank
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys of a parameter's state in AdamW and Muon; `step` is a scalar."""
_UNREADABLE = (OSError, RuntimeError, KeyError, ValueError, UnpicklingError, CheckpointException)
_Moments = dict[str, dict[str, torch.Tensor]]
"""State of the optimizer, by the name of the parameter; a parameter that was never updated is
missing."""


def save_state(
    folder: Path,
    rank: int,
    learners: Mapping[str, TrainableModule],
    extra: JsonObject,
    reference: nn.Module | None = None,
) -> None:
    """Write `extra` and this rank's part of the weights, the optimizers, and the reference model if
    its weights change; every rank must call this."""
    state = folder / "state"
    states: dict[str, object] = {
        name: _state(learner.module, {} if learner.in_8_bits else _moments_of(learner))
        for name, learner in learners.items()
    }
    in_8_bits = {
        name: {
            own: {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
            for own, state in _moments_of(learner).items()
        }
        for name, learner in learners.items()
        if learner.in_8_bits
    }
    if reference is not None:
        states[_REFERENCE] = _state(reference)
    with translate_disk_full(state):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_ALONE)
                save(states, checkpoint_id=state, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # a BaseException, which would end the process
            # The error of the first rank that failed; torch wraps it.
            failure = next((failure for failure, _ in error.failures.values()), error)
            raise TurnwiseError(
                f"{state} cannot be written: {first_line(failure)}; earlier checkpoints are "
                "untouched"
            ) from failure
        updates = {name: learner.updates for name, learner in learners.items()}
        own = {"updates": updates, "in_8_bits": in_8_bits, "ranks": _ranks()}
        torch.save({**extra, **own}, state / f"rank-{rank}.pt")


def load_state(
    folder: Path,
    rank: int,
    learners: Mapping[str, TrainableModule],
    reference: nn.Module | None = None,
) -> JsonObject:
    """Load what `save_state` wrote, with any number of ranks; return `extra`. The reference model
    keeps its weights if the checkpoint has no weights for it."""
    state = folder / "state"
    try:
        reader = _Reader(state)
        saved = reader.read_metadata().state_dict_metadata  # torch would obscure its errors
        moments: dict[str, _Moments] = {}
        for name, learner in learners.items():
            if not _has(saved, name):
                raise ValueError(
                    f"it has no state of the {name}: algorithm.advantage.name cannot change to one "
                    "with a value model, nor rollout.policies, when a run is resumed"
                )
            moments[name] = {  # empty tensors for the moments that the checkpoint has
                own: room
                for own, parameter in learner.module.named_parameters()
                if (
                    room := {
                        key: torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                        for key in _MOMENTS
                        if f"{name}.optimizer.state.{own}.{key}" in saved
                    }
                )
            }
        states: dict[str, object] = {
            name: _state(learner.module, moments[name]) for name, learner in learners.items()
        }
        if reference is not None and _has(saved, _REFERENCE):
            states[_REFERENCE] = _state(reference)
        _load(states, reader)  # into the parameters themselves, and into these moments
        own = state / f"rank-{rank}.pt"
        own = own if own.exists() else state / "rank-0.pt"
        extra: JsonObject = torch.load(own, map_location="cpu")
        if "schedules" in extra:  # written by Turnwise 0.1.0
            positions = {name: kept["last_epoch"] for name, kept in extra["schedules"].items()}
            extra = {**extra, "updates": positions, "skipped_in_row": {}}
        for name, learner in learners.items():
            if learner.in_8_bits:
                moments[name] = _from_8_bits(learner, extra["in_8_bits"][name], extra["ranks"])
            learner.resume(moments[name], extra["updates"][name])
    except _UNREADABLE as error:
        refused = (cause for cause in causes(error) if isinstance(cause, UnpicklingError))
        reason = first_line(next(refused, error))
        raise InputError(f"the checkpoint {folder} cannot be loaded: {reason}") from error
    return extra


def _moments_of(learner: TrainableModule) -> _Moments:
    states = learner.optimizer.state
    named = learner.module.named_parameters()
    return {own: dict(states[parameter]) for own, parameter in named if states.get(parameter)}


def _from_8_bits(
    learner: TrainableModule, saved: Mapping[str, Mapping[str, torch.Tensor]], ranks: int
) -> _Moments:
    if ranks != _ranks():
        raise ValueError(
            f"its moments of 8 bits are those of {ranks} ranks: set training.ranks to {ranks}"
        )

    def placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not value.ndim:  # the step, which stays on the CPU
            return value
        value = value.to(parameter.device)
        if not isinstance(parameter, DTensor):
            return value
        return DTensor.from_local(value, parameter.device_mesh, parameter.placements)

    return {
        own: {key: placed(value, parameter) for key, value in saved[own].items()}
        for own, parameter in learner.module.named_parameters()
        if own in saved
    }


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def load_moved(folder: Path, name: str, module: nn.Module) -> None:
    """Load the weights that `save_state` wrote for a module without an optimizer, in a process of
    its own. The module keeps its weights if the checkpoint has no weights for it."""
    try:
        reader = _Reader(folder / "state")
        if _has(reader.read_metadata().state_dict_metadata, name):
            _load({name: _state(module)}, reader)
    except _UNREADABLE as error:
        raise InputError(f"the {name} of {folder} cannot be loaded: {first_line(error)}") from error


def _has(saved: Iterable[str], name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in saved)


def _load(states: dict[str, object], reader: "_Reader") -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        alone = not dist.is_initialized()
        load(states, storage_reader=reader, planner=_Planner(), no_dist=alone)


def _state(module: nn.Module, moments: _Moments | None = None) -> dict[str, object]:
    # Not torch's function for optimizers, which would take a step if there is no state yet.
    state: dict[str, object] = {"model": get_model_state_dict(module)}
    return state if moments is None else {**state, "optimizer": {"state": moments}}


class _Reader(filesystem.FileSystemReader):
    """Reads `.metadata`, which is a pickle, without running any code that it may contain."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise UnpicklingError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(Unpickler):
    """Allows only the classes of torch's metadata."""

    _KNOWN = frozenset(
        {
            ("pathlib", "PosixPath"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                    *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._KNOWN:
            found: object = super().find_class(module, name)
            return found
        raise UnpicklingError(f"{_METADATA} names {module}.{name}, which is not metadata")


class _Planner(DefaultLoadPlanner):
    """Reads only tensors: torch would unpickle all other values, and unpickling can run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")
