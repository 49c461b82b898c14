"""Checkpoints on disk: their contents, when they are complete, and which ones are kept.

    checkpoints/step-NNNN/     the model in Hugging Face's format, or the adapter in PEFT's
      state/                   the state that a resumed run needs
        .metadata, *.distcp      weights and optimizer, torch's distributed checkpoint
        rank-N.pt                schedule, version, random numbers of each rank
        loop.json                the loop's: data order, groups not yet trained on
        files.json               every file and its size: written last, so a checkpoint that
                                 agrees with it is complete

A checkpoint is written to `step-NNNN.tmp` and renamed. Loading one never runs code stored in it.
"""

import errno
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    ValueType,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TurnwiseError, first_line
from turnwise.training.trainable import TrainableModule

_FILES = "files.json"
_LOOP = "loop.json"
_METADATA = ".metadata"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 2**20
"""Free bytes below which a failed write is attributed to a full disk."""


def temporary(folder: Path) -> Path:
    """Return the folder that a checkpoint is written to before it is renamed."""
    return folder.with_name(folder.name + ".tmp")


def begin(folder: Path) -> Path:
    """Create the temporary folder of a checkpoint, and return it."""
    place = temporary(folder)
    with translate_disk_full(place):
        shutil.rmtree(place, ignore_errors=True)
        (place / "state").mkdir(parents=True)
    return place


def commit(folder: Path) -> None:
    """Rename the temporary folder, which completes the checkpoint."""
    place = temporary(folder)
    with translate_disk_full(place):
        sizes = {str(p.relative_to(place)): p.stat().st_size for p in _files(place)}
        (place / "state" / _FILES).write_text(json.dumps(sizes, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        place.rename(folder)


def write_loop(folder: Path, state: Mapping[str, object]) -> None:
    """Add the loop's state, plain values, to a checkpoint that is not yet complete."""
    with translate_disk_full(folder):
        (temporary(folder) / "state" / _LOOP).write_text(json.dumps(state) + "\n")


def read_loop(folder: Path) -> JsonObject:
    """Return the loop's state, as `write_loop` wrote it.

    Raises:
        InputError: when it is not there, or cannot be read.
    """
    path = folder / "state" / _LOOP
    try:
        state: JsonObject = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the checkpoint {folder} cannot be loaded: {path}: {error}") from error
    return state


def incomplete_reason(folder: Path) -> str:
    """Return the reason why a checkpoint cannot be resumed from, or "" if it is complete."""
    listing = folder / "state" / _FILES
    try:
        sizes: dict[str, int] = json.loads(listing.read_text())
    except FileNotFoundError:
        return f"{listing} is missing"
    except (OSError, ValueError) as error:
        return f"{listing} cannot be read ({error})"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, not {size}"
    return ""


def newest_whole(checkpoints: Path) -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint, and the reasons why newer ones are not.

    Raises:
        InputError: when there is none.
    """
    skipped: list[str] = []
    for folder in sorted(checkpoints.glob("step-*[0-9]"), reverse=True):
        if not (why := incomplete_reason(folder)):
            return folder, skipped
        skipped.append(why)
    reasons = f": {'; '.join(skipped)}" if skipped else ""
    raise InputError(f"{checkpoints} holds no whole checkpoint to resume from{reasons}")


def prune(checkpoints: Path, keep_last: int, best: str | None) -> None:
    """Remove all but the last `keep_last` checkpoints and the one named `best`."""
    folders = sorted(checkpoints.glob("step-*[0-9]"))
    for folder in folders[:-keep_last]:
        if folder.name != best:
            shutil.rmtree(folder, ignore_errors=True)


def save_state(
    folder: Path, rank: int, learners: Mapping[str, TrainableModule], extra: "RankState"
) -> None:
    """Write this rank's part of the weights and optimizer, and `extra`; called on all ranks."""
    state = folder / "state"
    with translate_disk_full(state):
        with _alone():
            save(_states(learners), checkpoint_id=state, no_dist=not dist.is_initialized())
        schedules = {name: learner.schedule.state_dict() for name, learner in learners.items()}
        torch.save({**extra, "schedules": schedules}, state / f"rank-{rank}.pt")


def load_state(folder: Path, rank: int, learners: Mapping[str, TrainableModule]) -> "RankState":
    """Load what `save_state` wrote, with any number of ranks; return `extra`.

    Raises:
        InputError: when it does not fit the model, or cannot be read.
    """
    state = folder / "state"
    try:
        states = _states(learners)
        reader = _Reader(state)
        reader.read_metadata()  # torch would obscure its errors
        with _alone():
            load(
                states,
                storage_reader=reader,
                planner=_Planner(),
                no_dist=not dist.is_initialized(),
            )
        for name, learner in learners.items():
            set_state_dict(
                learner.module,
                learner.optimizer,
                model_state_dict=states[name]["model"],
                optim_state_dict=states[name]["optimizer"],
            )
        own = state / f"rank-{rank}.pt"
        saved = torch.load(own if own.exists() else state / "rank-0.pt")
        extra: RankState = saved
        for name, learner in learners.items():
            learner.schedule.load_state_dict(saved["schedules"][name])
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        pickle.UnpicklingError,
        CheckpointException,
    ) as error:
        causes = [c for c in _causes(error) if isinstance(c, pickle.UnpicklingError)]
        reason = first_line(causes[0] if causes else error)
        raise InputError(f"the checkpoint {folder} cannot be loaded: {reason}") from error
    return extra


class RankState(TypedDict):
    """A rank's state besides weights and optimizer."""

    version: int
    steps: int
    skipped_in_row: int
    rng: torch.Tensor


class _ModuleState(TypedDict):
    model: dict[str, ValueType]
    optimizer: OptimizerStateType


def _states(learners: Mapping[str, TrainableModule]) -> dict[str, _ModuleState]:
    states: dict[str, _ModuleState] = {}
    for name, learner in learners.items():
        model, optimizer = get_state_dict(learner.module, learner.optimizer)
        states[name] = {"model": model, "optimizer": optimizer}
    return states


class _Reader(filesystem.FileSystemReader):
    """Reads `.metadata`, a pickle, without running code that it may contain."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
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
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
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
        raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}, which is not metadata")


class _Planner(DefaultLoadPlanner):
    """Reads values that are not tensors (rates, flags) without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), plain)
        except pickle.UnpicklingError:
            name = read_item.dest_index.fqn
            raise pickle.UnpicklingError(f"{name} holds more than plain values") from None
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress torch's warning that a single rank has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def translate_disk_full(path: Path) -> Iterator[None]:
    """Translate the errors that a full disk causes in any library into one sentence."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        reasons = [why for cause in _causes(error) if (why := _fullness(cause))]
        if shutil.disk_usage(path.parent).free < _LITTLE:
            reasons.append(os.strerror(errno.ENOSPC))
        if isinstance(error, CheckpointException):  # not an Exception: it would end the process
            reasons.append(str([*_causes(error)][-1]))
        if not reasons:
            raise
        raise TurnwiseError(
            f"{path} cannot be written: {reasons[0]}; earlier checkpoints are untouched"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, including the ranks' errors that torch wraps."""
    while error is not None:
        yield error
        if isinstance(error, CheckpointException):
            for failure, _ in error.failures.values():
                yield from _causes(failure)
        error = error.__cause__ or error.__context__


def _fullness(error: BaseException) -> str:
    """Return an error's reason if it means a full disk, or ""."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return str(error.strerror)
    # torch's message for an incomplete write.
    torn = isinstance(error, RuntimeError) and "inline_container" in str(error)
    return "the disk did not take everything" if torn else ""


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
