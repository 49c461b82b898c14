"""A question that is answered by searching a corpus, in the shape of Search-R1 (arXiv:2503.09516).

The model writes a query between <search> and </search>, the best passages are inserted into the
same turn between <information> and </information>, and the model continues from there, until it
answers between <answer> and </answer>. The reward is 1 for the exact answer.
"""

import json
import re
import string
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.core.optional import optional
from turnwise.errors import InputError

PASSAGES = 2
"""Number of passages that a search returns."""
INSTRUCTION = (
    "Answer the question. You may search between <search> and </search>, as often as you need; the "
    "passages follow between <information> and </information>. Give the answer alone between "
    "<answer> and </answer>."
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Corpus:
    """Passages of a JSON Lines file with the fields `title` and `text`, ranked by BM25.

    The file is read with the first search.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def search(self, query: str, most: int) -> list[str]:
        """Return the best passages that have a word of the query, at most `most`."""
        passages, index = self._indexed
        words = _words([query])
        if not words[0]:
            return []
        found, scores = index.retrieve(words, k=min(most, len(passages)), show_progress=False)
        ranked = zip(found[0], scores[0], strict=True)
        return [passages[number] for number, score in ranked if score > 0]

    @cached_property
    def _indexed(self) -> tuple[list[str], Any]:
        rows = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        passages = [f"{row['title']}: {row['text']}" for row in rows]
        index = _bm25s().BM25()
        index.index(_words(passages), show_progress=False)
        return passages, index


def _bm25s() -> Any:
    return optional("bm25s", "search", "a search of the corpus")


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = _bm25s().tokenize(texts, return_ids=False, show_progress=False)
    return words


CORPUS = Corpus(Path(__file__).with_name("corpus.jsonl"))
"""The corpus that all trajectories share."""


def search(query: str) -> str:
    """Search the corpus, and return the best passages.

    Args:
        query: Words to look for.
    """
    passages = CORPUS.search(query, PASSAGES)
    numbered = (f"({number}) {passage}" for number, passage in enumerate(passages, start=1))
    return "\n".join(numbered) or "No passage found."


class Question:
    """One attempt at a row with the fields `question` and `answers`, a list of texts."""

    def __init__(self, row: dict[str, Any]) -> None:
        for name in ("question", "answers"):
            if name not in row:
                raise InputError(f"A question for search needs the field '{name}'.")
        self.problem = [{"role": "user", "content": f"{INSTRUCTION}\n\n{row['question']}"}]
        self.tools = [search]
        self._answers = {normalized(answer) for answer in row["answers"]}

    def reward(self, trajectory: Any) -> float:
        """Return 1.0 if the last <answer> after the last result is right, else 0.0."""
        said = _ANSWER.findall(trajectory.final_text.rpartition("</information>")[2])
        return float(bool(said) and normalized(said[-1]) in self._answers)

    def metrics(self, trajectory: Any) -> dict[str, float]:
        """Return the number of searches."""
        return {"searches": trajectory.events["tool_call"]}


def normalized(answer: str) -> str:
    """Return an answer in lower case, without articles, punctuation and extra spaces."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))
