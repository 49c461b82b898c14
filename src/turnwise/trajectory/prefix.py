"""The splice for callers that hold only a re-rendered conversation: keep the model's own ids.

Where messages come back as text, the whole conversation is rendered and tokenised anew, and what
the model sampled comes back as other ids. `replace_prefix_tokens` puts the model's ids back, as
NeMo-RL's rule of that name does: the model's ids up to its last turn's end, and from that end on
the template's. Two things differ. The end is found by what stands around it, because a template
that drops reasoning moves it; and a result that would lose a message, or keep a turn that the
caller has edited, is an error. `bridge` needs none of this, and no whole rendering.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.errors import TrajectoryError
from turnwise.trajectory.trajectory import common_prefix


def replace_prefix_tokens(
    tokenizer: Any,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """The whole conversation's ids, with the model's own up to the end of its last turn.

    Args:
        tokenizer: Anything with `eos_token_id`, the id that ends an assistant turn. With a
            `decode`, both histories are compared as texts; without one, by the ids outside of
            assistant turns, as far as the rendering tells where those begin.
        model_prefix_token_ids: The last call's prompt and what it generated, with or without
            the final EOS; empty before the first call.
        template_prefix_token_ids: The conversation rendered up to and including the last
            assistant message, without generation prompt.
        template_token_ids: The whole conversation rendered, with generation prompt.

    Raises:
        TrajectoryError: reason `no_turn_end`, when the rendered assistant turn holds no EOS;
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
    if eos not in prefix:
        raise TrajectoryError(
            "no_turn_end", f"the rendered conversation holds no end-of-turn token {eos}"
        )
    end = len(prefix) - 1 - prefix[::-1].index(eos)
    finished = model if model[-1] == eos else [*model, eos]
    seam = _seam(prefix, end, template, eos)
    rendered, again = prefix[: end + 1], template[: seam + 1]
    if callable(getattr(tokenizer, "decode", None)):
        # A template may have changed more than one turn: these must be the same turns.
        if again != rendered and _changes(tokenizer, rendered, again):
            raise _turn_lost("other turns differ too")
        if change := _changes(tokenizer, finished, rendered):
            raise TrajectoryError(
                "history_changed",
                f"the conversation was sent with {change}; start a new one for an edited history",
            )
    else:
        opening = _turn_opening(prefix, end, template[seam + 1 :], eos)
        if again != rendered and (opening is None or not _are_alike(again, rendered, opening, eos)):
            raise _turn_lost("other turns differ too")
        if opening is not None and not _are_alike(finished, rendered, opening, eos):
            raise TrajectoryError(
                "history_changed",
                "the conversation sent differs from the model's outside of assistant turns; start "
                "a new one for an edited or shortened history",
            )
    return [*finished[:-1], *template[seam:]]


def _seam(prefix: list[int], end: int, template: list[int], eos: int) -> int:
    """Where in `template` the EOS stands that is `prefix[end]`.

    A template may change what stands inside assistant turns once messages follow, such as drop
    their reasoning. Mostly the rendering up to the seam is then a beginning of `prefix` and an
    ending of it, with one gap between them. Where that leaves a choice, or none, the seam is where
    as many turns have ended; the caller checks that they are the same turns.
    """
    if template[: len(prefix)] == prefix:
        return end
    start = common_prefix(prefix, template)
    ends = [position for position, token in enumerate(template) if token == eos]
    seams = [
        position
        for position in ends
        if position >= start
        and start + _common_suffix(prefix[: end + 1], template[: position + 1]) > position
    ]
    if len(seams) == 1:
        return seams[0]
    before = prefix[:end].count(eos)
    counted = ends[before : before + 1]
    if not counted or (seams and counted[0] not in seams):
        raise _turn_lost(f"its end could be at {len(seams)} places")
    return counted[0]


def _turn_lost(why: str) -> TrajectoryError:
    return TrajectoryError(
        "turn_lost",
        "the chat template renders the last assistant turn otherwise once messages follow, and "
        f"{why}; nothing was spliced",
    )


def _turn_opening(prefix: list[int], end: int, following: list[int], eos: int) -> list[int] | None:
    """The ids that open an assistant turn; None where the rendering does not tell.

    They stand in the last turn, and at the end of `following` as its generation prompt, before
    whatever that opens beside the turn (`<think>`).

    Raises:
        TrajectoryError: when the last assistant turn has no EOS of its own.
    """
    before = _last_index(prefix[:end], [eos])
    last_turn = prefix[0 if before is None else before + 1 : end]
    after = _last_index(following, [eos])
    prompt = following[0 if after is None else after + 1 :]
    length = 0
    while length < len(prompt) and _last_index(last_turn, prompt[-1 - length :]) is not None:
        length += 1
    opening = prompt[len(prompt) - length :] or prompt[: common_prefix(prompt, last_turn)]
    if not opening:
        opening, own = prompt, _last_index(prefix, prompt) if prompt else None
        if own is None or own <= end:
            return None
    if (_last_index(prefix, opening) or 0) > end:
        raise TrajectoryError(
            "no_turn_end",
            "the last assistant turn of the rendered conversation does not end as the others do",
        )
    return opening


def _are_alike(model: list[int], template: list[int], opening: list[int], eos: int) -> bool:
    """Whether both sides differ inside assistant turns alone."""
    ours, theirs = 0, 0
    last_opening = _last_index(template, opening)
    while True:
        same = common_prefix(model[ours:], template[theirs:])
        ours, theirs = ours + same, theirs + same
        if ours == len(model) and theirs == len(template):
            return True
        opened = _last_index(template[:theirs], opening)
        if opened is None or ours == len(model) or theirs == len(template):
            return False
        start = opened + len(opening)
        if opened == last_opening and _last_index(model[ours:], opening) is None:
            ours, theirs = len(model) - 1, len(template) - 1
        elif eos not in template[start:theirs] and eos in model[ours:]:
            ours, theirs = model.index(eos, ours), template.index(eos, theirs)
        else:
            return False


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
_READINGS = 64
"""Ways to read the same text that are followed at a time."""
_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")


def _changes(tokenizer: Any, model: list[int], template: list[int]) -> str:
    """The difference of a rendered history from the sampled one in words; "" if there is none.

    White space, quotes, letter case and tags may differ, as in JSON that was parsed and printed
    again. Reasoning between its tags may be gone, and an empty one may be new.
    """
    said, sent = str(tokenizer.decode(model)), _plain(str(tokenizer.decode(template)))
    begun, known = 0, {0}
    for start, end in _reasoning(said):
        known = _continued(sent, known, _plain(said[begun:start]))
        known |= _continued(sent, known, _plain(said[start:end]))
        known, begun = set(sorted(known)[-_READINGS:]), end
    last = _plain(said[begun:])
    if len(sent) in _continued(sent, known, last):
        return ""
    at = common_prefix(sent, _plain(said))
    return f"{_short(sent[at:])} where the model's goes on with {_short(_plain(said)[at:])}"


def _reasoning(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each closed block of reasoning."""
    position, endless = 0, set()
    while (begin := _REASONING_BEGINS.search(text, position)) is not None:
        closing, position = _REASONING[begin[0]], begin.end()
        end = -1 if closing in endless else text.find(closing, position)
        if end < 0:
            endless.add(closing)
        else:
            position = end + len(closing)
            yield begin.start(), position


def _continued(text: str, ends: set[int], part: str) -> set[int]:
    """Where `part` ends in `text` if it begins where one of `ends` is."""
    return {end + len(part) for end in ends if text.startswith(part, end)}


def _plain(text: str) -> str:
    text = _TAG.sub("", text)
    return "".join(c for c in text if not c.isspace() and c not in "\"'`\\").casefold()


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:36]} ...")


def _common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def _last_index(ids: list[int], part: list[int]) -> int | None:
    for start in range(len(ids) - len(part), -1, -1):
        if ids[start] == part[0] and ids[start : start + len(part)] == part:
            return start
    return None
