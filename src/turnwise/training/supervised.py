"""Samples for supervised training: rows of data as trajectories, in which every sampled token is
trained with advantage 1.

A row is a conversation (`messages`, or ShareGPT's `conversations`, and `tools` if the row has
tools), a trajectory of Turnwise, or a training trace of OpenEnv. Rows that store ids are not
rendered. A written conversation gets the ids that a rollout would have had: each assistant's turn
is what the model would sample after the prompt of that turn, and the bridge
(`turnwise.trajectory.bridge`) continues prompts. So masks come from the ids, with any chat
template, and never from a search in rendered text. The trajectory begins a new branch where the
bridge would begin one. A row that cannot be exact is refused with a reason: for instance, the
template changes or hides a part of the row, or writes no token that ends its turns.

To add a form of supervised rows: make a trajectory from the row in `RowReader.read`.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence

from turnwise.chat.images import read_parts
from turnwise.chat.messages import plain
from turnwise.chat.prompts import continue_turn, with_objects
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem
from turnwise.training.row_flags import check_row, is_trained, without_flags
from turnwise.training.samples import SampleBatch, add_trajectory
from turnwise.training.sharegpt import with_messages
from turnwise.trajectory import ChatTemplate, Image, Message, Prompt, Trajectory, audit
from turnwise.trajectory.bridge import answer_end, sampled_text
from turnwise.trajectory.chat_template import Tools
from turnwise.trajectory.left_out import check_tools
from turnwise.trajectory.training_trace import from_training_trace

logger = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message may have reasoning, separate from its content."""
_PROBE = "reasoning 7a3e90c4"
_THINKS_NOTHING = re.compile(r"\s*(?:<think>)?\s*</think>")
"""Beginning of an answer whose block of reasoning is empty."""


class RowReader:
    """Makes trajectories from rows; safe to use from several threads at once.

    Args:
        max_length: Maximum number of tokens of a sequence (`model.max_length`).
        warn: Called once, with a sentence, if rows teach the model to think nothing.
    """

    def __init__(
        self, max_length: int, template: ChatTemplate, warn: Callable[[str], None] = logger.warning
    ) -> None:
        self._warn: Callable[[str], None] | None = warn
        self._template = template
        self._max_length = max_length
        self._known = len(template.tokenizer)

    def read(self, problem: Problem) -> Trajectory:
        """Return a row as a trajectory whose sampled tokens are trained.

        Raises:
            TrajectoryError: when the row is refused, with the reason under which it is counted.
            InputError: when the row is a conversation, and the tokenizer has no chat template.
        """
        row, name = problem.row, problem.id
        if not {"messages", "conversations", "turns"} & row.keys():
            raise TrajectoryError(
                "unknown_form",
                "a row has messages, or conversations, or the turns of a trajectory or a trace; "
                f"this one has {', '.join(row)}",
            )
        if self._template.missing and "turns" not in row:
            raise InputError(self._template.missing)
        try:
            if "turns" not in row:
                row = with_messages(row)
                check_row(row)
                made = demonstrate(self._template, row["messages"], tools_of(row), name=name)
                self._warn_of_no_thoughts(made)
            elif "problem_id" in row:
                made = Trajectory.from_tree(row)
            else:
                made = from_training_trace(row, name=name)
            return self._checked(made)
        except (InputError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # The row's values do not have the types that its keys promise.
            why = str(error) if isinstance(error, InputError) else repr(error)
            raise TrajectoryError("malformed", why) from error

    def _warn_of_no_thoughts(self, made: Trajectory) -> None:
        texts = (self._template.decode_all(turn.completion_token_ids[:16]) for turn in made.turns)
        if self._warn is not None and any(map(_THINKS_NOTHING.match, texts)):
            warn, self._warn = self._warn, None
            warn(
                f"{made.problem_id} has an answer without reasoning, for which the template writes "
                "an empty block, so that such rows teach the model to think nothing: give messages "
                "reasoning_content, or turn reasoning off in model.template_args"
            )

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        report = audit(trajectory)
        if report.first_violation is not None:
            raise TrajectoryError("not_exact", report.first_violation)
        if not report.tokens_trained:
            raise TrajectoryError("nothing_to_train", "no token of it was sampled")
        longest = max(turn.path_length for turn in trajectory.turns)
        if longest > self._max_length:
            raise TrajectoryError(
                "too_long",
                f"{longest:,} tokens are more than model.max_length {self._max_length:,}",
            )
        turns = trajectory.turns
        largest = max(int((t.added + t.completion_token_ids).ids.max(initial=0)) for t in turns)
        if largest >= self._known:
            raise TrajectoryError(
                "unknown_token", f"token {largest} is outside of this tokenizer's {self._known:,}"
            )
        return trajectory


def supervised_samples(trajectories: Sequence[Trajectory], version: int) -> SampleBatch:
    """Return the samples of a step, one for each branch, whose trained tokens all have advantage 1,
    with an audit of each token.

    Args:
        version: The trainer's weight version, which all samples get, no matter which model sampled
            their tokens.
    """
    batch = SampleBatch()
    for trajectory in trajectories:
        each = [1.0] * len(trajectory.turns)
        add_trajectory(batch, trajectory, each, oldest=0, as_sampled=False)
    for sample in batch.samples:
        sample.weight_versions_T[sample.response_mask_T] = version
    return batch


def demonstrate(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None = None,
    *,
    name: str = "demonstration",
) -> Trajectory:
    """Return the trajectory of a written conversation. The assistant's tokens count as sampled,
    with log-probs of 0.0. Raise TrajectoryError with a reason if the trajectory cannot be exact.

    Args:
        messages: In OpenAI's format; arguments of calls are JSON texts or objects. Messages of the
            assistant are trained, except that a message whose `weight`, or another flag of
            `row_flags`, is 0 or false is context. Messages after the last trained message are left
            out of the ids.
    """
    between = template.between_parts
    said = [_with_reasoning(template, _checked(message, between)) for message in messages]
    asked = [index for index, message in enumerate(said) if message["role"] == "assistant"]
    trained = {i for i in asked if is_trained(messages[i], f"message {i + 1}")}
    if not trained:
        raise TrajectoryError("nothing_to_train", "no message of an assistant is to be trained")
    trajectory = Trajectory(name, messages=said, status="completed")
    prompt, completion = Prompt(), list[int]()
    before = 0  # messages up to and including the last assistant's turn
    reason: str | None = None  # why a branch began, if one did since the last trained turn
    try:
        if tools:
            check_tools(template, said[: asked[0]], tools)
        for index in asked[: asked.index(max(trained)) + 1]:
            rendered, sampled = _turn(template, said, index, tools)
            if before:
                following = continue_turn(
                    template,
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    new_messages=said[before:index],
                    tools=tools,
                )
                if following.token_ids is not None:
                    rendered = following.token_ids
                reason = following.fork_reason or reason
            prompt, completion, before = rendered, sampled, index + 1
            if index in trained:
                zeros = [0.0] * len(sampled), [0] * len(sampled)
                trajectory.add_turn(prompt, sampled, *zeros, "stop", fork_reason=reason)
                reason = None
    except TrajectoryError:
        raise
    except InputError as error:
        raise TrajectoryError("tools_hidden", str(error)) from error
    except Exception as error:  # a template may raise anything
        raise TrajectoryError("template_refuses", f"{type(error).__name__}: {error}") from error
    return trajectory


def _checked(message: Foreign, between: str) -> Message:
    """Return a message as templates expect it; `between` joins its text parts, as in chats."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TrajectoryError("malformed", f"{repr(message)[:80]} is no message with a role")
    try:
        message = read_parts(message, f"the content of a {message['role']}")
    except InputError as error:
        raise TrajectoryError("image_refused", str(error)) from error
    content = message.get("content")
    parts = content if isinstance(content, list) else [content or ""]
    shown = [p.get("text", p.get("image")) if isinstance(p, dict) else p for p in parts]
    if not all(isinstance(part, str | Image) for part in shown):
        raise TrajectoryError("not_text", f"the content of a {message['role']} is not only text")
    try:
        made = with_objects(plain(without_flags(message), between))
        named = [call["function"]["name"] for call in made.get("tool_calls") or ()]
    except (TypeError, KeyError, ValueError):
        named = [None]
    if not all(isinstance(name, str) for name in named):
        raise TrajectoryError("malformed", "a call has no function with a name")
    return made


def _with_reasoning(template: ChatTemplate, message: Message) -> Message:
    """Return a message with its reasoning under a key that the template shows, if the template
    shows any of the keys."""
    own = next((key for key in _REASONING if message.get(key)), None)
    if own is None or message["role"] != "assistant":
        return message
    shown = [key for key in _REASONING if _shows(template, key)]
    if not shown or own in shown:
        return message
    rest = {key: value for key, value in message.items() if key not in _REASONING}
    return {**rest, shown[0]: message[own]}


def _shows(template: ChatTemplate, key: str) -> bool:
    """Return whether the template shows the value under this key of an assistant's message."""
    if (known := template.seams.get(("shows", key))) is None:
        asked: list[Message] = [{"role": "user", "content": "Why?"}]
        said: Message = {"role": "assistant", "content": "So.", key: _PROBE}
        try:
            made = template.render_text([*asked, said], add_generation_prompt=False)
        except Exception:  # a template may raise anything
            made = ""
        known = template.seams[("shows", key)] = _PROBE in made
    return bool(known)


def _turn(
    template: ChatTemplate, messages: Sequence[Message], index: int, tools: Tools | None
) -> tuple[Prompt, list[int]]:
    """Return the rendered prompt of an assistant's turn, and the ids of the turn itself."""
    turn, where = messages[index], f"message {index + 1}"
    opening = template.render_text(messages[:index], tools=tools)
    ended = template.render_text(messages[: index + 1], tools=tools, add_generation_prompt=False)
    text = sampled_text(template, opening, ended, turn, tools)
    if text is None:
        raise TrajectoryError(
            "unlike_generation",
            f"the template writes {where} differently after its generation prompt; if that "
            "opens reasoning, give the message some, or turn reasoning off in model.template_args",
        )
    shown = "".join(text.split())
    for spellings in _parts(turn):
        if not any("".join(spelling.split()) in shown for spelling in spellings):
            lost, hint = f"{spellings[0]!r} of {where}", ""
            if spellings[0] in map(turn.get, _REASONING):
                hint = ", which is reasoning apart from the content"
            why = f"the template leaves out, or changes, {lost}{hint}"
            raise TrajectoryError("content_changed", why)
    prompt, whole = template.encode(opening), template.encode(opening + text)
    sampled = whole[len(prompt) :]
    if whole[: len(prompt)] != prompt:
        sampled = template.encode(text)
        if template.decode_all([*prompt, *sampled]) != template.decode_all(whole):
            raise TrajectoryError(
                "token_boundary", f"a token would reach from the prompt into {where}"
            )
    # If a base model learns a template, its settings may lack the token that ends an answer.
    last = template.special_tokens.get(sampled[-1]) if sampled else None
    stops = sampled[-1:] and sampled[-1] in template.stop_token_ids
    if last is None or not (stops or last in answer_end(template, tools)):
        with_what = "no special token" if last is None else last
        raise TrajectoryError(
            "no_turn_end",
            f"the template ends {where} with {with_what}, at which sampling does not stop, so the "
            "model would not learn to stop; sampling.stop_token_ids adds tokens that end turns",
        )
    if template.stop_token_ids.intersection(sampled[:-1]):
        raise TrajectoryError(
            "stops_early",
            f"{where} quotes a token at which sampling stops, so no model could say it",
        )
    return template.with_images(prompt, messages[:index]), sampled


def _parts(turn: Message) -> Iterator[tuple[str, ...]]:
    """Yield the parts that a turn's text must show, each with its possible spellings."""
    for text in str(turn["content"]).replace("<think>", "\0").replace("</think>", "\0").split("\0"):
        yield (text,)
    for key in _REASONING:
        yield (str(turn.get(key) or ""),)
    for call in turn.get("tool_calls") or ():
        yield (str(call["function"]["name"]),)
        arguments = call["function"].get("arguments")
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
            elif type(value) is int:
                yield (str(value),)


def tools_of(row: JsonObject) -> list[JsonObject] | None:
    """Return the tools of a row, given as a list or as its JSON text; None if it has no tools."""
    tools = row.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise TrajectoryError("malformed", "tools is no list of descriptions, nor its JSON text")
    return tools
