"""Packages that only some runs need."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from turnwise.core.optional import check_vllm, load_object, optional, required
from turnwise.errors import InputError


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(InputError, match=r"x.parquet needs arrows: pip install 'turnwise\[data\]'"):
        optional("arrows.parquet", "data", "x.parquet")
    assert optional("json.decoder", "data", "x").__name__ == "json.decoder"


def test_a_package_without_an_extra_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"^environment: ice needs ice_9: pip install ice-9$"):
        required("ice_9", "ice-9", "environment: ice")
    (tmp_path / "ice_8.py").write_text("import no_such_water\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="ice needs no_such_water, which ice_8 imports"):
        required("ice_8", "ice-8", "environment: ice")


def test_companions_of_another_build_than_torchs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_vllm()
    versions = {"torch": "2.13.0+cpu", "torchcodec": "0.9.0", "torchaudio": "2.11.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("turnwise.core.optional.version", version)
    with pytest.raises(InputError, match="pip uninstall torchcodec "):
        check_vllm()
    versions["torchcodec"] = "0.9.0+cpu"
    check_vllm()
    versions |= {"torch": "2.13.0", "torchcodec": "0.9.0"}
    check_vllm()


def test_a_missing_name_or_module_gets_a_hint() -> None:
    with pytest.raises(InputError, match=r"turnwise\.errors has no InputEror; did you mean InputE"):
        load_object("turnwise.errors:InputEror", "environment")
    with pytest.raises(InputError, match=r"has no Nothing$"):
        load_object("turnwise.errors:Nothing", "environment")
    where = re.escape(f"in {Path.cwd()}, where the program runs")
    with pytest.raises(InputError, match=f"no_such cannot be imported: .*{where}"):
        load_object("no_such:f", "environment")
