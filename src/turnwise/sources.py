"""Where models and data come from: this disk, the Hugging Face Hub, or its cache.

What is nowhere is said at once, before anything slow is imported. Hugging Face's own libraries try
for half a minute where there is no network; one look of at most `_SECONDS` decides instead whether
they ask the Hub or its cache alone.
"""

import os
import re
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from turnwise.errors import InputError

DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""What the names of data files end with."""
_NAME = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_SECONDS = 3.0
_TRUE = ("1", "ON", "YES", "TRUE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_model(path: str, key: str = "model.path") -> None:
    """See that a key names a model's folder, or a model that the Hub or its cache may have.

    Raises:
        InputError: when it is neither.
    """
    _check(path, "config.json", key, "model", "config.json, weights and tokenizer")


def check_tokenizer(path: str) -> None:
    """See the same of `model.tokenizer`; raises as `check_model` does."""
    own = "tokenizer_config.json"
    _check(path, own, "model.tokenizer", "tokenizer", f"{own} and tokenizer.json")


def _check(path: str, file: str, key: str, what: str, files: str) -> None:
    folder = Path(path).expanduser()
    if (folder / file).is_file():
        return
    if folder.exists() or not may_be_on_hub(path):
        raise InputError(
            f"{key}: there is no {what} in {path} (a folder with {files}, or a Hugging Face name)"
        )
    if (offline := why_offline()) and not _is_cached(path, file):
        raise InputError(
            f"{key}: there is no folder {path}, {offline}, and the Hugging Face cache on "
            f"this machine has no such {what}"
        )


def check_data(path: str) -> None:
    """See that a path of data is a file or folder, or a name that the Hub may have.

    Raises:
        InputError: when it is neither.
    """
    file = Path(path).expanduser()
    if file.is_dir() or (file.exists() and file.suffix in DATA_FILES):
        return
    if file.suffix in DATA_FILES:
        raise InputError(f"there is no data file {path}")
    kinds = f"{', '.join(DATA_FILES)}, a folder of a dataset, or a Hugging Face name"
    if file.exists():
        raise InputError(f"data: {path} is no kind of file that can be read ({kinds})")
    if not may_be_on_hub(path):
        raise InputError(f"data: there is no {path} ({kinds})")


def may_be_on_hub(name: str) -> bool:
    """Whether it is written as name or organisation/name."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def why_offline() -> str:
    """Why only the Hub's cache on this machine is looked into, in half a sentence; "" if it is not.

    Where the Hub does not answer, this process and those that it starts ask it no more.
    """
    if any(os.environ.get(variable, "").upper() in _TRUE for variable in _OFFLINE):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if _answers(endpoint):
        return ""
    _go_offline()
    return f"{endpoint} cannot be reached"


def _is_cached(name: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache  # a third of a second to import

    return isinstance(try_to_load_from_cache(name, file), str)


def _answers(url: str) -> bool:
    """Whether a server answers at all; the proxies of the environment are used."""
    answers: list[bool] = []

    def look() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=_SECONDS).close()
        except HTTPError:
            answers.append(True)
        except URLError as error:
            # A certificate that only the Hub's own client trusts is an answer too.
            answers.append("CERTIFICATE" in str(error.reason).upper())
        except OSError:
            answers.append(False)
        else:
            answers.append(True)

    # Looking up an address has no deadline of its own.
    thread = threading.Thread(target=look, daemon=True, name="turnwise-hub")
    thread.start()
    thread.join(_SECONDS)
    return any(answers)


def _go_offline() -> None:
    """Let Hugging Face's libraries use their cache alone, those that are imported included."""
    os.environ[_OFFLINE[0]] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
