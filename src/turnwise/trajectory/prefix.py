"""Put the model's own ids back into a re-rendered conversation.

A caller that keeps messages as text renders and tokenises the whole conversation again, and the
sampled text comes back as other ids. `replace_prefix_tokens` differs from NeMo-RL's function of
that name in two ways: it finds the end of the last turn by the ids around it, because a template
that drops reasoning moves that end; and a result that would lose a message, or keep an edited turn,
is an error. The model's own text may be spelled differently than it was sampled, as long as the
meaning is the same; text that the model did not write may differ only in white space.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from turnwise.core.optional import Foreign
from turnwise.errors import TrajectoryError
from turnwise.trajectory.calls import WORDS, divide_at_calls
from turnwise.trajectory.prompt import Prompt, PromptLike, common_prefix


def replace_prefix_tokens(
    tokenizer: Foreign,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """Return the result of `replace_prefix`, for prompts without images, as a list.

    Example:
        >>> replace_prefix_tokens(tokenizer, [11, 220, 17], [11, 1001, 2], [11, 1001, 2, 21])
        [11, 220, 17, 2, 21]
    """
    given = model_prefix_token_ids, template_prefix_token_ids, template_token_ids
    return replace_prefix(tokenizer, *given).tolist()


def replace_prefix(
    tokenizer: Foreign,
    model_prefix: PromptLike,
    template_prefix: PromptLike,
    whole: PromptLike,
    *,
    drops_content: bool = False,
) -> Prompt:
    """Return the whole conversation's ids, with the model's own ids up to the end of its last turn.

    Rendered calls may differ from the sampled calls in key order, and in how numbers and characters
    are written; reasoning, and text that the model wrote after a call, may be missing.

    Args:
        tokenizer: Anything with `eos_token_id`, the id that ends an assistant turn, and `decode`.
            Without `decode`, the two histories are not compared.
        model_prefix: The last call's prompt and completion, with or without the final EOS; empty
            before the first call.
        template_prefix: The conversation rendered up to and including the last assistant message,
            without generation prompt.
        whole: The whole conversation rendered, with generation prompt.
        drops_content: Whether the template leaves out the text before a call; if so, the caller
            must compare that text.

    Raises:
        TrajectoryError: reason `no_turn_end`, when the rendered history holds no EOS;
            `turn_lost`, when the place of the last assistant turn in the whole rendering is
            uncertain; `history_changed`, when the rendering's history differs from the model's.
    """
    owned, rendering = Prompt.of(model_prefix), Prompt.of(whole)
    model, prefix = owned.tolist(), Prompt.of(template_prefix).tolist()
    template, eos = rendering.tolist(), tokenizer.eos_token_id
    if not model:
        return rendering
    if eos is None or eos not in prefix:
        raise TrajectoryError(
            "no_turn_end", f"the rendered conversation holds no end-of-turn token {eos}"
        )
    end = len(prefix) - 1 - prefix[::-1].index(eos)
    finished = model if model[-1] == eos else [*model, eos]
    seam = _find_turn_end(prefix, end, template, eos)
    rendered, again = prefix[: end + 1], template[: seam + 1]
    # A template may have changed more than one turn: check that the turns are still the same.
    if (decode := getattr(tokenizer, "decode", None)) is None:
        return owned[: len(finished) - 1] + rendering[seam:]
    if again != rendered and not _is_same(str(decode(rendered)), str(decode(again))):
        raise _turn_lost("other turns differ too")
    opening = template[len(template) - template[::-1].index(eos) :]
    header = _header(str(decode(opening)))
    if finished != rendered and (
        change := _difference(decode, finished, rendered, eos, header, drops_content)
    ):
        own, sent = change
        at = common_prefix(own, sent)
        raise TrajectoryError(
            "history_changed",
            f"the conversation was sent with {_short(sent[at:])} where the model's continues with "
            f"{_short(own[at:])}; start a new one for an edited history",
        )
    if [one.image for one in owned.images] != [one.image for one in rendering[:seam].images]:
        raise TrajectoryError(
            "history_changed", "the conversation was sent with other images than the model's"
        )
    return owned[: len(finished) - 1] + rendering[seam:]


def _find_turn_end(prefix: list[int], end: int, template: list[int], eos: int) -> int:
    """Return the position in `template` of the EOS at `prefix[end]`.

    A template may drop reasoning once messages follow. Usually the rendering up to that EOS is then
    a prefix and a suffix of `prefix`, with one gap between them. If no position or several fit,
    take the EOS with the same number of turns before it; the caller checks that they are the same
    turns.
    """
    if template[: len(prefix)] == prefix:
        return end
    start = common_prefix(prefix, template)
    ends = [position for position, token in enumerate(template) if token == eos]
    fitting = [
        position
        for position in ends
        if position >= start
        and start + common_prefix(prefix[: end + 1][::-1], template[: position + 1][::-1])
        > position
    ]
    if len(fitting) == 1:
        return fitting[0]
    turns_before = prefix[:end].count(eos)
    counted = ends[turns_before : turns_before + 1]
    if not counted or (fitting and counted[0] not in fitting):
        raise _turn_lost(f"its end could be at {len(fitting)} places")
    return counted[0]


def _turn_lost(why: str) -> TrajectoryError:
    return TrajectoryError(
        "turn_lost",
        "the chat template renders the last assistant turn differently once messages follow, and "
        f"{why}; no ids were replaced",
    )


_REASONING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel|>analysis": "<|end|>",
    "<|channel>thought": "<channel|>",
}
"""Opening and closing tags of reasoning, which templates leave out of earlier turns."""
_REASONING_BEGINS, _REASONING_TAGS = (
    re.compile("|".join(map(re.escape, tags)))
    # Without <|end|>, because it ends every message, and no prompt opens the reasoning that it
    # closes.
    for tags in (_REASONING, {*_REASONING, *_REASONING.values()} - {"<|end|>"})
)
_MAX_ALIGNMENTS = 64  # maximum number of alignments of two texts that are considered at a time
_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
_BARE_TAG = re.compile(r"<[^<>=]*>|\[/?[A-Z_]+\]")  # without a value, such as a function's name
_HEADER = re.compile(rf"(?:{_TAG.pattern}|\w)+")
_ROLE = re.compile(rf"\s*({_TAG.pattern})(\w+)")
_ANSWER_BEGINS = re.compile(r"\[/[A-Z_]+\]|<｜Assistant｜>|<｜tool▁outputs?▁end｜>")
"""Tags before the model's text, in templates where only the model's turns end with EOS."""
_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


def _difference(
    decode: Callable[[list[int]], object],
    model: list[int],
    template: list[int],
    eos: int,
    header: str,
    drops_content: bool,
) -> tuple[str, str] | None:
    """Return a text of the sampled history and its counterpart in the rendered history, if the two
    differ in meaning; else None.

    Text that the model did not write may differ only in white space, as far as the template shows
    it. Each turn of the model begins with `header`.
    """
    sampled, sent = str(decode(model)), str(decode(template))
    whole = None if _is_same(sampled, sent) else (_plain(sampled), _plain(sent))
    ours, theirs = _turns(model, eos), _turns(template, eos)
    if len(ours) != len(theirs):
        return whole
    for our_ids, their_ids in zip(ours, theirs, strict=True):
        if our_ids == their_ids:
            continue
        own, shown = str(decode(our_ids)), str(decode(their_ids))
        parts, parts_sent = _answer(own, header), _answer(shown, header)
        if parts is None or parts_sent is None:
            parts = parts_sent = "", ""
        (others, said), (others_sent, said_sent) = parts, parts_sent
        if _is_others(own, header) or _is_others(shown, header):
            others, others_sent = own, shown
        if "".join(others.split()) != "".join(others_sent.split()):
            return others, others_sent
        is_same = _is_same_answer(said, said_sent, drops_content)
        if is_same is None:
            return said, said_sent
        if whole and not is_same and not _is_same(own, shown):
            return whole
    return None


def _turns(ids: list[int], eos: int) -> list[list[int]]:
    """Divide ids at each EOS, which ends a turn or occurs in somebody's text."""
    ends = [-1, *(place for place, token in enumerate(ids) if token == eos), len(ids)]
    return [ids[start + 1 : end] for start, end in pairwise(ends)]


def _header(opening: str) -> str:
    """Return the text with which each turn of the model begins. `opening` is a prompt's text after
    its last EOS; return "" if it holds more than such a beginning."""
    marks = (*_REASONING, *_REASONING.values())
    header = opening.strip()
    while mark := next((mark for mark in marks if header.endswith(mark)), ""):
        header = header.removesuffix(mark).rstrip()
    return header if _HEADER.fullmatch(header) else ""


def _is_others(turn: str, header: str) -> bool:
    """Return whether a turn begins like the model's turns, but with the name of another role."""
    role, own = _ROLE.match(turn), _ROLE.match(header)
    return role is not None and own is not None and role[1] == own[1] and role[2] != own[2]


def _is_same(sampled: str, sent: str) -> bool:
    """Return whether a text is the sampled text, printed again.

    White space, quotes, tags and Python's spelling of literals may differ, as in JSON that was
    parsed and printed again. Reasoning may be missing, and a pair of reasoning tags may have been
    added.
    """
    sent = _plain(sent)
    begun, ends = 0, {0}
    for start, end in _reasoning(sampled):
        ends = _continued(sent, ends, _plain(sampled[begun:start]))
        ends |= _continued(sent, ends, _plain(sampled[start:end]))
        ends, begun = set(sorted(ends)[-_MAX_ALIGNMENTS:]), end
    return len(sent) in _continued(sent, ends, _plain(sampled[begun:]))


def _is_same_answer(sampled: str, sent: str, drops_content: bool) -> bool | None:
    """Return whether two versions of the model's part of a turn have the same calls, in any
    spelling, and the same text before them; a parser may have dropped the text after a call. Return
    None if both have the same number of calls, but some calls differ."""
    (thought, said), (thought_sent, said_sent) = _reasoned(sampled), _reasoned(sent)
    (texts, calls), (texts_sent, calls_sent) = divide_at_calls(said), divide_at_calls(said_sent)
    if calls != calls_sent:
        return None if len(calls) == len(calls_sent) else False
    if not calls or thought_sent not in ("", thought):
        return False
    for place, (text, text_sent) in enumerate(zip(texts, texts_sent, strict=True)):
        if _plain(text) == _plain(text_sent):
            continue
        # The text may be dropped if all of its tags are kept: then it is not another role's turn.
        tags = {tag for tag in _TAG.findall(text) if not tag.startswith("</")}
        may_drop = place > 0 or drops_content
        if not may_drop or _plain(text_sent) or not tags <= set(_TAG.findall(text_sent)):
            return False
    return True


def _answer(turn: str, header: str) -> tuple[str, str] | None:
    """Return the text of a turn that the model did not write, without tags, and the model's text
    after it; None if the boundary is unknown."""
    if header:
        turn = turn.lstrip()
        return ("", turn.removeprefix(header)) if turn.startswith(header) else None
    if not (tags := list(_ANSWER_BEGINS.finditer(turn))):
        return None
    return _BARE_TAG.sub("", turn[: tags[-1].start()]), turn[tags[-1].end() :]


def _reasoned(text: str) -> tuple[str, str]:
    """Return the reasoning in a text (as `_plain`), and the text without it."""
    thoughts, said, begun = [], [], 0
    for start, end in _reasoning(text):
        said.append(text[begun:start])
        thoughts.append(text[start:end])
        begun = end
    return _plain("".join(thoughts)), "".join([*said, text[begun:]])


def _reasoning(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each closed block of reasoning."""
    position, unclosed = 0, set()
    while (begin := _REASONING_BEGINS.search(text, position)) is not None:
        closing, position = _REASONING[begin[0]], begin.end()
        end = -1 if closing in unclosed else text.find(closing, position)
        if end < 0:
            unclosed.add(closing)
        else:
            position = end + len(closing)
            yield begin.start(), position


def without_reasoning(text: str) -> str:
    """Return a model's text without its reasoning. The prompt may have opened the reasoning, and an
    answer that was cut off may not close it."""
    said, position = list[str](), 0
    while (tag := _REASONING_TAGS.search(text, position)) is not None:
        said.append(text[position : tag.start()])
        position = tag.end()
        if (closing := _REASONING.get(tag[0])) is None:  # the prompt opened it
            said.clear()
            continue
        if (end := text.find(closing, position)) < 0:
            position = len(text)
            break
        position = end + len(closing)
    return "".join([*said, text[position:]]).strip()


def _continued(text: str, ends: set[int], part: str) -> set[int]:
    """For each of the positions `ends` where `part` begins in `text`, return where it ends."""
    return {end + len(part) for end in ends if text.startswith(part, end)}


def _plain(text: str) -> str:
    text = _BARE_TAG.sub("", _WORD.sub(lambda found: WORDS[found[0]], text))
    return "".join(c for c in text if not c.isspace() and c not in "\"'`\\")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:36]} ...")
