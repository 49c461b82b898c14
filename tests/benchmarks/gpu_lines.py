"""Checks that pass, fail, die, hang, or say why they cannot run."""

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.device import NotRun, Place, require


def passes(place: Place) -> Iterator[str]:
    print("not for the table")  # noqa: T201
    yield str(place.device)


def fails(place: Place) -> Iterator[str]:
    yield "1 of 2"
    require(1 > 2, "1 is not more than 2")


def dies(place: Place) -> Iterator[str]:
    if place:
        os._exit(7)
    yield ""


def hangs(place: Place) -> Iterator[str]:
    if child := os.fork():
        (place.folder / "pid").write_text(str(child))
    time.sleep(600)
    yield ""


def has_no_second(place: Place) -> Iterator[str]:
    yield "1 GPU"
    raise NotRun("there is one GPU")
