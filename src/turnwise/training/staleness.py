"""The oldest version whose tokens are trained: `training.max_staleness` counts steps.

A step makes up to `training.updates_per_step` versions: fewer if it has few trajectories or an
update is skipped, and none while only the value model learns.
"""

from collections import deque
from collections.abc import Sequence

from turnwise.config import Config


def oldest_version(config: Config, version: int) -> int:
    """Return the oldest version whose tokens are trained, if every step made all its updates.

    Args:
        version: Optimizer steps that the trainer has taken.
    """
    return version - config.training.max_staleness * config.training.updates_per_step


class RecentVersions:
    """The weight versions at the end of the last steps, the oldest first.

    Example:
        >>> versions = RecentVersions(config)  # max_staleness 1, updates_per_step 4
        >>> versions.step_ended(4)
        >>> versions.step_ended(5)  # it had one trajectory only
        >>> versions.oldest
        4
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._versions = deque([0], maxlen=config.training.max_staleness + 1)

    def step_ended(self, version: int) -> None:
        """Note the version after a training step."""
        self._versions.append(version)

    @property
    def oldest(self) -> int:
        """The oldest version whose tokens the next step trains."""
        return self._versions[0]

    def state(self) -> list[int]:
        """Return the versions for `restore`."""
        return list(self._versions)

    def restore(self, state: Sequence[int] | None, version: int) -> None:
        """Continue from a checkpoint.

        Args:
            state: None for a checkpoint without it.
            version: Optimizer steps that the checkpoint contains.
        """
        known = [oldest_version(self._config, version), version] if state is None else state
        self._versions = deque(known, maxlen=self._config.training.max_staleness + 1)
