"""States that clients save: folders of a run, named by addresses `tinker://RUN/KIND/NAME`.

A folder has an adapter in PEFT's format and `meta.json`, appears whole or not at all, and belongs
to the owner of the session that saved it.
"""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from turnwise.core.files import put_in_place, temporary
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable, visible
from turnwise.tinker.futures import Missing

Kind = Literal["weights", "sampler_weights"]
_ADDRESS = re.compile(r"tinker://([\w:-]{1,200})/(weights|sampler_weights)/([\w.-]{1,200})")
_NAME = re.compile(r"\w[\w.-]{0,199}")
_META = "meta.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved state of a model."""

    run: str
    """Id of the model that was saved: its training run."""
    kind: Kind
    """`weights` to train on from, `sampler_weights` to sample from."""
    name: str
    owner: str
    base_model: str
    version: int
    """Number of optimizer steps in the weights."""
    spec: JsonObject
    """The keys of `AdapterSpec`."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    expires: str | None = None
    """Time at which it may be removed; None keeps it."""
    public: bool = False
    """Whether every owner may read it."""
    user_metadata: dict[str, str] | None = None

    @property
    def address(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints in a folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, new: Checkpoint) -> Path:
        """Return the empty folder that a new checkpoint is written to, until `commit`.

        Raises:
            InputError: when its name cannot be used, or is taken.
        """
        if not _NAME.fullmatch(new.name):
            raise InputError(
                f"the name {visible(new.name)[:80]!r} of a checkpoint must have letters, digits, "
                "_, - and . only, 200 at most"
            )
        if (place := self.folder(new)).exists():
            raise InputError(f"{new.address} exists already: choose another name")
        with translate_unwritable(place):
            temporary(place).mkdir(parents=True, exist_ok=True)
        return temporary(place)

    def commit(self, new: Checkpoint, *, flush: bool = True) -> None:
        """Complete a checkpoint, which with `flush` survives a loss of power from then on."""
        place = self.folder(new)
        with translate_unwritable(place):
            (temporary(place) / _META).write_text(json.dumps(asdict(new), indent=1) + "\n")
            put_in_place(place, flush=flush)

    def find(self, address: str, owner: str) -> Checkpoint:
        """Return the checkpoint of an address.

        Raises:
            InputError: when the address is none.
            Missing: when there is no such checkpoint, or it is another owner's.
        """
        if (parts := _ADDRESS.fullmatch(address)) is None:
            raise InputError(f"{visible(address)[:200]!r} is no address tinker://RUN/KIND/NAME")
        place = self._folder / parts[1] / parts[2] / parts[3]
        try:
            found = Checkpoint(**json.loads((place / _META).read_text()))
        except (OSError, ValueError, TypeError):
            found = None
        if found is None or not (found.public or found.owner == owner):
            raise Missing(f"there is no checkpoint {address} of yours")
        return replace(found, run=parts[1], name=parts[3])

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self._folder / checkpoint.run / checkpoint.kind / checkpoint.name
