"""The splice for callers that hold only a re-rendered conversation: keep the model's own ids.

Where messages come back as text, the whole conversation is rendered and tokenised anew, and what
the model sampled comes back as other ids. `replace_prefix_tokens` puts the model's ids back.
Everything that it cannot prove is an error: a seam that is not unique, history that was edited,
an assistant turn that the template dropped. `bridge` needs none of this, and no whole rendering.
"""

import re
from collections.abc import Sequence
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
            `decode`, the texts of earlier assistant turns are compared too; without one, a turn
            that was edited by the caller cannot be told from one that tokenises differently.
        model_prefix_token_ids: The last call's prompt and what it generated, with or without
            the final EOS; empty before the first call.
        template_prefix_token_ids: The conversation rendered up to and including the last
            assistant message, without generation prompt.
        template_token_ids: The whole conversation rendered, with generation prompt.

    Raises:
        TrajectoryError: reason `no_turn_end`, when the rendered assistant turn holds no EOS;
            `turn_lost`, when the whole rendering does not hold the last assistant turn in one
            certain place; `history_changed`, when the rendering's history is not the model's.
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
    seam = _seam(prefix, end, template, eos)
    header = _turn_opening(prefix, end, template[seam + 1 :], eos)
    if template[: len(prefix)] != prefix:
        # More than one turn may have changed: what stands before the seam must be the same turns.
        _check_history(None, template[: seam + 1], prefix[: end + 1], header, eos)
    finished = model if model[-1] == eos else [*model, eos]
    _check_history(tokenizer, finished, prefix[: end + 1], header, eos)
    return [*finished[:-1], *template[seam:]]


def _seam(prefix: list[int], end: int, template: list[int], eos: int) -> int:
    """Where in `template` the EOS stands that is `prefix[end]`.

    A template may change what stands inside the last assistant turn once messages follow, such
    as drop its reasoning: then the rendering up to the seam is a beginning of `prefix` and an
    ending of it, with one gap between them.
    """
    if template[: len(prefix)] == prefix:
        return end
    start = common_prefix(prefix, template)
    seams = [
        position
        for position in range(start, len(template))
        if template[position] == eos
        and start + _common_suffix(prefix[: end + 1], template[: position + 1]) > position
    ]
    if len(seams) != 1:
        raise TrajectoryError(
            "turn_lost",
            "the chat template renders the last assistant turn otherwise once messages follow, "
            f"and its end could be at {len(seams)} places; nothing was spliced",
        )
    return seams[0]


def _turn_opening(prefix: list[int], end: int, following: list[int], eos: int) -> list[int]:
    """The ids that open an assistant turn: what stands in the last one and ends `following`."""
    previous = _last_index(prefix[:end], [eos])
    last_turn = prefix[0 if previous is None else previous + 1 : end]
    length = 0
    while length < len(following) and following[-1 - length] != eos:
        if _last_index(last_turn, following[-1 - length :]) is None:
            break
        length += 1
    opening = following[len(following) - length :]
    if not opening or (_last_index(prefix, opening) or 0) > end:
        raise TrajectoryError(
            "no_turn_end",
            "the rendered conversation does not open and end its assistant turns alike; nothing "
            "was spliced",
        )
    return opening


def _check_history(
    tokenizer: Any, model: list[int], template: list[int], opening: list[int], eos: int
) -> None:
    """Both sides may differ inside assistant turns alone, and there only as renderings do."""
    ours, theirs = 0, 0
    last_opening = _last_index(template, opening)
    while True:
        same = common_prefix(model[ours:], template[theirs:])
        ours, theirs = ours + same, theirs + same
        if ours == len(model) and theirs == len(template):
            return
        opened = _last_index(template[:theirs], opening)
        if opened is None or ours == len(model) or theirs == len(template):
            break
        start = opened + len(opening)
        if opened == last_opening and _last_index(model[ours:], opening) is None:
            our_end, their_end = len(model) - 1, len(template) - 1
        elif eos not in template[start:theirs] and eos in model[ours:]:
            our_end, their_end = model.index(eos, ours), template.index(eos, theirs)
        else:
            break
        _compare_texts(
            tokenizer, model[ours - (theirs - start) : our_end], template[start:their_end]
        )
        ours, theirs = our_end, their_end
    raise TrajectoryError(
        "history_changed",
        f"the conversation sent differs from the model's at its token {theirs}, outside of "
        "assistant turns; start a new one for an edited or shortened history",
    )


_REASONING_END = re.compile(r"<[^<>]*>|\[/\w+\]")
_EMPTY_REASONING = re.compile(r"<(\w+)>\s*</\1>")


def _compare_texts(tokenizer: Any, model: list[int], template: list[int]) -> None:
    """One assistant turn, as sampled and as rendered again.

    White space, quotes and letter case may differ, as JSON does that was parsed and printed
    again; reasoning that ends in a tag may be gone from the front, an empty one may be new.
    """
    if not callable(getattr(tokenizer, "decode", None)):
        return
    ours, theirs = str(tokenizer.decode(model)), str(tokenizer.decode(template))
    theirs = _EMPTY_REASONING.sub("", theirs)
    ours = _EMPTY_REASONING.sub("", ours)
    ours_plain, theirs_plain = _letters(ours), _letters(theirs)
    if ours_plain == theirs_plain:
        return
    if any(_letters(ours[tag.end() :]) == theirs_plain for tag in _REASONING_END.finditer(ours)):
        return
    raise TrajectoryError(
        "history_changed",
        f"an assistant turn was sent as {_short(theirs)} where the model had said {_short(ours)}; "
        "start a new conversation for an edited history",
    )


def _letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).casefold()


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}")


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
