"""One question, one answer, no tools."""

from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment


class SingleTurnLoop:
    """Samples one answer to the problem."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Sample the answer and record it."""
        trajectory = context.trajectory
        trajectory.messages = [dict(message) for message in context.problem]
        completion = await context.sample(await self.prompt(context))
        if completion is None:
            return
        text = context.template.decode(completion.token_ids)
        trajectory.messages.append({"role": "assistant", "content": text})
        trajectory.status = "length" if completion.finish_reason == "length" else "completed"

    async def prompt(self, context: RolloutContext) -> list[int]:
        """Return the ids of the prompt."""
        return await context.first_prompt(context.trajectory.messages)
