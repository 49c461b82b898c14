"""The exceptions of turnwise: one small tree under `TurnwiseError`.

Each message is one sentence for a person: what was wrong or who was waited for, and the fix.
The command line prints it and exits with 2; it never shows a traceback for one of these.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 2000
"""Characters of an error's own message that are kept."""
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(
    path + os.sep for key in ("purelib", "platlib") if (path := sysconfig.get_path(key))
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep


class TurnwiseError(Exception):
    """The base of everything that turnwise raises on purpose."""


class InputError(TurnwiseError):
    """What the user gave (configuration, data, tool, model, machine) cannot be used."""


class DeadlineError(TurnwiseError):
    """A wait ended without its answer; the message names who was waited for and how long."""


class EngineError(TurnwiseError):
    """An inference engine failed or died."""


class TrainerError(TurnwiseError):
    """A rank of the trainer failed or died."""


class WeightUpdateError(TurnwiseError):
    """Weights did not arrive whole; the message names the tensor or the largest difference."""


class TrajectoryError(TurnwiseError):
    """One trajectory cannot go on; it is counted under `reason` and the run goes on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["TrajectoryError"], tuple[str, str]]:
        return type(self), (self.reason, str(self))  # or no other process can read it


class StepError(TurnwiseError):
    """A training step cannot be made, because most of its trajectories failed."""


class ExactnessError(TurnwiseError):
    """What was about to be trained is not what was sampled; the message names the first token."""


def where_in_user_code(error: BaseException) -> str:
    """The last line of the user's own code that an error passed through, as `file:line`.

    A line in an installed package counts where there is none outside; "" when the error came
    from turnwise or Python alone.
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


def in_user_code(filename: str) -> bool:
    """Whether a source file is neither turnwise's, nor Python's, nor an installed package's."""
    return not filename.startswith(("<", _OWN, *_LIBRARIES, _STANDARD))


def short_path(path: str) -> str:
    """Relative to the working directory where it lies below that."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def describe_error(error: BaseException) -> str:
    """An error of user code as `Type: message (file:line)`; see `where_in_user_code`."""
    message = message_of(error, _LONGEST)
    where = where_in_user_code(error)
    kind = type(error).__name__
    return (f"{kind}: {message}" if message else kind) + (f" ({where})" if where else "")


def ordinary_error(error: BaseException) -> Exception:
    """The error, or one in its place if raising it would end more than the call: SystemExit,
    KeyboardInterrupt, CancelledError, and StopIteration, which no future takes."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = f"raised {type(error).__name__}({message_of(error, 200)})"
    return RuntimeError(text).with_traceback(error.__traceback__)


def message_of(error: BaseException, longest: int) -> str:
    """The beginning of an error's message, whatever its `__str__` does."""
    try:
        message = str(error)
    except Exception as failure:
        return f"(its message cannot be read: __str__ raised {type(failure).__name__})"
    return message if len(message) <= longest else f"{message[:longest]}…"


@contextmanager
def told_when_unwritable(path: Path) -> Iterator[None]:
    """Turn what the operating system raises, such as on a full disk, into one sentence."""
    try:
        yield
    except OSError as error:
        raise TurnwiseError(f"{path} cannot be written: {error.strerror or error}") from error
