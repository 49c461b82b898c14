"""The exceptions of turnwise, all derived from `TurnwiseError`, and helpers to describe errors.

Each message is one sentence for the user. It states the mistake, or the component that did not
answer, and how to fix this. The command line prints it and exits with status 2, without a
traceback.
"""

import inspect
import os
import re
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NUMBER = re.compile(r"(\.py:\d+)|0x[0-9a-f]+|\b[0-9a-f]{8,}\b|-?\d+(?:\.\d+)?")
_LONGEST = 2000
"""Maximum length of an error's own message, in characters."""
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(
    path + os.sep for key in ("purelib", "platlib") if (path := sysconfig.get_path(key))
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep


class TurnwiseError(Exception):
    """Base class of all errors that turnwise raises deliberately.

    Example:
        try:
            turnwise.train(config="config.yaml")
        except turnwise.TurnwiseError as error:
            print(error)  # one sentence
    """


class InputError(TurnwiseError):
    """User input (configuration, data, tool, model, machine) that cannot be used."""


class CompleteError(InputError):
    """A run that should be resumed is complete already; the command line prints this and exits with
    status 0, so that launchers do not repeat the command."""


class DeadlineError(TurnwiseError):
    """A deadline passed; the message names the part that did not answer, and the deadline."""


class EngineError(TurnwiseError):
    """An inference engine failed or died."""


class TrainerError(TurnwiseError):
    """A rank of the trainer failed or died."""


class WeightUpdateError(TurnwiseError):
    """A weight update failed; the message names the tensor or the largest difference."""


class TrajectoryError(TurnwiseError):
    """One trajectory failed; it is counted under `reason`, and the run continues.

    The message may quote an agent, a tool or a model; `visible` escapes its control characters.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(visible(message))
        self.reason = reason

    def __reduce__(self) -> tuple[type["TrajectoryError"], tuple[str, str]]:
        return type(self), (self.reason, str(self))  # for unpickling in other processes


class StepError(TurnwiseError):
    """A training step cannot continue, because too many of its trajectories failed."""


class ExactnessError(TurnwiseError):
    """Tokens to train on differ from the sampled tokens; the message names the first difference."""


def where_in_user_code(error: BaseException) -> str:
    """Return the last line of user code in an error's traceback, as `file:line`.

    If the traceback has no user code, return its last line in an installed package; "" if it only
    has lines of turnwise and Python.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno) for frame in frames]
    candidates = [line for line in lines if in_user_code(line[0])] or [
        line for line in lines if line[0].startswith(_LIBRARIES)
    ]
    if not candidates:
        return ""
    file, number = candidates[-1]
    return f"{short_path(file)}:{number}"


def defined_at(what: object) -> str:
    """Return the place where a function or class of user code is defined, as `file:line`; "" if the
    place is unknown, or is not in user code."""
    file, line = None, 0
    if isinstance(what, type):
        with suppress(OSError, TypeError):  # a class may have no source
            file, line = inspect.getsourcefile(what), inspect.getsourcelines(what)[1]
    elif code := getattr(getattr(what, "__func__", what), "__code__", None):
        file, line = code.co_filename, code.co_firstlineno
    return f"{short_path(file)}:{line}" if file and in_user_code(file) else ""


def user_traceback(error: BaseException) -> str:
    """Return the frames of an error's traceback from the first frame in user code on, followed by
    the earlier frames, which called the user code."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((n for n, frame in enumerate(frames) if in_user_code(frame.filename)), 0)
    text = "".join(traceback.format_list(frames[first:]))
    if first:
        text += "  called by:\n" + "".join(traceback.format_list(frames[:first]))
    return text


def in_user_code(filename: str) -> bool:
    """Return whether a source file belongs to neither turnwise, Python nor an installed package."""
    return not filename.startswith(("<", _OWN, *_LIBRARIES, _STANDARD))


def short_path(path: str) -> str:
    """Return a path below the working directory as a relative path; return other paths
    unchanged."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def describe_error(error: BaseException) -> str:
    """Return an error of user code as `Type: message (file:line)`; see `where_in_user_code`."""
    message = message_of(error, _LONGEST)
    where = where_in_user_code(error)
    kind = type(error).__name__
    return (f"{kind}: {message}" if message else kind) + (f" ({where})" if where else "")


def visible(text: str) -> str:
    r"""Return text with control characters as escapes, except line breaks and tabs.

    Texts of agents, tools and models go through this before they reach a terminal or a log, so that
    they can neither control the terminal nor hide a line.

    Example:
        >>> visible("\x1b[2Jall is well")
        '\\x1b[2Jall is well'
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def without_numbers(text: str) -> str:
    """Replace numbers and ids in a message by #, so that equal causes have equal texts.

    Line numbers of Python files are kept.

    Example:
        >>> without_numbers("rows.jsonl:7: 0x7f3a gave 1.5 (env.py:12)")
        'rows.jsonl:#: # gave # (env.py:12)'
    """
    return _NUMBER.sub(lambda found: found[1] or "#", text)


def ordinary_error(error: BaseException) -> Exception:
    """Return the error, or a RuntimeError in its place if the error would end more than the call.

    A RuntimeError replaces SystemExit, KeyboardInterrupt and CancelledError. It also replaces
    StopIteration, because a future cannot hold a StopIteration.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = f"raised {type(error).__name__}({message_of(error, 200)})"
    return RuntimeError(text).with_traceback(error.__traceback__)


def message_of(error: BaseException, longest: int) -> str:
    """Return the first `longest` characters of an error's message, even if its `__str__` fails."""
    try:
        message = str(error)
    except Exception as failure:
        return f"(its message cannot be read: __str__ raised {type(failure).__name__})"
    return message if len(message) <= longest else f"{message[:longest]}…"


def text_of(error: BaseException) -> str:
    """Return an error's message, or the name of the error's type if the message is empty."""
    return message_of(error, _LONGEST).strip() or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    Use it for errors of libraries, because their messages often contain advice and stack traces.

    Example:
        except OSError as error:
            raise InputError(f"{path} cannot be loaded: {first_line(error)}") from error
    """
    return text_of(error).partition("\n")[0].rstrip()


@contextmanager
def translate_unwritable(path: Path) -> Iterator[None]:
    """Translate an operating-system error, such as a full disk, into a one-sentence
    TurnwiseError."""
    try:
        yield
    except OSError as error:
        raise TurnwiseError(f"{path} cannot be written: {error.strerror or error}") from error
