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
from turnwise.rollouts.loops.tool_calling import (
    SelfPlayLoop,
    SingleTurnLoop,
    ToolCallingLoop,
)

__all__ = ["LOOPS", "import_chat_scheduler", "load_loop", "loop_name"]

_TYPES: tuple[type[AgentLoop], ...] = (
    *(ToolCallingLoop, SingleTurnLoop, InterleavedLoop),
    *(HttpAgentLoop, ChatSchedulerLoop, SelfPlayLoop),
)
LOOPS = dict(zip(LOOP_NAMES, _TYPES, strict=True))


def load_loop(name: str) -> AgentLoop:
    """Build the loop with a short name, or of the class `package.module:Class`."""
    loop: AgentLoop = (LOOPS.get(name) or load_object(name, "rollout.loop"))()
    return loop


def loop_name(loop: AgentLoop) -> str:
    """Return the short name of a loop, or `package.module:Class`."""
    kind = type(loop)
    path = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, known in LOOPS.items() if known is kind), path)
