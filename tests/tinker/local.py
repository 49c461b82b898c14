"""A trainer of one rank in this process."""

from pathlib import Path
from typing import Any

from turnwise.config import Config
from turnwise.training.rank import TrainerRank
from turnwise.training.trainer_group import TrainerGroup


class _Here:
    """A rank in this process, in the place of its actor's handle."""

    name = "policy rank 0"

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank

    async def call(self, kind: str, method: str, *arguments: Any, **deadline: Any) -> Any:
        return getattr(self._rank, method)(*arguments)


class LocalTrainer(TrainerGroup):
    def __init__(self, config: Config, folder: Path) -> None:
        self.rank = TrainerRank(config, folder)
        here: Any = _Here(self.rank)
        super().__init__(config, [here])
        self.layouts = self.rank.layouts
