"""Check how the bridge works with a model's chat template.

    python -m turnwise.trajectory.check_template MODEL [--chat-template NAME|FILE]

MODEL is a folder or a Hugging Face name of a model or tokenizer. Each case is a conversation
whose last turn is written as the template writes it. The bridge builds the next turn's prompt,
and the result is compared with the template's rendering of the whole conversation. The last line
names the parts that the template silently leaves out.
"""

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from turnwise.errors import InputError, first_line
from turnwise.trajectory.bridge import THOUGHT_END, bridge, sampled_text, up_to_end
from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.left_out import left_out
from turnwise.trajectory.turn import Message

TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    }
]


class Verdict(NamedTuple):
    """A verdict in words, to be printed after the number of its cases."""

    short: str
    long: str


VERDICTS = {
    "exact": Verdict("exact", "bridged, and the text is the template's rendering"),
    "keeps": Verdict(
        "keeping the sampled text",
        "bridged; the template would rewrite earlier turns, the model sees its own",
    ),
    "forks": Verdict("starting a new branch", "a new branch begins here"),
    "refuses": Verdict("refused by the template", "the template does not take such a conversation"),
}


@dataclass(frozen=True)
class CaseResult:
    """The bridge's result in one case."""

    case: str
    verdict: str
    """exact, keeps, forks or refuses; see `VERDICTS`."""
    detail: str = ""
    """The reason for `forks` and `refuses`, the difference from the template's rendering for
    `keeps`, else ""."""


def check_template(template: ChatTemplate) -> list[CaseResult]:
    """Try the bridge on every kind of conversation that agent loops make. Raise InputError if there
    is no template."""
    if template.missing:
        raise InputError(template.missing)
    user, more = _message("user", "How is it in Oslo?"), _message("user", "And tomorrow?")
    system = _message("system", "Be brief.")
    answer = _message("assistant", "It rains.")
    cut = _message("assistant", "It rai")
    thought = _message("assistant", f"<think>\nI know it.\n{THOUGHT_END}\n\nIt rains.")
    one, two = _calling("Oslo"), _calling("Oslo", "Bergen")
    result, other = (
        _message("tool", content, name="weather", tool_call_id=f"call{index:05d}")
        for index, content in enumerate(("rain", "sun"))
    )
    case = partial(_try, template)
    return [
        case("an answer, then the user", [user], answer, [more]),
        case("under a system message", [system, user], answer, [more]),
        case("reasoning and an answer, then the user", [user], thought, [more]),
        case("an answer cut off, then the user", [user], cut, [more], cut_off=True),
        case("a tool call, then its result", [user], one, [result], TOOLS),
        case("two calls, then two results", [user], two, [result, other], TOOLS),
        case("a call, then its result and the user", [user], one, [result, more], TOOLS),
        case("an answer after a call, then the user", [user, one, result], answer, [more], TOOLS),
    ]


def _message(role: str, content: str, **more: object) -> Message:
    return {"role": role, "content": content, **more}


def _calling(*cities: str) -> Message:
    calls = [
        {
            "type": "function",
            "id": f"call{index:05d}",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for index, city in enumerate(cities)
    ]
    return _message("assistant", "", tool_calls=calls)


def _try(
    template: ChatTemplate,
    case: str,
    before: list[Message],
    turn: Message,
    after: list[Message],
    tools: Tools | None = None,
    cut_off: bool = False,
) -> CaseResult:
    try:
        opening = template.render_text(before, tools=tools)
        sampled = str(turn["content"])
        if not cut_off:  # the model samples the turn up to the token that ends it
            ended = template.render_text([*before, turn], tools=tools, add_generation_prompt=False)
            found = sampled_text(template, opening, ended, turn, tools)
            if found is None:  # the template writes a finished turn differently
                said = sampled.rpartition(THOUGHT_END)[2].strip()
                found = up_to_end(template, ended[ended.rfind(said or "weather") :], tools)
            sampled = found
        whole = template.render_text([*before, turn, *after], tools=tools)
    except Exception as error:  # a template may raise anything
        return CaseResult(case, "refuses", f"{type(error).__name__}: {error}")
    result = bridge(
        template,
        prompt_token_ids=template.encode(opening),
        completion_token_ids=template.encode(sampled),
        new_messages=after,
        tools=tools,
    )
    if result.token_ids is None:
        return CaseResult(case, "forks", f"{result.fork_reason}: {result.detail}")
    text, rendered = (
        template.decode_all(ids) for ids in (result.token_ids, template.encode(whole))
    )
    if text == rendered:
        return CaseResult(case, "exact")
    names = "as the template renders it", "as the model sees it"
    lines = difflib.unified_diff(rendered.splitlines(), text.splitlines(), *names, lineterm="", n=1)
    return CaseResult(case, "keeps", "\n".join(lines))


def report(results: Sequence[CaseResult], hidden: Sequence[str] = ()) -> str:
    """Return the results of the cases, and the result of `left_out`, as lines for people."""
    lines = []
    for result in results:
        lines.append(f"{result.verdict:8} {result.case}")
        lines += [f"           {line}" for line in result.detail.splitlines()]
    counts = Counter(result.verdict for result in results)
    lines += ["", f"{len(results)} cases:"]
    lines += [f"{n:3d} {VERDICTS[verdict].long}" for verdict, n in counts.most_common()]
    if hidden:
        lines.append(f"left out: {', '.join(hidden)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m turnwise.trajectory.check_template",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="Template to use instead, as model.chat_template names it.",
    )
    options = parser.parse_args(arguments)
    from transformers import AutoTokenizer  # a second to import

    from turnwise.config.data import template_text  # imports the whole configuration

    try:
        source = options.chat_template and template_text(options.chat_template)
    except ValueError as error:
        sys.exit(f"check_template: --chat-template: {error}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        sys.exit(f"check_template: {options.model} cannot be loaded: {first_line(error)}")
    template = ChatTemplate(tokenizer, chat_template=source)
    try:
        findings = check_template(template)
    except InputError as error:
        sys.exit(f"check_template: {error}")
    sys.stdout.write(report(findings, left_out(template, TOOLS)) + "\n")


if __name__ == "__main__":
    main()
