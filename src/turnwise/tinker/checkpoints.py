"""States that clients save: folders of a run, named by addresses `tinker://RUN/KIND/NAME`.

A folder has an adapter in PEFT's format and `meta.json`, appears whole or not at all, and belongs
to the owner of the session that saved it. Nothing else knows what there is, so whatever was saved
outlives the server. What was found by its name may be overwritten or removed at any time: who reads
its files reads them in the folder that `hold` returns.
"""

import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from turnwise.core.files import put_in_place, recover, sync_tree, temporary, write_file
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable, visible
from turnwise.tinker.futures import Missing

Kind = Literal["weights", "sampler_weights", "external_weights", "snapshots"]
"""`weights` to train on from, `sampler_weights` to sample from, `external_weights` to download;
`snapshots` have no name that a client knows, and end with their session."""
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_RUN, _KIND, _NAME = r"[\w:-]{1,200}", "|".join(_TYPES), r"\w[\w.-]{0,199}(?<!\.tmp)(?<!\.old)"
_ADDRESS = re.compile(rf"tinker://({_RUN})/({_KIND})/({_NAME})", re.ASCII)
_META = "meta.json"
_HALVES = (".tmp", ".old")
_HELD = "held"
"""Folder of a run, beside those of the kinds, with what `hold` keeps."""
_FREE_BYTES = 2**30  # of the disk, below which nothing is saved


def expiry(seconds: int | None) -> str | None:
    """Return the time after some seconds, in ISO 8601; None for None."""
    return None if seconds is None else (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved state of a model."""

    run: str
    """Id of the model that was saved: its training run."""
    kind: Kind
    name: str
    owner: str
    base_model: str
    version: int
    """Number of optimizer steps in the weights."""
    spec: JsonObject
    """The keys of `AdapterSpec`."""
    created: str = field(default_factory=lambda: str(expiry(0)))
    expires: str | None = None
    """Time from which it does not exist any more; None keeps it."""
    user_metadata: dict[str, str] | None = None
    run_metadata: JsonObject | None = None
    """The `user_metadata` of the model."""

    @property
    def address(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= str(expiry(0))


class Checkpoints:
    """The checkpoints in a folder of the run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self._changing = threading.Lock()
        """Held while a name gets or loses its files, which takes no longer than a few renames."""
        self._held: dict[tuple[Path, str], tuple[Path, int]] = {}
        """By the folder of a checkpoint and its `created`: where its files are held, and for how
        many readers."""

    def begin(self, new: Checkpoint, *, overwrite: bool = False) -> Path:
        """Return an empty folder of its own that a new checkpoint is written to, until `commit`.

        Raises:
            InputError: when its name cannot be used, or is taken, unless `overwrite`.
        """
        if not re.fullmatch(_NAME, new.name, re.ASCII):
            raise InputError(
                f"the name {visible(new.name)[:80]!r} of a checkpoint must have letters, digits, "
                "_, - and . only, 200 at most"
            )
        place = self.folder(new)
        if not overwrite:
            self._check_free(new)
        begun = temporary(place.with_name(f"{new.name}.{uuid.uuid4().hex}"))
        with translate_unwritable(place):
            begun.mkdir(parents=True)
        if shutil.disk_usage(begun).free < _FREE_BYTES:
            shutil.rmtree(begun)
            raise InputError("the server's disk is full: delete checkpoints, or ask its owner")
        return begun

    def commit(
        self, new: Checkpoint, begun: Path, *, overwrite: bool = False, flush: bool = True
    ) -> None:
        """Complete the checkpoint in a folder that `begin` returned. With `flush` it survives a
        loss of power from then on.

        Raises:
            InputError: when its name was taken meanwhile, unless `overwrite`.
        """
        place = self.folder(new)
        with translate_unwritable(place):
            (begun / _META).write_text(json.dumps(asdict(new), indent=1) + "\n")
            if flush:
                sync_tree(begun)
            with self._changing:
                if not overwrite:
                    self._check_free(new)
                put_in_place(place, begun, flush=flush)

    def _check_free(self, new: Checkpoint) -> None:
        if self._read(self.folder(new)) is not None:
            raise InputError(f"{new.address} exists already: choose another name")

    def hold(self, saved: Checkpoint) -> Path:
        """Return a folder with a checkpoint's files, which stay there until `release`, whatever
        takes the place of the checkpoint.

        Raises:
            InputError: when another has taken its place already.
            Missing: when it was removed.
        """
        place, key = self.folder(saved), (self.folder(saved), saved.created)
        with translate_unwritable(place), self._changing:
            self._checked(place, saved.address, saved.owner, saved.created)
            held, readers = self._held.get(key, (None, 0))
            if held is None:
                held = place.parent.parent / _HELD / uuid.uuid4().hex
                held.mkdir(parents=True)
                for file in place.iterdir():
                    _link(file, held / file.name)
            self._held[key] = held, readers + 1
        return held

    def release(self, saved: Checkpoint) -> None:
        """End what a `hold` of the same checkpoint began."""
        key = self.folder(saved), saved.created
        with self._changing:
            held, readers = self._held[key]
            if readers > 1:
                self._held[key] = held, readers - 1
                return
            del self._held[key]
        shutil.rmtree(held, ignore_errors=True)
        with suppress(OSError):
            held.parent.rmdir()
            held.parent.parent.rmdir()

    @contextmanager
    def _holding(self, saved: Checkpoint) -> Iterator[Path]:
        held = self.hold(saved)
        try:
            yield held
        finally:
            self.release(saved)

    def find(self, address: str, owner: str, created: str = "") -> Checkpoint:
        """Return an owner's checkpoint by its address.

        Raises:
            InputError: when the address is none, or another has taken the place of one that was
                `created` then.
            Missing: when there is no such checkpoint, or it is another owner's.
        """
        if (parts := _ADDRESS.fullmatch(address)) is None:
            raise InputError(f"{visible(address)[:200]!r} is no address tinker://RUN/KIND/NAME")
        return self._checked(self.root / parts[1] / parts[2] / parts[3], address, owner, created)

    def _checked(self, place: Path, address: str, owner: str, created: str) -> Checkpoint:
        found = self._read(place)
        if found is None or found.owner != owner or found.expired:
            raise Missing(f"there is no checkpoint {address} of yours")
        if created and found.created != created:
            raise InputError(f"{address} was overwritten: make a new sampling client for it")
        return found

    def of(self, owner: str, run: str = "*") -> list[Checkpoint]:
        """Return an owner's checkpoints, of all runs or of one, the newest first."""
        if run != "*" and not re.fullmatch(_RUN, run, re.ASCII):
            return []
        places = (p for kind in _TYPES for p in self.root.glob(f"{run}/{kind}/*"))
        found = (self._read(p) for p in places if p.suffix not in _HALVES)
        own = [c for c in found if c and c.owner == owner and not c.expired]
        return sorted(own, key=lambda each: each.created, reverse=True)

    def update(self, changed: Checkpoint) -> None:
        """Write what is known of a checkpoint again."""
        with translate_unwritable(self.folder(changed)), self._changing:
            self.find(changed.address, changed.owner, changed.created)
            write_file(self.folder(changed) / _META, json.dumps(asdict(changed), indent=1) + "\n")

    def copy(self, source: Checkpoint, copied: Checkpoint) -> None:
        """Make a checkpoint of another's files, unless it is made already. Of several that are made
        at once, one stays."""
        if self._read(self.folder(copied)) is not None:
            return
        begun = self.begin(copied)
        try:
            with translate_unwritable(begun), self._holding(source) as held:
                shutil.copytree(held, begun, dirs_exist_ok=True)
            self.commit(copied, begun)
        except BaseException as error:  # a full disk would stay full
            shutil.rmtree(begun, ignore_errors=True)
            if not isinstance(error, InputError) or self._read(self.folder(copied)) is None:
                raise

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, and the folders that are empty then."""
        place = self.folder(checkpoint)
        with self._changing:
            if (now := self._read(place)) is None or now.created != checkpoint.created:
                return  # another has taken its place
            (place / _META).unlink()  # from here on it does not exist
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            place.parent.rmdir()
            place.parent.parent.rmdir()

    def tidy(self, snapshots: Collection[Path] | None = None) -> None:
        """Remove what has expired; and, with the snapshots that are still used, what a server left
        that was killed."""
        for held in self.root.glob(f"*/{_HELD}") if snapshots is not None else ():
            shutil.rmtree(held, ignore_errors=True)
        for kind in (*_TYPES, "snapshots"):
            for place in list(self.root.glob(f"*/{kind}/*")):
                found, half = self._read(place), place.suffix in _HALVES
                if found is not None and found.expired and not half:
                    self.remove(found)
                if snapshots is None:
                    continue
                if place.suffix == ".old":
                    recover(place.with_suffix(""), lambda new: self._read(new) is not None)
                # One that is there, but cannot be read, may be another version's.
                half = half or not (place / _META).exists()
                if half or (kind == "snapshots" and place not in snapshots):
                    shutil.rmtree(place, ignore_errors=True)

    def describe(self, checkpoint: Checkpoint) -> JsonObject:
        """Return a checkpoint in the protocol's form."""
        size = 0
        with suppress(OSError):  # one that is removed meanwhile
            size = sum(each.stat().st_size for each in self.folder(checkpoint).iterdir())
        return {
            "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
            "checkpoint_type": _TYPES[checkpoint.kind],
            "time": checkpoint.created,
            "tinker_path": checkpoint.address,
            "size_bytes": size,
            "public": False,
            "user_metadata": checkpoint.user_metadata,
            "expires_at": checkpoint.expires,
        }

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self.root / checkpoint.run / checkpoint.kind / checkpoint.name

    def _read(self, place: Path) -> Checkpoint | None:
        try:
            found = Checkpoint(**json.loads((place / _META).read_text()))
        except (OSError, ValueError, TypeError):  # also keys that this version does not know
            return None
        return replace(found, run=place.parent.parent.name, name=place.name)


def _link(file: Path, place: Path) -> None:
    """Give a file a second name, or copy it where the file system has no such links."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)
