"""Built-in agent loops, by name."""

from turnwise.config import LOOP_NAMES
from turnwise.rollouts.agent_loop import AgentLoop
from turnwise.rollouts.environment import load_object
from turnwise.rollouts.loops.agent import (
    ChatSchedulerLoop,
    HttpAgentLoop,
    import_chat_scheduler,
)
from turnwise.rollouts.loops.interleaved import InterleavedLoop
from turnwise.rollouts.loops.self_play import SelfPlayLoop
from turnwise.rollouts.loops.tool_calling import SingleTurnLoop, ToolCallingLoop

_TYPES: tuple[type[AgentLoop], ...] = (
    ToolCallingLoop,
    SingleTurnLoop,
    InterleavedLoop,
    HttpAgentLoop,
    ChatSchedulerLoop,
    SelfPlayLoop,
)
__all__ = ["LOOPS", "import_chat_scheduler", "load_loop", "loop_name"]

LOOPS: dict[str, type[AgentLoop]] = dict(zip(LOOP_NAMES, _TYPES, strict=True))


def load_loop(name: str) -> AgentLoop:
    """Build the loop with a short name, or of the class `package.module:Class`.

    Raises:
        InputError: when the class cannot be imported.
    """
    loop: AgentLoop = (LOOPS.get(name) or load_object(name, "rollout.loop"))()
    return loop


def loop_name(loop: AgentLoop) -> str:
    """Return the short name of a loop, or `package.module:Class`."""
    kind = type(loop)
    return next(
        (name for name, known in LOOPS.items() if known is kind),
        f"{kind.__module__}:{kind.__qualname__}",
    )
