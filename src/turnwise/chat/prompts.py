"""The next prompt of a conversation: continue a turn, render the messages, or refuse.

Agent loops call `next_prompt`. The OpenAI server and the chat scheduler have only text, so their
sessions find the turn that a request continues and call `continue_turn`. They render conversations
that continue no turn with `whole_prompt`. Where no bridge (ids that continue a turn) is exact, the
whole conversation is rendered and begins a branch. A template that raises or drops a message is
refused.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from turnwise.chat.messages import Conversation, in_thread_if_long, plain
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, first_line
from turnwise.trajectory import ChatTemplate, Message, Prompt, PromptLike, Trajectory, bridge
from turnwise.trajectory.chat_template import Tools
from turnwise.trajectory.images import images_in
from turnwise.trajectory.prefix import replace_prefix


class RefusedParameter(InputError):
    """A parameter of a request that cannot be served; the message gives the reason."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The next turn's prompt, or the reason why it continues no turn."""

    token_ids: Prompt | None
    """Exact ids that continue a turn; None where the conversation has to be rendered."""
    fork_reason: str | None = None
    """Reason for a branch; None if a turn is continued, and for a session's first prompt.

    `new_conversation`: no turn has the same first message. `history_changed`: a turn has the same
    first message, but a later message differs. `image_changed`: only an image differs.
    `new_session`: a child session begins. `history_rewritten`: the template changes the history,
    and `rollout.history=template` uses its rendering. All other reasons are those of
    `Bridge.fork_reason`; a trajectory adds `branched` (see `add_turn`).
    """
    covered: int = 0
    """Number of messages that the continued turn covers, including its answer."""


def continue_turn(
    template: ChatTemplate,
    *,
    prompt_token_ids: PromptLike,
    completion_token_ids: PromptLike,
    new_messages: Sequence[Message],
    tools: Tools | None,
    refuse_dropped: bool = True,
) -> NextPrompt:
    """Continue a turn with new messages, keeping the turn's ids. If the template leaves out a new
    message, raise TrajectoryError (`message_dropped`) if `refuse_dropped`, else return that fork
    reason."""
    bridged = bridge(
        template,
        prompt_token_ids=prompt_token_ids,
        completion_token_ids=completion_token_ids,
        new_messages=new_messages,
        tools=tools,
    )
    if refuse_dropped and bridged.fork_reason == "message_dropped":
        raise TrajectoryError("message_dropped", bridged.detail)
    return NextPrompt(bridged.token_ids, bridged.fork_reason)


async def next_prompt(
    template: ChatTemplate,
    *,
    prompt_token_ids: PromptLike,
    completion_token_ids: PromptLike,
    new_messages: Sequence[Message],
    conversation: Sequence[Message],
    tools: Tools | None,
    history: Literal["exact", "template"] = "exact",
) -> tuple[Prompt, str | None]:
    """Return the next prompt, and the fork reason if it begins a branch, else None.

    The whole `conversation` is rendered where no bridge is exact; if `history` is "template", also
    where the template changes the history. Raise TrajectoryError `message_dropped` when the
    template leaves out a new message, and `template_refuses` when the template raises.
    """
    bridging = partial(
        continue_turn,
        template,
        prompt_token_ids=prompt_token_ids,
        completion_token_ids=completion_token_ids,
        new_messages=new_messages,
        tools=tools,
    )
    continued = await in_thread_if_long(new_messages, bridging)
    own, fork_reason = continued.token_ids, continued.fork_reason
    if own is not None and history == "exact":
        return own, None

    def render() -> tuple[Prompt, str | None]:
        try:
            rendered = template.render(conversation, tools=tools)
        except Exception as error:  # a template may raise anything
            raise TrajectoryError("template_refuses", f"{type(error).__name__}: {error}") from error
        if own is not None and template.decode_all(own) == template.decode_all(rendered):
            return own, None
        return rendered, fork_reason or "history_rewritten"

    return await in_thread_if_long(conversation, render)


def echoed_prompt(
    template: ChatTemplate, asked: Conversation, *, refuse_dropped: bool
) -> NextPrompt | None:
    """Continue the last assistant message that carries its token ids, as the server's answers do;
    None when no message carries ids. Raises as `token_ids_of` and `continue_turn` do."""
    for index in range(len(asked.messages) - 2, -1, -1):
        message = asked.messages[index]
        if message["role"] == "assistant" and message.get("generation_token_ids"):
            name = "prompt_token_ids"
            if images_in(asked.messages):
                why = f"{name} of a message are not served beside images: ask in its session"
                raise RefusedParameter(name, why)
            return continue_turn(
                template,
                prompt_token_ids=token_ids_of(message, name),
                completion_token_ids=token_ids_of(message, "generation_token_ids"),
                new_messages=[
                    plain(m, template.between_parts) for m in asked.messages[index + 1 :]
                ],
                tools=asked.tools,
                refuse_dropped=refuse_dropped,
            )
    return None


def spliced_prompt(template: ChatTemplate, asked: Conversation, required: Sequence[int]) -> Prompt:
    """Render a conversation, with `required` in place of its ids up to the last assistant turn;
    raise RefusedParameter when the required ids do not fit the messages."""
    messages = [plain(message, template.between_parts) for message in asked.messages]
    tools = asked.tools
    end = max((i for i, m in enumerate(messages, 1) if m["role"] == "assistant"), default=0)

    def rendered(shown: Sequence[Message]) -> tuple[Prompt, Prompt]:
        before = Prompt()
        if end:
            before = template.render(shown[:end], tools=tools, add_generation_prompt=False)
        return before, template.render(shown, tools=tools)

    try:
        shown: Sequence[Message] = [with_objects(message) for message in messages]
        ids = rendered(shown)
    except Exception:  # the template may take arguments only as text
        shown, ids = messages, rendered(messages)
    try:
        try:
            return replace_prefix(template.tokenizer, required, *ids)
        except TrajectoryError:
            # A template may leave out the text before calls, although the client's ids contain it.
            said = [m["content"].strip() for m in shown if m.get("tool_calls")]
            bare = [{**m, "content": ""} if m.get("tool_calls") else m for m in shown]
            own = template.decode_all(required)
            if not any(said) or any(one not in own for one in said) or rendered(bare) != ids:
                raise
            return replace_prefix(template.tokenizer, required, *ids, drops_content=True)
    except TrajectoryError as error:
        name = "required_prefix_token_ids"
        raise RefusedParameter(name, f"{name}: {error}") from error


def with_objects(message: Message) -> Message:
    """Return a message with the arguments of its calls as objects, which most templates take, while
    clients send text. Arguments that are not a JSON object stay as they are."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if not function.get("arguments"):
            function["arguments"] = {}
        with suppress(ValueError, TypeError, RecursionError):  # not JSON, or already an object
            if isinstance(read := json.loads(function["arguments"]), dict):
                function["arguments"] = read
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def whole_prompt(
    template: ChatTemplate, asked: Conversation, *, generation: bool = True, special: bool = False
) -> Prompt:
    """Render a whole conversation as clients send it: with `generation`, including the generation
    prompt; with `special`, including the tokens that the tokenizer puts around a text.

    Calls' arguments are rendered as objects, or as text if the template takes only text.

    Raises:
        TrajectoryError: `template_refuses`, when the template raises.
    """
    messages = [plain(message, template.between_parts) for message in asked.messages]
    shown = [with_objects(message) for message in messages]
    for message in shown:
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        if message.get("reasoning"):  # a template knows one of these names
            message.setdefault("reasoning_content", message["reasoning"])
    if special and not images_in(shown):
        text = template.render_text(shown, tools=asked.tools, add_generation_prompt=generation)
        return Prompt(template.encode(text, add_special_tokens=True))
    if generation and all(message.keys() == {"role", "content"} for message in shown):
        return _rendered(lambda: template.render_first(shown, asked.tools))

    def render(given: Sequence[Message]) -> Prompt:
        return template.render(given, tools=asked.tools, add_generation_prompt=generation)

    for given in (shown, messages):
        with suppress(Exception):
            return render(given)
    return _rendered(lambda: render([_readable(message) for message in shown]))


def _rendered(render: Callable[[], Prompt]) -> Prompt:
    try:
        return render()
    except (InputError, TrajectoryError):
        raise
    except Exception as error:  # a template may raise anything
        why = f"the chat template refuses the messages: {first_line(error)}"
        raise TrajectoryError("template_refuses", why) from error


def _readable(message: Message) -> Message:
    """Return a message whose calls have objects as arguments; {} replaces other arguments."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if not isinstance(function["arguments"], dict):
            function["arguments"] = {}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def token_ids_of(tree: JsonObject, name: str) -> list[int]:
    """Return `tree[name]`; RefusedParameter when it is not a list of token ids."""
    value = tree.get(name)
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise RefusedParameter(name, f"{name} must be a list of token ids")
    return value


NEW = ("new_conversation", "new_session")
"""Fork reasons of branches that begin a conversation; other branches continue an earlier one."""


def response_room(
    trajectory: Trajectory, prompt: PromptLike, fork_reason: str | None, max_tokens: int
) -> int:
    """Return the number of tokens left of `rollout.max_response_tokens`, given as `max_tokens`.

    All tokens after the first prompt of the conversation count: completions and the messages
    between them, in the branch that `prompt` continues, or that it begins because of `fork_reason`.
    """
    index, shared = trajectory.find_parent(prompt)
    if index is None:
        return max_tokens
    if trajectory.continued_turn(index, shared) is None and fork_reason in (None, *NEW):
        return max_tokens
    turn = trajectory.turns[index]
    while turn.parent is not None and turn.fork_reason not in NEW:
        turn = trajectory.turns[turn.parent]
    return turn.prompt_length + max_tokens - len(prompt)
