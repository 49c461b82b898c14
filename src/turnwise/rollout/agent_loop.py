"""What an agent loop is, and what it works with: one coroutine that makes one trajectory."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.config import RolloutConfig, SamplingConfig
from turnwise.engine.protocol import Completion, Engine
from turnwise.errors import TrajectoryError
from turnwise.rollout.environment import Environment
from turnwise.rollout.tool_parser import ToolParser
from turnwise.rollout.tools import Toolbox
from turnwise.trajectory import ChatTemplate, Trajectory


@dataclass(slots=True)
class RolloutContext:
    """One trajectory in the making, and everything that its loop may use."""

    trajectory: Trajectory
    engine: Engine
    template: ChatTemplate
    tool_parser: ToolParser
    toolbox: Toolbox
    rollout: RolloutConfig
    sampling: SamplingConfig
    max_length: int
    request_id: str
    seed: int | None = None
    """Where the run is deterministic: the seed that each turn's own is derived from."""

    async def sample(
        self, prompt_token_ids: Sequence[int], *, stop: Sequence[str] = ()
    ) -> Completion | None:
        """One turn: sample a completion and record it; None when the context has no room.

        Raises:
            TrajectoryError: when the engine aborted the request.
        """
        turn = len(self.trajectory.turns)
        room = self.max_length - len(prompt_token_ids)
        if room <= 0:
            self.trajectory.status = "context_full"
            return None
        sampling = self.sampling
        max_tokens = min(sampling.max_tokens, room)
        if stop or max_tokens < sampling.max_tokens:
            changes: dict[str, Any] = {
                "stop": [*sampling.stop, *stop],
                "max_tokens": max_tokens,
                "min_tokens": min(sampling.min_tokens, max_tokens),
            }
            sampling = sampling.model_copy(update=changes)
        completion = await self.engine.generate(
            prompt_token_ids,
            sampling,
            f"{self.request_id}-{turn}",
            None if self.seed is None else stable_seed(self.seed, turn),
        )
        if completion.finish_reason == "abort":
            raise TrajectoryError("engine_abort", f"{self.request_id} was aborted by the engine")
        self.trajectory.add_turn(
            prompt_token_ids,
            completion.token_ids,
            completion.logprobs,
            completion.weight_versions,
            completion.finish_reason,
            completion.prompt_logprobs,
        )
        return completion

    def count(self, event: str) -> None:
        self.trajectory.events[event] += 1


class AgentLoop(Protocol):
    """Makes one trajectory: records turns in `context.trajectory`, and sets its status.

    Chosen in the configuration by a short name or as `package.module:Class`; the class is built
    without arguments, once for all trajectories.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None: ...


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but its parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
