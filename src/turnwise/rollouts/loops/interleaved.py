"""Tools inside one assistant turn: sampling stops at a closing tag and continues after the result.

The result's tokens are part of the assistant's turn but were not sampled, so their response mask
is 0. The tags are those of `rollout.tool_parser`, or the configuration's own.
"""

from dataclasses import replace

from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.loops.tagged_calls import TaggedCalls
from turnwise.rollouts.loops.tool_calling import answer_calls


class InterleavedLoop:
    """Inserts tool results into the assistant's turn."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Sample, answer the call, and continue, until no call follows."""
        trajectory, template, rollout = context.trajectory, context.template, context.rollout
        tools = context.toolbox.schemas
        tagged = TaggedCalls.configured(rollout)
        parser = tagged or context.tool_parser
        open_tag, close_tag = parser.tags()
        trajectory.messages = [dict(message) for message in context.problem]
        offered = None if tagged else tools
        prompt = await context.first_prompt(trajectory.messages, tools=offered)
        answer = {"role": "assistant", "content": ""}
        trajectory.messages.append(answer)
        for turn in range(rollout.max_turns):
            completion = await context.sample(prompt, stop=[close_tag])
            if completion is None:
                return
            text = template.decode(completion.token_ids)
            answer["content"] += text
            end = text.rfind(close_tag)
            start = text.rfind(open_tag, 0, max(end, 0))
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            if end < 0 or completion.token_ids[-1] == template.tokenizer.eos_token_id:
                if text.rfind(open_tag) > end:  # the turn is over, so nothing can answer the call
                    context.count("tool_malformed")
                trajectory.status = "completed"
                return
            if turn + 1 < rollout.max_turns:
                call = text[max(start, 0) : end + len(close_tag)]
                parsed = parser.parse(call, tools)
                if not parsed.calls:  # the closing tag shows that a call was meant
                    parsed = replace(parsed, malformed=True)
                advice = tagged.advice if tagged else None
                results = await answer_calls(parsed, context, turn, advice)
                texts = [str(message["content"]) for message in results]
                form = rollout.result_format
                answer["content"] += "".join(form.format(result=text) for text in texts)
                escaped = "".join(form.format(result=template.escape(text)) for text in texts)
                prompt = [*prompt, *completion.token_ids, *await context.encode(escaped)]
        trajectory.status = "max_turns"
