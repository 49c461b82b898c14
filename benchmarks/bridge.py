"""Time to the next turn's prompt: the bridge against rendering everything again.

    python -m benchmarks.bridge [--model DIR] [--chat-template FILE] [--quick]

For histories of 1k to 128k tokens and 200 new tokens, the median time in microseconds of the
bridge, of the whole next prompt as a list (the bridge and a copy of the history), and of
rendering and tokenising the whole conversation. Without `--model`, the tokenizer and the template
are the demo's.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.report import Claim, parser, quotients, report
from examples.calculator.tokenizer import build_tokenizer
from turnwise.trajectory import Bridge, ChatTemplate, bridge

HISTORIES = (1_000, 8_000, 32_000, 128_000)
NEW_TOKENS = 200


def conversation(template: ChatTemplate, tokens: int) -> list[dict[str, Any]]:
    """Return turns of a user and an assistant, whose rendering has about `tokens` tokens."""
    pair = [
        {"role": "user", "content": text_of(template, 150, "Please work out 12 plus 345")},
        {"role": "assistant", "content": text_of(template, 150, "The answer is 357")},
    ]
    each = len(template.render(pair * 2)) - len(template.render(pair))
    return pair * max(1, tokens // each) + pair[:1]


def text_of(template: ChatTemplate, tokens: int, words: str) -> str:
    """Repeat `words` until the text has about `tokens` tokens."""
    return " ".join([words] * (tokens // len(template.encode(" " + words)) + 1))


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median of `repeats` runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    """Run the benchmark and print the table."""
    made = parser("bridge", __doc__)
    made.add_argument("--model", type=Path)
    made.add_argument("--chat-template", type=Path)
    made.add_argument("--repeats", type=int, default=200)
    options = made.parse_args()
    repeats = 5 if options.quick else options.repeats
    source = options.chat_template.read_text() if options.chat_template else None
    tokenizer = (
        AutoTokenizer.from_pretrained(options.model) if options.model else build_tokenizer(0)
    )
    template = ChatTemplate(tokenizer, chat_template=source)
    backend = tokenizer.backend_tokenizer

    said = template.encode(text_of(template, 100, "I have to add and call the tool."))
    completion = [*said, template.tokenizer.eos_token_id]
    results = [{"role": "tool", "content": text_of(template, NEW_TOKENS, "12 + 345 = 357")}]
    turn = {"role": "assistant", "content": template.decode(completion)}
    print(f"{'history':>8} {'new':>5} {'bridge':>10} {'as a list':>10} {'re-render':>12}   (us)")
    bridges, rendered_again = list[float](), list[float]()
    for tokens in HISTORIES:
        messages = conversation(template, tokens)
        prompt = template.render(messages)

        def bridged() -> Bridge:
            return bridge(
                template,
                prompt_token_ids=prompt,  # noqa: B023 (only used in this round)
                completion_token_ids=completion,
                new_messages=results,
            )

        def rendered() -> list[int]:
            text = template.render_text([*messages, turn, *results])  # noqa: B023
            return list(backend.encode(text, add_special_tokens=False).ids)  # without our caches

        assert bridged().token_ids == rendered(), "the bridge and the template differ"
        bridges.append(microseconds(bridged, repeats))
        listed = microseconds(lambda: bridged().token_ids, repeats)
        whole = microseconds(rendered, max(3, repeats // (1 + tokens // 1000)))
        rendered_again.append(whole)
        new = len(bridged().added_token_ids)
        print(f"{len(prompt):8d} {new:5d} {bridges[-1]:10.0f} {listed:10.0f} {whole:12.0f}")
    at = HISTORIES.index(32_000)
    report(
        [
            Claim(
                "next turn's ids after 32k tokens of history",
                "us",
                [bridges[at]],
                "render and tokenise again",
                [rendered_again[at]],
                quotients([rendered_again[at]], [bridges[at]]),
                "times faster",
                at_least=100,
            ),
            Claim(
                "the same after 128k",
                "us",
                [bridges[-1]],
                "after 1k",
                [bridges[0]],
                quotients([bridges[-1]], [bridges[0]]),
                at_most=1.2,
            ),
        ],
        options,
    )


if __name__ == "__main__":
    main()
