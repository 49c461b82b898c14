"""Logging: our lines to the terminal, and everything to files in the run folder's `logs/`.

    turnwise.log     all lines of this process: turnwise, vLLM, Ray and other libraries
    stacks/          one file per process, see `core.stacks`
    worker-0.log     one per actor: all output of the actor and its children
    ray/             link to the logs of Ray's own processes

Libraries configure Python's logging while they are imported: vLLM resets the levels of its loggers,
and other libraries reset the root logger's. So our handlers are on the logger `turnwise`, which no
library touches, and vLLM is kept from configuring anything. Only the command line replaces handlers
of the root logger; a program that calls us keeps its own.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from turnwise.errors import visible

_LEVEL, _FILE = "TURNWISE_LOG_LEVEL", "TURNWISE_LOG_FILE"
_FORMAT = "%(levelname)s %(name)s: %(message)s"
FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_OURS = logging.getLogger("turnwise")
_CHATTER = ("vllm", "ray")  # names of the loggers whose lines go only to the file
_on_terminal = False
"""Whether this process is the command line, which prints our lines and libraries' warnings."""
_files: list[logging.Handler] = []  # files of the runs that are open
_to_program: list[tuple[logging.Logger, logging.Handler]] = []
"""Handlers that print lines or pass them to the program's handlers while runs are open."""
_before: list[tuple[logging.Logger, list[logging.Handler], bool, int]] = []
"""State of our, vLLM's and Ray's loggers before the first run was opened."""
_changing = threading.Lock()


class VisibleFormatter(logging.Formatter):
    """Escapes control characters in lines, because a line may quote an agent or a model."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def to_terminal(level: str = "warning") -> None:
    """Print our lines of at least a level, and other libraries' warnings, on standard error. Only
    for the command line, because it replaces the handlers of the root logger."""
    global _on_terminal
    _on_terminal = True
    _OURS.handlers = [_terminal(level)]
    _OURS.setLevel(level.upper())
    _OURS.propagate = False
    logging.getLogger().handlers = [_terminal(level, others=True)]
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU has no Triton


def _terminal(level: str, others: bool = False) -> logging.Handler:
    """Return a handler that prints lines; with `others`, only warnings, without lines of vLLM or
    Ray."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(_FORMAT))
    handler.setLevel(level.upper())
    if others:
        handler.setLevel(max(logging.WARNING, handler.level))
        handler.addFilter(lambda record: record.name.partition(".")[0] not in _CHATTER)
    return handler


@contextmanager
def open_logs(folder: Path, level: str) -> Iterator[None]:
    """During a `with` block, write all lines of this process to a run's folder, too, and set our
    level; then restore the program's own logging. vLLM must be imported in the block."""
    if _on_terminal:
        to_terminal(level)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    path = folder / "logs" / "turnwise.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    except OSError as error:
        _OURS.warning("no logs can be written to %s: %s", path.parent, error)
        yield
        return
    register_stacks(str(path))
    handler.setFormatter(VisibleFormatter(FILE_FORMAT))
    handler.setLevel(_file_level(level))
    root, others = logging.getLogger(), [logging.getLogger(name) for name in _CHATTER]
    with _changing:
        if not _files:  # this is the first run
            ours = (_OURS, *others)
            _before[:] = [(one, [*one.handlers], one.propagate, one.level) for one in ours]
            for logger in others:
                logger.handlers = []
            if not _on_terminal:
                _to_program.append((_OURS, _ToProgram(level.upper())))
                if not root.handlers:  # Python prints warnings then, but not once root has our file
                    _to_program.append((root, _terminal(level, others=True)))
                for logger, printer in _to_program:
                    logger.addHandler(printer)
                _OURS.propagate = False
        _files.append(handler)
        for logger in (_OURS, root, *others):
            logger.addHandler(handler)
        _OURS.setLevel(min(logging.getLevelName(level.upper()), handler.level))
        for name in _CHATTER:
            quiet(name)
    try:
        yield
    finally:
        if not _on_terminal:  # otherwise the process ends, and libraries may still have lines
            with _changing:
                _files.remove(handler)
                for logger in (_OURS, root, *others):
                    logger.removeHandler(handler)
                if not _files:  # this was the last run
                    for logger, printer in _to_program:
                        logger.removeHandler(printer)
                    _to_program.clear()
                    for logger, handlers, propagate, before in _before:
                        logger.handlers = list(dict.fromkeys([*handlers, *logger.handlers]))
                        logger.propagate = propagate
                        logger.setLevel(before)
            handler.close()


class _ToProgram(logging.Handler):
    """Passes our lines of at least its level to the handlers of the program's root logger, or
    prints them if that logger has no handlers. The root logger's own level does not apply to lines
    of loggers below it."""

    def __init__(self, level: str) -> None:
        super().__init__(level)
        self._terminal = _terminal(level)

    def emit(self, record: logging.LogRecord) -> None:
        ours = [*_files, *(handler for _, handler in _to_program)]
        theirs = [each for each in logging.getLogger().handlers if each not in ours]
        for handler in theirs or [self._terminal]:
            if record.levelno >= handler.level:
                handler.handle(record)


def quiet(name: str) -> int:
    """Send a library's lines only to the log file, if there is one; return the level of these
    lines. Call it again after importing the library, which may add its own handlers."""
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


def environment(folder: Path, level: str, name: str) -> dict[str, str]:
    """Return the environment variables of an actor that writes to `name`.log in a run's folder;
    see `redirect_output`."""
    of_vllm = logging.getLevelName(_file_level(level))
    return {
        _LEVEL: level,
        _FILE: str((folder / "logs" / f"{name}.log").absolute()),
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", of_vllm),
    }


def redirect_output() -> None:
    """Redirect the output of this actor's process and its children to the actor's file, if it was
    started with `environment`."""
    if not (log := os.environ.get(_FILE)):
        return
    path = Path(log)
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
    register_stacks(log)
    handler = logging.StreamHandler(os.fdopen(2, "w", buffering=1, closefd=False))
    handler.setFormatter(VisibleFormatter(FILE_FORMAT))
    # In a fork, vLLM is already imported, with the levels of the original process.
    for logger in (_OURS, logging.getLogger("vllm")):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(_file_level(os.environ.get(_LEVEL, "warning")))


def register_stacks(log: str | None = None) -> None:
    """Make a process write its stacks on request, under the name of its log; None uses the log of
    the actor that started this process without forking."""
    if log := log or os.environ.get(_FILE):
        from turnwise.core import stacks  # imported here because it works only on Linux

        stacks.register(Path(log).parent.parent, Path(log).stem)


def _file_level(level: str) -> int:
    return logging.DEBUG if level == "debug" else logging.INFO
