"""torchvision's CUDA build can be imported beside a torch for CPUs, whoever imports it first."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from turnwise.internals import torchvision as ours


@pytest.mark.parametrize("built", [None, "0.28.0+cpu"])
def test_nothing_is_declared_where_it_is_missing_or_complete(
    monkeypatch: pytest.MonkeyPatch, built: str | None
) -> None:
    def version(name: str) -> str:
        if built is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return built

    declared: list[object] = []
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(ours, "version", version)
    monkeypatch.setattr(ours, "_declared", declared)
    ours.declare_operators()
    assert declared == []


@pytest.mark.parametrize("first", ["transformers", "torch"])
def test_its_transforms_work_whoever_is_imported_first(first: str) -> None:
    pytest.importorskip("torchvision")
    program = (
        f"import {first}, torch\n"
        "import torchvision.transforms.v2.functional as transforms\n"
        "print(tuple(transforms.resize(torch.zeros(3, 8, 8), [4, 4], antialias=True).shape))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "(3, 4, 4)\n", done.stderr
