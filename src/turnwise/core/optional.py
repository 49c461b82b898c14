"""Optional packages: imported on first use, or an error that says what to install."""

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from turnwise.errors import InputError

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def optional(package: str, extra: str, purpose: str) -> ModuleType:
    """Import a package that one of turnwise's extras installs.

    Args:
        purpose: Beginning of the message: "a dataset from the Hub".

    Raises:
        InputError: when it is not installed.

    Example:
        `optional("datasets", "data", "a dataset from the Hub").load_dataset("gsm8k")`
    """
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise InputError(
            f"{purpose} needs {package.partition('.')[0]}: pip install 'turnwise[{extra}]'"
        )
    return importlib.import_module(package)


def check_vllm() -> None:
    """Check that vLLM is installed and can be imported, without importing it.

    Raises:
        InputError: when it is missing, or when one of its companions is built for CUDA and torch
            for CPUs, in which case importing vLLM would fail later, in a worker.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed: pip install 'turnwise[cpu]', or 'turnwise[gpu]' on a machine "
            "with a GPU"
        )
    if version("torch").endswith("+cpu"):
        mixed = [name for name in _COMPANIONS if _is_for_cuda(name)]
        if mixed:
            raise InputError(
                f"{', '.join(mixed)}: built for CUDA, but torch {version('torch')} is for CPUs: "
                f"pip uninstall {' '.join(mixed)} (vLLM runs without them)"
            )


def _is_for_cuda(name: str) -> bool:
    try:
        return not version(name).endswith("+cpu")
    except PackageNotFoundError:
        return False
