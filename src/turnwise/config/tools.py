"""The entries of `rollout.tools`: tools that a configuration adds to every environment's own."""

from pydantic import model_validator

from turnwise.config.base import Section


class ToolConfig(Section):
    """Tools from one source; exactly one key is set."""

    use: str | None = None
    """package.module:name of a function, a Tool, a toolset, or a class or function that makes a
    toolset for each trajectory."""

    @model_validator(mode="after")
    def _one_source(self) -> "ToolConfig":
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an entry of rollout.tools has exactly one of the keys {', '.join(names)}"
                + (f", not {' and '.join(given)}" if given else "")
            )
        return self
