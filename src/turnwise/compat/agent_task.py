"""The environment of an agent that brings its own task and its own reward."""

from turnwise.errors import TrajectoryError
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Trajectory


class AgentTask(Environment):
    """A row that means something to the agent only, such as the number of a task it holds.

    The reward is the one that the agent reports, so `rollout.agent_rewards` must be true. A field
    `prompt` of the row, if there is one, is the problem in logs and pictures.

    Example:
        environment: turnwise:AgentTask
        rollout: {loop: agent, agent: "http://127.0.0.1:9000/run", agent_rewards: true}
    """

    def __init__(self, row: Row) -> None:
        self.problem = row.get("prompt") or "The task is the agent's."

    def reward(self, trajectory: Trajectory) -> float:
        """Fail: this runs only if the agent reported no reward."""
        raise TrajectoryError(
            "reward_error", "the agent reported no reward, or rollout.agent_rewards is false"
        )
