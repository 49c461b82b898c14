"""A vLLM logits processor that makes a real engine sample the tokens that a test chooses.

`extra_args={"script": [turn, turn, ...]}`, each turn a list of token ids: the first turn that
the prompt does not contain yet is sampled, token by token. Over HTTP the turns are one list, with
-1 between them. The engine, its log-probs and its stop conditions are the real ones. A request with
`extra_args={"poison": True}` ends the engine.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class ForcedTokens(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _scripted)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (turn, sampled) in self._rows.items():
            if len(sampled) < len(turn):
                token = turn[len(sampled)]
                kept = logits[row, token].item()
                logits[row] = float("-inf")
                logits[row, token] = kept
        return logits


def _scripted(
    params: Any, prompt: list[int] | None, sampled: list[int]
) -> tuple[list[int], list[int]] | None:
    if (params.extra_args or {}).get("poison"):
        raise RuntimeError("a logits processor that fails on this request")
    for turn in _turns((params.extra_args or {}).get("script", [])):
        start = _find(prompt or [], turn)
        if start is None:
            return turn, sampled
        prompt = (prompt or [])[start + len(turn) :]
    return None


def _turns(script: list[Any]) -> list[list[int]]:
    if script and isinstance(script[0], list):
        return script
    turns: list[list[int]] = [[]]
    for token in script:
        if token == -1:
            turns.append([])
        else:
            turns[-1].append(token)
    return [turn for turn in turns if turn]


def _find(ids: Sequence[int], part: Sequence[int]) -> int | None:
    starts = range(len(ids) - len(part) + 1)
    return next((i for i in starts if list(ids[i : i + len(part)]) == list(part)), None)
