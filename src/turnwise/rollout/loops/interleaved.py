"""Tools inside one assistant turn: generation stops at a closing tag, the result goes in, and on.

The result's tokens are part of the assistant's turn but were not sampled, so the response mask
leaves them out.
"""

from dataclasses import replace

from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment
from turnwise.rollout.loops.tool_calling import answer_calls


class InterleavedLoop:
    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory, template, rollout = context.trajectory, context.template, context.rollout
        tools = context.toolbox.schemas
        open_tag, close_tag = context.tool_parser.tags()
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages, tools=tools)
        answer = {"role": "assistant", "content": ""}
        trajectory.messages.append(answer)
        for turn in range(rollout.max_turns):
            completion = await context.sample(prompt, stop=[close_tag])
            if completion is None:
                return
            text = template.decode(completion.token_ids)
            answer["content"] += text
            start, end = text.rfind(open_tag), text.rfind(close_tag)
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            if end < 0 or completion.token_ids[-1] == template.tokenizer.eos_token_id:
                trajectory.status = "completed"
                return
            if turn + 1 < rollout.max_turns:
                call = text[max(start, 0) : end + len(close_tag)]
                parsed = context.tool_parser.parse(call, tools)
                if not parsed.calls:  # the closing tag says that a call was meant
                    parsed = replace(parsed, malformed=True)
                results = await answer_calls(parsed, context, turn)
                said = [str(message["content"]) for message in results]
                form = rollout.result_format
                answer["content"] += "".join(form.format(result=text) for text in said)
                shown = "".join(form.format(result=template.escape(text)) for text in said)
                prompt = [*prompt, *completion.token_ids, *await context.encode(shown)]
        trajectory.status = "max_turns"
