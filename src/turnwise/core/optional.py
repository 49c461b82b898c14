"""Imports that may fail: optional packages, and objects that a configuration names."""

import difflib
import importlib
import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from turnwise.errors import InputError, describe_error, ordinary_error

Foreign: TypeAlias = Any
"""A value of another package or of user code, whose type is not known here."""

_COMPANIONS = ("torchaudio", "torchcodec")  # see also `internals.torchvision`


def optional(package: str, extra: str, purpose: str) -> ModuleType:
    """Import a package that one of turnwise's extras installs, or raise an InputError whose message
    begins with the purpose: "a dataset from the Hub"."""
    return required(package, f"'turnwise[{extra}]'", purpose)


def required(package: str, install: str, purpose: str) -> ModuleType:
    """Import a package, or one of its modules; otherwise raise an InputError that suggests pip with
    the arguments `install`."""
    name = package.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        raise InputError(f"{purpose} needs {name}: pip install {install}")
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise InputError(f"{purpose} needs {error.name}, which {name} imports") from error


def load_object(path: str, key: str) -> Foreign:
    """Import `package.module:Name`; raise InputError that names the configuration key and what is
    missing."""
    module_name, separator, name = path.partition(":")
    if not separator:
        raise InputError(f"{key} must be package.module:Name, not {path!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module's own code may raise anything
        why = describe_error(ordinary_error(error))
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            why += f" in {Path.cwd()}, where the program runs, or among the installed packages"
        raise InputError(f"{key}: {module_name} cannot be imported: {why}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        close = difflib.get_close_matches(name, vars(module), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{key}: {module_name} has no {name}{hint}") from None
    except Exception as error:  # the module may import its names lazily
        raise InputError(f"{key}: {path} cannot be loaded: {describe_error(error)}") from error


def check_vllm() -> None:
    """Check that vLLM is installed and can be imported, without importing it. Also check that no
    companion package is built for CUDA while torch is built for CPUs, because vLLM's import in a
    worker would then fail."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed: pip install 'turnwise[cpu]', or 'turnwise[gpu]' on a machine "
            "with a GPU"
        )
    if version("torch").endswith("+cpu"):
        mixed = []
        for name in _COMPANIONS:
            with suppress(PackageNotFoundError):
                if not version(name).endswith("+cpu"):
                    mixed.append(name)
        if mixed:
            raise InputError(
                f"{', '.join(mixed)}: built for CUDA, but torch {version('torch')} is for CPUs: "
                f"pip uninstall {' '.join(mixed)} (vLLM runs without them)"
            )
