"""Progress of a run, for a display or another observer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from turnwise.observe.metrics import StepMetrics

_Result = TypeVar("_Result")


class Progress(Protocol):
    """An observer of a run; `turnwise.run.display` shows it on a terminal."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Show a part of the start ("starting Ray") while it lasts; several may overlap."""
        ...

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase of `total` parts; 0 if they cannot be counted."""
        ...

    def advance(self) -> None:
        """Mark one part of the phase as done."""
        ...

    def step(self, metrics: "StepMetrics") -> None:
        """Show the metrics of a completed step, or (step 0) of the first evaluation."""
        ...

    def samples(self, samples: "Mapping[str, Sequence[Trajectory]]") -> None:
        """Show conversations of the step, by a label such as "best"."""
        ...

    def warn(self, text: str) -> None:
        """Show an urgent message; may be called from any thread."""
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str, total: int = 0) -> None: ...

    def advance(self) -> None: ...

    def step(self, metrics: "StepMetrics") -> None: ...

    def samples(self, samples: "Mapping[str, Sequence[Trajectory]]") -> None: ...

    def warn(self, text: str) -> None: ...


SILENT = Silent()


async def show_part(
    progress: Progress, name: str, work: Callable[[], Awaitable[_Result]]
) -> _Result:
    """Run a part of the start and show it while it lasts."""
    with progress.part(name):
        return await work()
