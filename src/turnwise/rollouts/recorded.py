"""An engine that answers by what a run has stored, so that an agent loop repeats its trajectories.

The loop, the tools, the environment and the rewards are the run's own, and do everything again.
Where a prompt differs from the stored one, something outside of the model has changed, such as the
result of a tool.
"""

from collections.abc import AsyncGenerator, Callable, Mapping

from turnwise.engine.protocol import Chunk, Generator, Request
from turnwise.errors import EngineError
from turnwise.trajectory import Trajectory
from turnwise.trajectory.prompt import Prompt

_SHOWN = 12  # ids on each side of a difference


class RecordedEngine:
    """Answers each request of a trajectory by the stored turn that has the same prompt, or else by
    the first turn that was not asked for yet.

    Args:
        stored: Trajectories by the names that their requests begin with.
        decode: Makes the text of token ids, for differences.
        turns: Number of a trajectory's turns that are answered; None answers all.
        live: Engine that answers all further requests; None fails them.
    """

    def __init__(
        self,
        stored: Mapping[str, Trajectory],
        decode: Callable[[list[int]], str],
        turns: int | None = None,
        live: Generator | None = None,
    ) -> None:
        self.differences: dict[str, str] = {}
        """By name of a trajectory, how its first different prompt differs."""
        self._stored = stored
        self._decode = decode
        self._live = live
        self._left = {name: [*range(len(each.turns))][:turns] for name, each in stored.items()}

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        name = request.id.rpartition("-")[0]
        if name not in self._left and request.route.session != name:  # an agent's
            name = self._with_prompt(request.prompt) or name
        left = self._left.get(name)
        if left is None:
            raise EngineError(f"the run has not stored {name}, nor a turn with its prompt")
        trajectory = self._stored[name]
        if not left:
            if self._live is None:
                count = len(trajectory.turns)
                self.differences.setdefault(name, f"a turn follows the {count} stored turns")
                raise EngineError(f"{name} asks for turn {count}, which the run has not stored")
            async for chunk in self._live.stream(request):
                yield chunk
            return
        same = (index for index in left if trajectory.prompt(index) == request.prompt)
        if (index := next(same, None)) is None:
            index = left[0]
            how = self._difference(trajectory.prompt(index), request.prompt)
            self.differences.setdefault(name, f"prompt of turn {index}: {how}")
        left.remove(index)
        turn = trajectory.turns[index]
        yield Chunk(
            turn.completion_token_ids,
            turn.logprobs,
            turn.weight_versions,
            "length" if turn.finish_reason == "length" else "stop",
            allowed=turn.allowed,
        )

    def _with_prompt(self, prompt: Prompt) -> str | None:
        """Return the name of a trajectory that has an open turn with a prompt. The requests of
        agents, which know nothing of their trajectories' names, are found so."""
        for name, left in self._left.items():
            if any(self._stored[name].prompt(index) == prompt for index in left):
                return name
        return None

    def _difference(self, stored: Prompt, now: Prompt) -> str:
        start = stored.common_prefix(now)
        before, after = (
            self._decode(each.tolist()[start : start + _SHOWN]) for each in (stored, now)
        )
        return f"from token {start} on, {before!r} is {after!r} now"
