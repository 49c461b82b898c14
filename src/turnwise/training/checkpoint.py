"""Checkpoints on disk: what they hold, when they are whole, which ones are kept.

    checkpoints/step-NNNN/     the model in Hugging Face's format, for anybody
      state/                   what a resumed run goes on from
        .metadata, *.distcp      weights and optimizer, torch's distributed checkpoint
        rank-N.pt                schedule, version, random numbers of each rank
        loop.json, buffer.jsonl  the loop's: data order, groups in waiting (written by the loop)
        files.json               every file and its size: written last, so its presence and
                                 agreement mean that the checkpoint is whole

A checkpoint is written to `step-NNNN.tmp` and renamed. Loading one runs no code that comes with it.
"""

import errno
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.config import Config
from turnwise.errors import InputError, TurnwiseError
from turnwise.training.learner import Learner

_FILES = "files.json"
_LOOP = "loop.json"
_METADATA = ".metadata"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 2**20
"""Free bytes below which a failed write is put down to the disk."""


def temporary(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(folder.name + ".tmp")


def begin(folder: Path) -> Path:
    """Make room for a checkpoint; returns where to write it."""
    place = temporary(folder)
    with told_when_full(place):
        shutil.rmtree(place, ignore_errors=True)
        (place / "state").mkdir(parents=True)
    return place


def commit(folder: Path) -> None:
    """Give what was written its name: it is whole from here on."""
    place = temporary(folder)
    with told_when_full(place):
        sizes = {str(p.relative_to(place)): p.stat().st_size for p in _files(place)}
        (place / "state" / _FILES).write_text(json.dumps(sizes, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        place.rename(folder)


def write_loop(folder: Path, state: Mapping[str, Any]) -> None:
    """Add what the loop goes on from, plain values, to a checkpoint that is not yet whole."""
    with told_when_full(folder):
        (temporary(folder) / "state" / _LOOP).write_text(json.dumps(state) + "\n")


def read_loop(folder: Path) -> dict[str, Any]:
    """What `write_loop` wrote.

    Raises:
        InputError: when it is not there, or cannot be read.
    """
    path = folder / "state" / _LOOP
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the checkpoint {folder} cannot be loaded: {path}: {error}") from error
    return state


def flaw(folder: Path) -> str:
    """Why a checkpoint cannot be gone on from, or "" when it is whole."""
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
    """The newest checkpoint that is whole, and what is wrong with those after it.

    Raises:
        InputError: when there is none.
    """
    flaws: list[str] = []
    for folder in sorted(checkpoints.glob("step-*[0-9]"), reverse=True):
        if not (why := flaw(folder)):
            return folder, flaws
        flaws.append(why)
    told = f": {'; '.join(flaws)}" if flaws else ""
    raise InputError(f"{checkpoints} holds no whole checkpoint to go on from{told}")


def prune(checkpoints: Path, keep_last: int, best: str | None) -> None:
    """Remove all but the last `keep_last` checkpoints and the one named `best`."""
    folders = sorted(checkpoints.glob("step-*[0-9]"))
    for folder in folders[:-keep_last]:
        if folder.name != best:
            shutil.rmtree(folder, ignore_errors=True)


def save_state(
    folder: Path, rank: int, learners: Mapping[str, Learner], extra: Mapping[str, Any]
) -> None:
    """Write this rank's part of weights, optimizer and the rest; all ranks call it."""
    state = folder / "state"
    with told_when_full(state):
        with _alone():
            save(_states(learners), checkpoint_id=state, no_dist=not dist.is_initialized())
        schedules = {name: learner.schedule.state_dict() for name, learner in learners.items()}
        torch.save({**extra, "schedules": schedules}, state / f"rank-{rank}.pt")


def load_state(folder: Path, rank: int, learners: Mapping[str, Learner]) -> dict[str, Any]:
    """Read what `save_state` wrote, with any number of ranks; returns `extra`.

    Raises:
        InputError: when it does not fit the model, or cannot be read.
    """
    state = folder / "state"
    try:
        states = _states(learners)
        reader = _Reader(state)
        reader.read_metadata()  # torch would hide what is wrong with it behind errors of its own
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
        extra: dict[str, Any] = torch.load(own if own.exists() else state / "rank-0.pt")
        for name, learner in learners.items():
            learner.schedule.load_state_dict(extra["schedules"][name])
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        pickle.UnpicklingError,
        CheckpointException,
    ) as error:
        causes = [c for c in _causes(error) if isinstance(c, pickle.UnpicklingError)]
        reason = str(causes[0] if causes else error).strip().partition("\n")[0]
        raise InputError(f"the checkpoint {folder} cannot be loaded: {reason}") from error
    return extra


def _states(learners: Mapping[str, Learner]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, learner in learners.items():
        model, optimizer = get_state_dict(learner.module, learner.optimizer)
        states[name] = {"model": model, "optimizer": optimizer}
    return states


class _Reader(filesystem.FileSystemReader):
    """Reads `.metadata`, a pickle, and runs nothing that it may hold beside metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows the names that torch's metadata is made of, and no others."""

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

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}, which is no metadata")


class _Planner(DefaultLoadPlanner):
    """Reads what is no tensor (rates, flags) as torch reads weights: without running it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), plain)
        except pickle.UnpicklingError:
            name = read_item.dest_index.fqn
            raise pickle.UnpicklingError(f"{name} holds more than plain values") from None
        plain.seek(0)
        super().load_bytes(read_item, plain)


def export(
    folder: Path,
    rank: int,
    config: Config,
    shape: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write the model and its tokenizer in Hugging Face's format, in `model.dtype`.

    All ranks take the tensors, which are gathered one by one; rank 0 alone holds and writes them.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if rank:
        for _ in tensors:
            pass
        return
    whole = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors}
    trust = config.model.trust_remote_code
    with told_when_full(folder):
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=trust)
        empty.save_pretrained(folder, state_dict=whole)
        tokenizer = config.model.tokenizer or config.model.path
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust).save_pretrained(folder)


@contextmanager
def _alone() -> Iterator[None]:
    """One rank has no process group, which torch would warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def told_when_full(path: Path) -> Iterator[None]:
    """Make a full disk one sentence, whatever it made others raise."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        reasons = [why for cause in _causes(error) if (why := _fullness(cause))]
        if shutil.disk_usage(path.parent).free < _LITTLE:
            reasons.append(os.strerror(errno.ENOSPC))
        if isinstance(error, CheckpointException):  # no Exception: it would end the process
            reasons.append(str([*_causes(error)][-1]))
        if not reasons:
            raise
        raise TurnwiseError(
            f"{path} cannot be written: {reasons[0]}; what was saved before is untouched"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it; torch hides those of ranks in one of its own."""
    while error is not None:
        yield error
        if isinstance(error, CheckpointException):
            for failure, _ in error.failures.values():
                yield from _causes(failure)
        error = error.__cause__ or error.__context__


def _fullness(error: BaseException) -> str:
    """What an error says of a disk that is full, or "" when it speaks of something else."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return str(error.strerror)
    # torch's own words for a file that did not take all that was written.
    torn = isinstance(error, RuntimeError) and "inline_container" in str(error)
    return "the disk did not take it all" if torn else ""


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
