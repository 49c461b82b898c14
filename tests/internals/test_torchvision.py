"""torchvision's CUDA build can be imported beside a torch for CPUs, once turnwise is imported."""

import importlib.metadata
import subprocess
import sys

import pytest

from turnwise.internals.torchvision import _Declaring


def test_where_it_is_missing_it_is_just_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finder = _Declaring()
    monkeypatch.setattr(sys, "meta_path", [finder])
    assert finder.find_spec("torchvision", None) is None
    assert sys.meta_path == []


def test_its_transforms_work_however_it_was_built() -> None:
    pytest.importorskip("torchvision")
    program = (
        "import turnwise, torch\n"
        "import torchvision.transforms.v2.functional as transforms\n"
        "print(tuple(transforms.resize(torch.zeros(3, 8, 8), [4, 4], antialias=True).shape))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "(3, 4, 4)\n", done.stderr
