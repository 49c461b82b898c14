"""An agent loop: it makes one trajectory out of turns, and nothing else.

`context` samples and records every token; the loop decides what the model sees next.
"""

from turnwise.rollouts import Environment, RolloutContext


class CountedTurns:
    """One call of a tool per turn; each result says how many turns are left."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory, tools = context.trajectory, context.toolbox.schemas
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages, tools=tools)
        for left in reversed(range(context.rollout.max_turns)):
            completion = await context.sample(prompt)
            if completion is None:  # the context is full
                return
            text = context.template.decode(completion.token_ids)
            trajectory.messages.append({"role": "assistant", "content": text})
            calls = context.tool_parser.parse(text, tools).calls
            if not calls:
                trajectory.status = "completed"
                return
            result = await context.toolbox.call(calls[0].name, calls[0].arguments)
            answer = {"role": "tool", "content": f"{result.text} ({left} turns left)"}
            trajectory.messages.append(answer)
            prompt = await context.next_prompt(prompt, completion.token_ids, [answer], tools=tools)
        trajectory.status = "max_turns"
