"""States that clients save: folders of a run, named by addresses `tinker://RUN/KIND/NAME`.

Each version of a state is a folder of its own, with an adapter in PEFT's format and `meta.json`.
The state's name is a symbolic link to a version, so one rename creates a name, or links it to
another version. A state belongs to the owner of the session that saved it. These folders are the
only record of the states, so saved states outlive the server. A name may be overwritten or removed
at any time, so a reader of a version's files must `hold` the version.
"""

import json
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from turnwise.core.files import sync_tree, temporary, write_file
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable, visible
from turnwise.tinker.futures import Missing

Kind = Literal["weights", "sampler_weights", "external_weights", "snapshots"]
"""`weights` to continue training, `sampler_weights` to sample, `external_weights` to download;
`snapshots` do not have an address for clients, and are removed when their session ends."""
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_KINDS = (*_TYPES, "snapshots")
_RUN, _KIND, _NAME = r"[\w:-]{1,200}", "|".join(_TYPES), r"\w[\w.-]{0,199}(?<!\.tmp)"
_ADDRESS = re.compile(rf"tinker://({_RUN})/({_KIND})/({_NAME})", re.ASCII)
_VERSIONS = "versions"
"""Folder with the versions of all states of a run, next to the folders of the kinds."""
_META = "meta.json"
_FREE_BYTES = 2**30  # minimum free disk space for a save


def expiry(seconds: int | None) -> str | None:
    """Return the time `seconds` from now, in ISO 8601; None if `seconds` is None."""
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
    """The values of `LoraSpec`."""
    created: str = field(default_factory=lambda: str(expiry(0)))
    expires: str | None = None
    """Time, in ISO 8601, at which the checkpoint expires; None keeps it for ever."""
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
        """Held while a name gets or loses its version, or a version gets or loses a reader."""
        self._readers = Counter[Path]()
        """Number of readers of each version that has readers."""
        self._nameless: set[Path] = set()
        """Versions that have lost their names but still have readers."""

    def begin(self, new: Checkpoint, *, overwrite: bool = False) -> Path:
        """Return an empty folder for the files of a version; `commit` then names the version.

        Raises:
            InputError: when the name is invalid, or is taken and not to `overwrite`, or the disk is
                full.
        """
        if not re.fullmatch(_NAME, new.name, re.ASCII):
            raise InputError(
                f"the name {visible(new.name)[:80]!r} of a checkpoint must have letters, digits, "
                "_, - and . only, 200 at most"
            )
        if not overwrite:
            self._check_free(new)
        begun = self.root / new.run / _VERSIONS / uuid.uuid4().hex
        with translate_unwritable(begun):
            begun.mkdir(parents=True)
        if shutil.disk_usage(begun).free < _FREE_BYTES:
            shutil.rmtree(begun)
            raise InputError("the server's disk is full: delete checkpoints, or ask its owner")
        return begun

    def commit(
        self, new: Checkpoint, begun: Path, *, overwrite: bool = False, flush: bool = True
    ) -> None:
        """Name the version in a folder that `begin` returned. With `flush`, the version survives
        a loss of power once this function returns.

        Raises:
            InputError: when the name was taken meanwhile, unless `overwrite`.
        """
        with translate_unwritable(begun):
            (begun / _META).write_text(json.dumps(asdict(new), indent=1) + "\n")
            if flush:
                sync_tree(begun)
            with self._changing:
                if not overwrite:
                    self._check_free(new)
                place = self.folder(new)
                before = place.resolve() if place.exists() else None
                self._name(place, begun)
                if before is not None:
                    self._leave(before)
            if flush:
                sync_tree(place.parent)

    def _check_free(self, new: Checkpoint) -> None:
        if self._read(self.folder(new)) is not None:
            raise InputError(f"{new.address} exists already: choose another name")

    def _name(self, place: Path, version: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        link = temporary(place)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", _VERSIONS, version.name), target_is_directory=True)
        link.replace(place)

    def _leave(self, version: Path) -> None:
        """Remove a version that has lost its name, once nobody reads it."""
        if version in self._readers:
            self._nameless.add(version)
            return
        self._nameless.discard(version)
        shutil.rmtree(version, ignore_errors=True)
        with suppress(OSError):
            version.parent.rmdir()
            version.parent.parent.rmdir()

    def hold(self, saved: Checkpoint) -> Path:
        """Return the folder of a checkpoint's version. The folder stays until `release`, even if
        the checkpoint's name is overwritten or removed.

        Raises:
            InputError: when the name now has another version.
            Missing: when the checkpoint was removed.
        """
        with self._changing:
            place = self.folder(saved)
            self._checked(place, saved.address, saved.owner, saved.created)
            version = place.resolve()
            self._readers[version] += 1
        return version

    def release(self, version: Path) -> None:
        """Release a version; `version` is the folder that `hold` returned."""
        with self._changing:
            self._readers[version] -= 1
            if not self._readers[version]:
                del self._readers[version]
                if version in self._nameless:
                    self._leave(version)

    @contextmanager
    def _holding(self, saved: Checkpoint) -> Iterator[Path]:
        version = self.hold(saved)
        try:
            yield version
        finally:
            self.release(version)

    def find(self, address: str, owner: str, created: str = "") -> Checkpoint:
        """Return an owner's checkpoint by its address.

        Raises:
            InputError: when the address is malformed, or `created` is given and is not the time at
                which its checkpoint was created.
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
        """Return an owner's checkpoints, of all runs or of one run, the newest first."""
        if run != "*" and not re.fullmatch(_RUN, run, re.ASCII):
            return []
        found = (self._read(p) for kind in _TYPES for p in self.root.glob(f"{run}/{kind}/*"))
        own = [c for c in found if c and c.owner == owner and not c.expired]
        return sorted(own, key=lambda each: each.created, reverse=True)

    def update(self, changed: Checkpoint) -> None:
        """Rewrite the metadata of a checkpoint."""
        place = self.folder(changed)
        with translate_unwritable(place), self._changing:
            self.find(changed.address, changed.owner, changed.created)
            write_file(place / _META, json.dumps(asdict(changed), indent=1) + "\n")

    def copy(self, source: Checkpoint, copied: Checkpoint) -> None:
        """Copy a checkpoint's files to a new checkpoint, unless that exists already. Of several
        concurrent copies, one stays."""
        if self._read(self.folder(copied)) is not None:
            return
        begun = self.begin(copied)
        try:
            with translate_unwritable(begun), self._holding(source) as held:
                shutil.copytree(held, begun, dirs_exist_ok=True)
            self.commit(copied, begun)
        except BaseException as error:  # free the space: the disk may be full
            shutil.rmtree(begun, ignore_errors=True)
            if not isinstance(error, InputError) or self._read(self.folder(copied)) is None:
                raise

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, and the folders that this leaves empty."""
        place = self.folder(checkpoint)
        with self._changing:
            if (now := self._read(place)) is None or now.created != checkpoint.created:
                return  # it is removed already, or another checkpoint has its name
            version = place.resolve()
            place.unlink()
            with suppress(OSError):
                place.parent.rmdir()
            self._leave(version)

    def tidy(self, snapshots: Collection[Path] | None = None) -> None:
        """Remove expired checkpoints. If `snapshots` is given (the folders of the snapshots that
        are still used), also remove everything else that a killed server left behind."""
        starts = snapshots is not None
        for place in [p for kind in _KINDS for p in self.root.glob(f"*/{kind}/*")]:
            found = self._read(place)
            if starts and found is not None and not place.is_symlink():
                self._adopt(place)
            unused = starts and place.parent.name == "snapshots" and place not in (snapshots or ())
            if found is not None and (found.expired or unused):
                self.remove(found)
            elif starts and (unused or place.suffix == ".tmp" or not (place / _META).exists()):
                # Keep a file that cannot be read, as another version of Turnwise may have saved it.
                place.unlink() if place.is_symlink() else shutil.rmtree(place, ignore_errors=True)
        for version in list(self.root.glob(f"*/{_VERSIONS}/*")) if starts else ():
            run = version.parent.parent
            names = (place for kind in _KINDS for place in run.glob(f"{kind}/*"))
            if version.resolve() not in {place.resolve() for place in names}:
                shutil.rmtree(version, ignore_errors=True)

    def _adopt(self, place: Path) -> None:
        """Make a named version from a state that an earlier server saved as a plain folder."""
        version = place.parent.parent / _VERSIONS / uuid.uuid4().hex
        version.parent.mkdir(exist_ok=True)
        place.rename(version)
        self._name(place, version)

    def describe(self, checkpoint: Checkpoint) -> JsonObject:
        """Return a checkpoint in the protocol's form."""
        size = 0
        with suppress(OSError):  # it was removed meanwhile
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
        """Return the path of the checkpoint's name, a link to the folder of its version."""
        return self.root / checkpoint.run / checkpoint.kind / checkpoint.name

    def _read(self, place: Path) -> Checkpoint | None:
        try:
            found = Checkpoint(**json.loads((place / _META).read_text()))
        except (OSError, ValueError, TypeError):  # TypeError: keys of another Turnwise version
            return None
        return replace(found, run=place.parent.parent.name, name=place.name)
