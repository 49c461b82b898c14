"""Compare the ids of a branch with the ids that the chat template renders from its messages.

The ids differ where the template writes an answer differently than the model did. The tokenizer is
loaded at the first use, from the run's files or a local cache; no code of a model is run, and
nothing is downloaded.
"""

import json
import threading
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from turnwise.config.data import template_text
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, first_line
from turnwise.trajectory import ChatTemplate, Message, Trajectory
from turnwise.trajectory.prompt import common_prefix

TOOLS_UNKNOWN = (
    "The first prompt is taken as the engine had it, because descriptions of tools are not in the "
    "run's files; the rest is rendered."
)
HISTORY_CHANGED = (
    "The template changes the messages of the first prompt once there is an answer. Descriptions "
    "of tools, which are not in the run's files, are missing from its rendering."
)
_MAX_COMPARED = 250_000  # maximum product of two lengths for a comparison id by id
Comparison = Callable[[Trajectory, int], JsonObject]


def comparison(tokenizer: Path | None, model: JsonObject | None = None) -> Comparison:
    """Return a thread-safe function that compares the branch ending at a turn with the rendering of
    its messages. `tokenizer` is the run's `tokenizer.json`; `model` is its section `model`.

    The function returns a dictionary. Its `error` is a sentence if the branch cannot be rendered.
    Otherwise `error` is None, and the dictionary also has `identical`, the numbers of ids `sampled`
    and `rendered`, `pieces` as `[start, end, rendered ids, whether the texts are equal]`, the ids
    that the template adds at the end (`closing`), and a `note`.
    """
    own, lock = model or {}, threading.Lock()

    @cache
    def load() -> ChatTemplate:
        if tokenizer is None:
            raise InputError(
                "the run's tokenizer was not found in its checkpoints, model.tokenizer or "
                "model.path"
            )
        try:
            from transformers import AutoTokenizer  # seconds to import

            template = own.get("chat_template")
            return ChatTemplate(
                AutoTokenizer.from_pretrained(
                    tokenizer.parent, local_files_only=True, trust_remote_code=False
                ),
                chat_template=template_text(template) if template else None,
                escape_special_tokens=bool(own.get("escape_special_tokens")),
                **(own.get("template_args") or {}),
            )
        except InputError:
            raise
        except Exception as error:  # transformers may raise anything
            raise InputError(
                f"the tokenizer in {tokenizer.parent} cannot be loaded: {first_line(error)}"
            ) from error

    def compare(trajectory: Trajectory, leaf: int) -> JsonObject:
        if not 0 <= leaf < len(trajectory.turns):
            raise IndexError(leaf)
        if trajectory.images:
            return {"error": "the comparison is of texts alone, and this trajectory has images"}
        ids = trajectory.prompt_token_ids(leaf) + trajectory.turns[leaf].completion_token_ids
        with lock:
            try:
                template = load()
                rendered, note = _rendered(template, trajectory, leaf)
            except InputError as error:
                return {"error": str(error)}
            except Exception as error:  # a template may raise anything
                return {"error": f"the template refuses the messages: {first_line(error)}"}
            found = differences(ids, rendered)
            at_end = found and found[-1][0] == len(ids)  # the template wrote more
            closing = rendered[found.pop()[2] :] if at_end else []
            pieces = []
            for start, end, other_start, other_end in found:
                other = rendered[other_start:other_end]
                same_text = template.decode_all(ids[start:end]) == template.decode_all(other)
                pieces.append([start, end, other, same_text])
        return {
            "error": None,
            "identical": not pieces,
            "sampled": len(ids),
            "rendered": len(rendered) - len(closing),
            "pieces": pieces,
            "closing": closing,
            "note": note,
        }

    return compare


def differences(ids: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return the places where two lists of ids differ, in order: start and end in both lists.

    Short lists are compared id by id, long lists by stretches of four ids. Stretches are rarely
    repeated, so the time grows in proportion to the length.
    """
    first = common_prefix(ids, other)
    last = common_prefix(ids[first:][::-1], other[first:][::-1])
    own, theirs = ids[first : len(ids) - last], other[first : len(other) - last]
    width = 1 if len(own) * len(theirs) <= _MAX_COMPARED else 4
    a, b = (list(zip(*(side[i:] for i in range(width)), strict=False)) for side in (own, theirs))
    found, at, other_at = list[tuple[int, int, int, int]](), 0, 0
    # `autojunk` skips frequent items. Ids may be frequent (spaces, line ends) and must be found.
    matcher = SequenceMatcher(None, a, b, autojunk=width > 1)
    for start, other_start, size in matcher.get_matching_blocks():
        length = size + width - 1
        if not size:  # the last block, at the end of both lists
            start, other_start = len(own), len(theirs)
        elif (inside := max(at - start, other_at - other_start)) > 0:  # overlap
            start, other_start, length = start + inside, other_start + inside, length - inside
            if length <= 0:
                continue
        if start > at or other_start > other_at:
            found.append((first + at, first + start, first + other_at, first + other_start))
        at, other_at = start + length, other_start + length
    return found


def _rendered(template: ChatTemplate, trajectory: Trajectory, leaf: int) -> tuple[list[int], str]:
    """Return the ids rendered from a branch's messages, and a note for people or "". Only the first
    turn's prompt has the descriptions of tools. So the recorded prompt is used unchanged if the
    template renders its messages in the same way when answers follow."""
    stops = {*template.tokenizer.all_special_ids, *template.stop_token_ids}

    def decode(ids: Sequence[int]) -> str:
        return template.decode_all(ids[:-1] if ids and ids[-1] in stops else ids)

    first = _chain(trajectory, leaf)[0]
    opening = _messages(trajectory, first, decode, answered=False)
    whole = _messages(trajectory, leaf, decode, answered=True)
    if opening is None or whole is None:
        raise InputError("the messages of this branch are not recorded one by one")
    text = template.render_text(whole, add_generation_prompt=False)
    prompt = trajectory.prompt_token_ids(first)
    if template.render(opening) == prompt:
        return template.encode(text), ""
    before = template.render_text(opening, add_generation_prompt=False)
    with_answer = template.render_text(opening)
    if text.startswith(before) and with_answer.startswith(before):
        begins = template.encode(with_answer[len(before) :])  # the start of an answer
        if prompt[len(prompt) - len(begins) :] == begins:
            kept = prompt[: len(prompt) - len(begins)]
            return [*kept, *template.encode(text[len(before) :])], TOOLS_UNKNOWN
    return template.encode(text), HISTORY_CHANGED


def _chain(trajectory: Trajectory, leaf: int) -> list[int]:
    """Return the longest chain of turns that ends with `leaf` and in which each turn continues its
    parent's whole path."""
    turns, chain = trajectory.turns, [leaf]
    while (parent := turns[chain[0]].parent) is not None:
        if turns[chain[0]].prefix_length != turns[parent].path_length:
            break
        chain.insert(0, parent)
    return chain


def _messages(
    trajectory: Trajectory, index: int, decode: Callable[[Sequence[int]], str], *, answered: bool
) -> list[Message] | None:
    """Return the messages that led to a turn, with its answer if `answered`; None if missing."""
    turns = trajectory.turns
    if not any(turn.messages for turn in turns):
        messages = trajectory.messages
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers[-len(turns) :]  # without answers in an opening conversation
        if len(answers) == len(turns):
            at = answers[index]
        elif answers and index == (len(turns) - 1 if answered else 0):
            at = answers[-1 if answered else 0]
        else:
            return None
        return messages[: at + answered]
    before: list[Message] = []
    earlier = index
    for at in _chain(trajectory, index):
        own = turns[at].messages
        if not before or own[: len(before)] == before:
            before = list(own)
        else:  # the messages since the turn before
            before = [*before, _answer(trajectory, earlier, before, decode), *own]
        earlier = at
    return [*before, _answer(trajectory, index, before, decode)] if answered else before


def _answer(
    trajectory: Trajectory,
    index: int,
    before: Sequence[Message],
    decode: Callable[[Sequence[int]], str],
) -> Message:
    """Return a turn's answer as a message: the recorded message if found, else only the text."""
    text = decode(trajectory.turns[index].completion_token_ids)
    for messages in (trajectory.messages, *(turn.messages for turn in trajectory.turns)):
        following = messages[len(before) : len(before) + 1]
        if not following or messages[: len(before)] != before:
            continue
        message = following[0]
        wanted = [str(message.get("content") or "").strip()]
        for call in message.get("tool_calls") or ():
            called = call.get("function") or call
            wanted.append(str(called["name"]))
            arguments = called.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    wanted.append(arguments)
            values = arguments.values() if isinstance(arguments, dict) else ()
            flat = (each for each in values if not isinstance(each, dict | list))
            wanted += [json.dumps(each, ensure_ascii=False) for each in flat]
        # Skip an edited message: it has parts that the text lacks.
        if message["role"] == "assistant" and all(each in text for each in wanted):
            return message
    return {"role": "assistant", "content": text}
