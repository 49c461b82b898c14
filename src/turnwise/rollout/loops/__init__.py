"""The agent loops that come with turnwise, by name."""

from turnwise.rollout.agent_loop import AgentLoop
from turnwise.rollout.environment import load_object
from turnwise.rollout.loops.agent import HttpAgentLoop
from turnwise.rollout.loops.interleaved import InterleavedLoop
from turnwise.rollout.loops.single_turn import SingleTurnLoop
from turnwise.rollout.loops.tool_calling import ToolCallingLoop

LOOPS: dict[str, type[AgentLoop]] = {
    "tool_calling": ToolCallingLoop,
    "single_turn": SingleTurnLoop,
    "interleaved": InterleavedLoop,
    "agent": HttpAgentLoop,
}


def load_loop(name: str) -> AgentLoop:
    """The loop of a short name or of `package.module:Class`."""
    loop: AgentLoop = (LOOPS.get(name) or load_object(name, "rollout.loop"))()
    return loop
