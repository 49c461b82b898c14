"""Logging: our lines to the terminal, and everything to files in the run folder's `logs/`.

    turnwise.log     all lines of this process: turnwise, vLLM, Ray and other libraries
    stacks/          one file per process, see `core.stacks`
    worker-0.log     one per actor: all output of the actor and its children
    ray/             link to the logs of Ray's own processes

Libraries configure Python's logging while they are imported: vLLM resets the levels of its
loggers, others the root's. So our handlers are on the logger `turnwise`, which none of them
touches, and vLLM is kept from configuring anything.
"""

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from turnwise.config import Config

_LEVEL, _FILE = "TURNWISE_LOG_LEVEL", "TURNWISE_LOG_FILE"
_FORMAT = "%(levelname)s %(name)s: %(message)s"
FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_OURS = logging.getLogger("turnwise")
_CHATTER = ("vllm", "ray")
"""Names of the loggers whose lines go only to the file."""


def to_terminal(level: str = "warning") -> None:
    """Print our lines of at least a level, and other libraries' warnings, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.setLevel(level.upper())
    _OURS.handlers = [handler]
    _OURS.setLevel(level.upper())
    _OURS.propagate = False
    others = logging.StreamHandler()
    others.setFormatter(logging.Formatter(_FORMAT))
    others.setLevel(max(logging.WARNING, handler.level))
    others.addFilter(lambda record: record.name.partition(".")[0] not in _CHATTER)
    logging.getLogger().handlers = [others]
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU has no Triton


def open_logs(config: Config) -> None:
    """Write all lines of this process to the run folder too, and set our level.

    Call it before vLLM is imported.
    """
    to_terminal(config.log_level)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    path = _folder(config) / "turnwise.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    except OSError as error:
        _OURS.warning("no logs can be written to %s: %s", path.parent, error)
        return
    _register_stacks(path)
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    handler.setLevel(_file_level(config.log_level))
    for logger in (_OURS, logging.getLogger()):
        logger.addHandler(handler)
    _OURS.setLevel(min(_OURS.level, handler.level))
    for name in _CHATTER:
        logging.getLogger(name).handlers = [handler]
        quiet(name)


def quiet(name: str) -> int:
    """Send a library's lines only to the log file, if there is one; return their level.

    Call it again after importing the library, which may add its own handlers.
    """
    logger = logging.getLogger(name)
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if not files:
        return logging.ERROR
    logger.handlers, logger.propagate = list(files), False
    logger.setLevel(files[0].level)
    return files[0].level


def link_ray(session: str) -> None:
    """Link the log folder of Ray's own processes into the run folder."""
    for handler in _OURS.handlers:
        if isinstance(handler, logging.FileHandler):
            link = Path(handler.baseFilename).with_name("ray")
            with suppress(OSError):
                link.unlink(missing_ok=True)
                link.symlink_to(Path(session) / "logs")


def environment(config: Config, name: str) -> dict[str, str]:
    """Return the environment variables of an actor that writes to `name`.log; see `follow`."""
    level = logging.getLevelName(_file_level(config.log_level))
    return {
        _LEVEL: config.log_level,
        _FILE: str((_folder(config) / f"{name}.log").absolute()),
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", level),
    }


def follow(environ: Mapping[str, str] = os.environ) -> None:
    """Redirect the output of this actor's process and its children to the actor's file.

    Does nothing if the actor was started without `environment`.
    """
    if not environ.get(_FILE):
        return
    path = Path(environ[_FILE])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # the output stays in Ray's own files
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    register_stacks(environ)
    handler = logging.StreamHandler(os.fdopen(2, "w", buffering=1, closefd=False))
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    # In a fork, vLLM is already imported, with the levels of the original process.
    for logger in (_OURS, logging.getLogger("vllm")):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(_file_level(environ.get(_LEVEL, "warning")))


def register_stacks(environ: Mapping[str, str] = os.environ) -> None:
    """Make a process that an actor started without forking write its stacks on request.

    Does nothing if the actor was started without `environment`.
    """
    if environ.get(_FILE):
        _register_stacks(Path(environ[_FILE]))


def _register_stacks(log: Path) -> None:
    from turnwise.core import stacks  # Linux alone has what it needs; logs are read elsewhere too

    stacks.register(log.parent.parent, log.stem)


def _file_level(level: str) -> int:
    return logging.DEBUG if level == "debug" else logging.INFO


def _folder(config: Config) -> Path:
    return Path(config.output_dir, config.name, "logs")
