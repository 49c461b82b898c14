"""Checks of the sources of models and data: this disk, the Hugging Face Hub, or its cache.

Without a network, Hugging Face's own libraries retry for half a minute; here one request of at most
`_SECONDS` decides whether they use the Hub or only its cache.
"""

import difflib
import glob
import os
import re
import sys
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from turnwise.config.data import PACKAGED_MODELS
from turnwise.core.aio import call_within
from turnwise.core.gguf import find_gguf, resolve_model
from turnwise.errors import InputError

DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # suffixes of the names of data files
PACKED = ".gz"  # suffix after one of these, if gzip has compressed the file
_MODEL_FILES = ("config.json", "adapter_config.json")  # a model's folder has one of them
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")  # suffixes of the names of configurations
WORKER = "worker:"
"""Beginning of a `data.path` or `rollout.agent` that is the command of an agent's worker."""
ENVIRONMENT = "environment"  # the `data.path` for rows that the environment makes
_NAME = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_SECONDS = 3.0
_TRUE = ("1", "ON", "YES", "TRUE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_model(path: str, key: str = "model.path") -> None:
    """Check that a key names a model's folder or GGUF file, or a model that the Hub may have; a
    GGUF file is converted here, once, before other processes need it."""
    files = "config.json, weights and tokenizer, a GGUF file"
    _check(path, "config.json", key, "model", files, gguf=True)


def stands_for_model(text: str) -> bool:
    """Return whether an argument, which may also be a file of another kind, means a model: a folder
    of a model or an adapter, a GGUF file, or organisation/name if no such file exists."""
    place = Path(text).expanduser()
    if find_gguf(text) is not None or any((place / name).is_file() for name in _MODEL_FILES):
        return True
    is_file = place.exists() or place.suffix in _CONFIG_SUFFIXES
    return "/" in text and not is_file and may_be_on_hub(text)


def check_tokenizer(path: str) -> None:
    """Check that `model.tokenizer` names a tokenizer, as `check_model` does for models."""
    own = "tokenizer_config.json"
    _check(path, own, "model.tokenizer", "tokenizer", f"{own} and tokenizer.json", gguf=True)


def check_adapter(path: str, key: str) -> None:
    """Check that a key names a LoRA adapter's folder, or an adapter that the Hub may have."""
    own = "adapter_config.json"
    _check(path, own, key, "LoRA adapter", f"{own} and adapter_model.safetensors")


def _check(path: str, file: str, key: str, what: str, files: str, gguf: bool = False) -> None:
    if gguf and find_gguf(path) is not None:
        resolve_model(path, key)
        return
    folder = Path(path).expanduser()
    if (folder / file).is_file():
        return
    close = difflib.get_close_matches(path, PACKAGED_MODELS, 1)
    hint = f"; did you mean {close[0]}?" if close and what == "model" else ""
    if folder.exists() or not may_be_on_hub(path):
        raise InputError(
            f"{key}: there is no {what} in {path} (a folder with {files}, or a Hugging Face name)"
        )
    if offline := why_offline():
        from huggingface_hub import try_to_load_from_cache  # a third of a second to import

        if not isinstance(try_to_load_from_cache(path, file), str):
            raise InputError(
                f"{key}: there is no folder {path}, {offline}, and the Hugging Face cache on "
                f"this machine has no such {what}{hint}"
            )


def check_data(path: str, key: str = "data") -> None:
    """Check that a path of data, the value of `key`, is a file or folder, a name that the Hub may
    have, a worker, or the environment's own rows."""
    if path.startswith(WORKER) or path == ENVIRONMENT:
        return
    file = Path(path).expanduser()
    if file.is_dir() or (file.exists() and data_suffix(file)) or data_files(path):
        return
    if glob.has_magic(path) and not file.exists():
        raise InputError(f"{key}: no data file matches {path} ({', '.join(DATA_FILES)}, or .gz)")
    if data_suffix(file):
        where = "" if file.is_absolute() else f" in {Path.cwd()}, where the command runs"
        raise InputError(f"{key}: there is no data file {path}{where}")
    kinds = f"{', '.join(DATA_FILES)}, a folder of a dataset, or a Hugging Face name"
    if file.exists():
        raise InputError(f"{key}: {path} is not a kind of file that can be read ({kinds})")
    if not may_be_on_hub(path):
        raise InputError(f"{key}: there is no {path} ({kinds})")


def data_suffix(file: Path) -> str:
    """Return the suffix of a data file, which gzip may have compressed; "" for any other file."""
    suffix = Path(file.stem).suffix if file.suffix == PACKED else file.suffix
    return suffix if suffix in DATA_FILES else ""


def data_files(path: str) -> list[Path]:
    """Return the data files that a pattern such as `data/*.jsonl` names, in the order of their
    paths; no files if the path is not a pattern, or if something with exactly this name exists."""
    pattern = os.path.expanduser(path)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return []
    found = map(Path, sorted(glob.glob(pattern, recursive=True)))
    return [file for file in found if data_suffix(file) and not file.is_dir()]


def may_be_on_hub(name: str) -> bool:
    """Return whether a string has the form name or organisation/name."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def why_offline() -> str:
    """Return, as a clause, why only the Hub's cache can be used; "" if the Hub answers. After one
    request without an answer, this process and its children do not try again."""
    if any(os.environ.get(variable, "").upper() in _TRUE for variable in _OFFLINE):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"

    def answers() -> bool:
        try:
            urlopen(Request(endpoint, method="HEAD"), timeout=_SECONDS).close()
        except HTTPError:
            return True
        except URLError as error:
            # An untrusted certificate is an answer too: the Hub's own client may trust it.
            return "CERTIFICATE" in str(error.reason).upper()
        except (OSError, HTTPException, ValueError):  # a broken answer, or no address
            return False
        return True

    with suppress(OSError):  # it is late: `urlopen` has no timeout for resolving a host's name
        if call_within(answers, _SECONDS):
            return ""
    # Let Hugging Face's libraries use only their cache, even libraries that are already imported.
    os.environ[_OFFLINE[0]] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return f"{endpoint} cannot be reached"
