"""The entries of `environments`: several environments that one run trains on."""

from pydantic import field_validator

from turnwise.config.base import PositiveFloat, Section, Tree
from turnwise.config.data import RowsConfig
from turnwise.config.rollout import known_loop
from turnwise.config.tools import ToolConfig


class EnvironmentConfig(Section):
    """One of several environments: its class, its rows, and its share of the groups.

    Example:
        EnvironmentConfig(environment="my_env:Shop", data={"path": "shop.jsonl"}, weight=2)
    """

    environment: str
    """As the key of the same name at the top."""
    environment_args: Tree = {}
    """As the key of the same name at the top."""
    data: RowsConfig
    """Rows: the keys of `data` that name them (path, eval_path, subset, split, eval_split, limit,
    eval_limit)."""
    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the other weights."""
    loop: str | None = None
    """Agent loop; null uses rollout.loop."""
    tools: list[ToolConfig] | None = None
    """Tools that are added to the environment's own, in place of rollout.tools; null uses those."""

    @field_validator("loop")
    @classmethod
    def _known_loop(cls, loop: str | None) -> str | None:
        return None if loop is None else known_loop(loop)
