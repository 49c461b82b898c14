"""The exceptions of turnwise: one small tree under `TurnwiseError`.

Each message is one sentence for a person: what was wrong or who was waited for, and the fix.
The command line prints it and exits with 2; it never shows a traceback for one of these.
"""


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


class StepError(TurnwiseError):
    """A training step cannot be made, because most of its trajectories failed."""


class ExactnessError(TurnwiseError):
    """What was about to be trained is not what was sampled; the message names the first token."""
