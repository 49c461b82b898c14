"""The base class of a pipeline's modules."""

from typing import TYPE_CHECKING

from turnwise.config import Config
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.modules.pipeline import Pipeline


class Module:
    """A model of a pipeline.

    Args:
        name: For errors; different in each module of a pipeline.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pipeline: Pipeline | None = None

    def join(self, pipeline: "Pipeline") -> None:
        """Called by the pipeline, before `setup`."""
        self._pipeline = pipeline

    def setup(self) -> None:
        """Get ready; called once, inside the running pipeline."""

    @property
    def pipeline(self) -> "Pipeline":
        """The running pipeline.

        Raises:
            InputError: when the module is in none.
        """
        if self._pipeline is None:
            raise InputError(
                f"the module {self.name} is in no running pipeline: give it to Pipeline(...) and "
                "use it inside its with block"
            )
        return self._pipeline

    @property
    def config(self) -> Config:
        """The pipeline's configuration, this module's file included."""
        return self.pipeline.config
