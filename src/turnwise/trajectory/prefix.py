"""Put the model's own ids back into a re-rendered conversation.

A caller that keeps messages as text renders and tokenises the whole conversation again, and the
sampled text comes back as other ids. There are two differences from NeMo-RL's function of that
name: the end of the last turn is found by the ids around it, because a template that drops
reasoning moves it; and a result that would lose a message, or keep an edited turn, is an error.
"""

import re
from collections.abc import Callable, Sequence

from turnwise.core.optional import Foreign
from turnwise.errors import TrajectoryError
from turnwise.trajectory.trajectory import common_prefix


def replace_prefix_tokens(
    tokenizer: Foreign,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """Return the whole conversation's ids, with the model's own up to the end of its last turn.

    Args:
        tokenizer: Anything with `eos_token_id`, the id that ends an assistant turn, and `decode`.
        model_prefix_token_ids: The last call's prompt and completion, with or without the final
            EOS; empty before the first call.
        template_prefix_token_ids: The conversation rendered up to and including the last
            assistant message, without generation prompt.
        template_token_ids: The whole conversation rendered, with generation prompt.

    Raises:
        TrajectoryError: reason `no_turn_end`, when the rendered history holds no EOS;
            `turn_lost`, when the whole rendering does not hold the last assistant turn in one
            certain place; `history_changed`, when the rendering's history is not the model's.

    Example:
        >>> replace_prefix_tokens(tokenizer, [11, 220, 17], [11, 1001, 2], [11, 1001, 2, 21])
        [11, 220, 17, 2, 21]
    """
    model, prefix = list(model_prefix_token_ids), list(template_prefix_token_ids)
    template, eos = list(template_token_ids), tokenizer.eos_token_id
    if not model:
        return template
    if eos is None or eos not in prefix:
        raise TrajectoryError(
            "no_turn_end", f"the rendered conversation holds no end-of-turn token {eos}"
        )
    end = len(prefix) - 1 - prefix[::-1].index(eos)
    finished = model if model[-1] == eos else [*model, eos]
    seam = _find_turn_end(prefix, end, template, eos)
    rendered, again = prefix[: end + 1], template[: seam + 1]
    # A template may have changed more than one turn: these must be the same turns.
    if again != rendered and _changes(tokenizer.decode, rendered, again):
        raise _turn_lost("other turns differ too")
    if change := _changes(tokenizer.decode, finished, rendered):
        raise TrajectoryError(
            "history_changed",
            f"the conversation was sent with {change}; start a new one for an edited history",
        )
    return [*finished[:-1], *template[seam:]]


def _find_turn_end(prefix: list[int], end: int, template: list[int], eos: int) -> int:
    """Return the position in `template` of the EOS at `prefix[end]`.

    A template may drop reasoning once messages follow. Usually the rendering up to that EOS is then
    a prefix and a suffix of `prefix`, with one gap between them. If no position or several fit,
    take the EOS that ends as many turns; the caller checks that they are the same turns.
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
_REASONING_BEGINS = re.compile("|".join(map(re.escape, _REASONING)))
_MAX_ALIGNMENTS = 64  # maximum number of alignments of two texts that are considered at a time
_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")


def _changes(decode: Callable[[list[int]], object], model: list[int], template: list[int]) -> str:
    """Describe how a rendered history differs from the sampled one; "" if it does not.

    White space, quotes, letter case and tags may differ, as in JSON that was parsed and printed
    again. Reasoning between its tags may be missing, and an empty one may be added.
    """
    sampled, sent = str(decode(model)), _plain(str(decode(template)))
    begun, ends = 0, {0}
    position, unclosed = 0, set()
    while (begin := _REASONING_BEGINS.search(sampled, position)) is not None:
        closing, position = _REASONING[begin[0]], begin.end()
        end = -1 if closing in unclosed else sampled.find(closing, position)
        if end < 0:
            unclosed.add(closing)
            continue
        position = end + len(closing)  # the end of a block of reasoning
        ends = _continued(sent, ends, _plain(sampled[begun : begin.start()]))
        ends |= _continued(sent, ends, _plain(sampled[begin.start() : position]))
        ends, begun = set(sorted(ends)[-_MAX_ALIGNMENTS:]), position
    if len(sent) in _continued(sent, ends, _plain(sampled[begun:])):
        return ""
    ours = _plain(sampled)
    at = common_prefix(sent, ours)
    return f"{_short(sent[at:])} where the model's continues with {_short(ours[at:])}"


def _continued(text: str, ends: set[int], part: str) -> set[int]:
    """Return the positions where `part` ends in `text` if it begins at one of `ends`."""
    return {end + len(part) for end in ends if text.startswith(part, end)}


def _plain(text: str) -> str:
    text = _TAG.sub("", text)
    return "".join(c for c in text if not c.isspace() and c not in "\"'`\\").casefold()


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:36]} ...")
