"""Checkpoint folders: their order, when they are complete, and which of them are kept.

The folder `state/` in `checkpoints/step-NNNN` contains what a resumed run needs (see
`checkpoint_state`), the training loop's state in loop.json, and files.json, which lists every file
and its size. As files.json is written last, a checkpoint whose files agree with it is complete. A
checkpoint is written to `step-NNNN.tmp`, flushed to the disk and renamed; older checkpoints are
removed only after that. Importing this module needs no torch.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from turnwise.core.files import number_of, numbered, put_in_place, recover, temporary
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TurnwiseError

_FILES = "files.json"
_LOOP = "loop.json"
_STEP = "step"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 2**20  # free bytes below which a failed write is attributed to a full disk


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def folder_of(run: Path, step: int) -> Path:
    return checkpoints_of(run) / f"{_STEP}-{step:04d}"


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return all checkpoints in a folder, complete or not, in the order of their steps."""
    for left in numbered(checkpoints, _STEP, ".old"):
        recover(left.with_suffix(""), _is_whole)
    return numbered(checkpoints, _STEP)


def begin(folder: Path) -> Path:
    place = temporary(folder)
    with translate_disk_full(place):
        recover(folder, _is_whole)
        shutil.rmtree(place, ignore_errors=True)
        (place / "state").mkdir(parents=True)
    return place


def commit(folder: Path) -> None:
    """Complete the checkpoint on the disk by moving its temporary folder to the final path."""
    place = temporary(folder)
    with translate_disk_full(place):
        sizes = {
            str(path.relative_to(place)): path.stat().st_size
            for path in sorted(place.rglob("*"))
            if path.is_file()
        }
        (place / "state" / _FILES).write_text(json.dumps(sizes, indent=1) + "\n")
        put_in_place(folder)


def write_loop(folder: Path, state: Mapping[str, object]) -> None:
    """Add the training loop's state, as JSON values, to a checkpoint that is not yet complete."""
    with translate_disk_full(folder):
        (temporary(folder) / "state" / _LOOP).write_text(json.dumps(state) + "\n")


def read_loop(folder: Path) -> JsonObject:
    """Return the training loop's state, as `write_loop` wrote it."""
    path = folder / "state" / _LOOP
    try:
        state: JsonObject = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the checkpoint {folder} cannot be loaded: {path}: {error}") from error
    return state


def incomplete_reason(folder: Path) -> str:
    """Return the reason why a checkpoint cannot be resumed from, or "" if it is complete."""
    recover(folder, _is_whole)
    return _flaw(folder)


def checked_source(folder: str | Path) -> Path:
    """Return the absolute path of a checkpoint; raise InputError if it is incomplete."""
    place = Path(folder).expanduser().resolve()
    if flaw := incomplete_reason(place):
        raise InputError(f"{place} is no checkpoint to resume from: {flaw}")
    return place


def checked_target(folder: Path) -> Path:
    """Return the absolute path of a new checkpoint; raise InputError if the path exists and is
    neither a complete checkpoint nor an empty folder."""
    place = folder.expanduser().resolve()
    taken = place.exists() and (not place.is_dir() or any(place.iterdir()))
    if taken and (flaw := incomplete_reason(place)):
        raise InputError(
            f"{place} exists and is no whole checkpoint, so it is not replaced: {flaw}"
        )
    return place


def _is_whole(folder: Path) -> bool:
    return not _flaw(folder)


def _flaw(folder: Path) -> str:
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
    """Return the newest complete checkpoint, and the reasons why newer ones are incomplete."""
    skipped: list[str] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        if not (why := incomplete_reason(folder)):
            return folder, skipped
        skipped.append(why)
    reasons = f": {'; '.join(skipped)}" if skipped else ""
    raise InputError(f"{checkpoints} holds no whole checkpoint to resume from{reasons}")


def newest_before(checkpoints: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint of a step before `step`; None if there is none."""
    earlier = (each for each in reversed(list_checkpoints(checkpoints)) if number_of(each) < step)
    return next((each for each in earlier if not incomplete_reason(each)), None)


def prune(
    checkpoints: Path, keep_last: int, best: int | None, committed: int | None = None
) -> None:
    """Keep only the last `keep_last` checkpoints and the best; also remove leftovers of crashes.

    `committed` is the step of the newest complete checkpoint; None means the last checkpoint in the
    folder. Later checkpoints, which a resumed run found incomplete, are neither counted nor
    removed.
    """
    folders = list_checkpoints(checkpoints)
    if committed is None:
        committed = number_of(folders[-1]) if folders else 0
    past = [folder for folder in folders if number_of(folder) <= committed]
    for folder in past[:-keep_last]:
        if number_of(folder) != best:
            shutil.rmtree(folder, ignore_errors=True)
    for suffix in (".tmp", ".old"):
        for left in numbered(checkpoints, _STEP, suffix):
            if number_of(left) <= committed:
                shutil.rmtree(left, ignore_errors=True)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, including the ranks' errors that torch wraps."""
    while error is not None:
        yield error
        for failure, _ in getattr(error, "failures", {}).values():
            yield from causes(failure)
        error = error.__cause__ or error.__context__


@contextmanager
def translate_disk_full(path: Path) -> Iterator[None]:
    """Turn errors that a full disk causes, in any library, into a TurnwiseError that says that the
    disk is full."""
    try:
        yield
    except Exception as error:
        reasons: list[str] = []
        for cause in causes(error):
            if isinstance(cause, OSError) and cause.errno in _FULL:
                reasons.append(str(cause.strerror))
            elif isinstance(cause, RuntimeError) and "inline_container" in str(cause):
                # torch's message for an incomplete write
                reasons.append("the disk did not take everything")
        if shutil.disk_usage(path.parent).free < _LITTLE:
            reasons.append(os.strerror(errno.ENOSPC))
        if not reasons:
            raise
        raise TurnwiseError(
            f"{path} cannot be written: {reasons[0]}; earlier checkpoints are untouched"
        ) from error
