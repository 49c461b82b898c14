"""Packages that only some runs need."""

from importlib import metadata

import pytest

from turnwise.core.optional import check_vllm, optional
from turnwise.errors import InputError


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(InputError, match=r"x.parquet needs arrows: pip install 'turnwise\[data\]'"):
        optional("arrows.parquet", "data", "x.parquet")
    assert optional("json.decoder", "data", "x").__name__ == "json.decoder"


def test_companions_of_another_build_than_torchs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_vllm()
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("turnwise.core.optional.version", version)
    with pytest.raises(InputError, match="pip uninstall torchvision "):
        check_vllm()
    versions["torchvision"] = "0.28.0+cpu"
    check_vllm()
    versions |= {"torch": "2.13.0", "torchvision": "0.28.0"}
    check_vllm()
