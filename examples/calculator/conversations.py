"""Solved problems as chat conversations, and conversations as token ids with labels.

The ids come from the chat template, so that a warm-started model sees the same forms in rollouts
as in its training: a prompt ends with the generation prompt, an assistant turn ends with
`<|im_end|>`. Labels are the ids of assistant turns, including `<|im_end|>`, and `IGNORED`
everywhere else.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .problems import Row
from .tool import TOOL_SCHEMA, calculate

IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One conversation: token ids and labels of equal length."""

    ids: list[int]
    labels: list[int]


def solved_conversation(row: Row) -> list[dict[str, Any]]:
    """Return the messages of a perfect attempt: a call for each step, then the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for a, operation, b in row["steps"]:
        arguments = {"a": a, "operation": operation, "b": b}
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(calculate(**arguments))})
    messages.append({"role": "assistant", "content": f"The answer is {row['answer']}."})
    return messages


def conversation_text(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """Render the whole conversation with the chat template."""
    messages = solved_conversation(row)
    return tokenizer.apply_chat_template(messages, tools=[TOOL_SCHEMA], tokenize=False)


def encode(tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> list[Example]:
    """Encode each row's conversation as an example."""
    return encode_texts(tokenizer, [conversation_text(tokenizer, row) for row in rows])


def encode_copying(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[Example]:
    """Encode, for each row of numbers, a conversation in which the assistant repeats them."""
    lines = [" ".join(map(str, row)) for row in rows]
    chats = [[{"role": role, "content": line} for role in ("user", "assistant")] for line in lines]
    return encode_texts(
        tokenizer, [tokenizer.apply_chat_template(c, tokenize=False) for c in chats]
    )


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Example]:
    """Encode rendered conversations as examples."""
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return [
        Example(ids, _assistant_labels(ids, opening, end))
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]


def _assistant_labels(ids: list[int], opening: list[int], end: int) -> list[int]:
    labels = [IGNORED] * len(ids)
    position = 0
    while position < len(ids):
        if ids[position] == opening[0] and ids[position : position + len(opening)] == opening:
            start = position + len(opening)
            position = ids.index(end, start) + 1
            labels[start:position] = ids[start:position]
        else:
            position += 1
    return labels
