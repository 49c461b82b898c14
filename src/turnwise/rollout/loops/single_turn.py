"""One question, one answer, no tools."""

from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment


class SingleTurnLoop:
    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory = context.trajectory
        trajectory.messages = [dict(message) for message in context.problem]
        completion = await context.sample(await self.prompt(context))
        if completion is None:
            return
        text = context.template.decode(completion.token_ids)
        trajectory.messages.append({"role": "assistant", "content": text})
        trajectory.status = "length" if completion.finish_reason == "length" else "completed"

    async def prompt(self, context: RolloutContext) -> list[int]:
        """The ids that the engine is asked with."""
        return await context.first_prompt(context.trajectory.messages)
