"""Text and bytes of token ids, from `tokenizer.json` alone: no model library is imported."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from turnwise.core.files import numbered
from turnwise.core.gguf import converted
from turnwise.core.json_types import JsonObject

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTE_OF = {chr(value): value for value in _PRINTABLE} | {
    chr(256 + number): value for number, value in enumerate(_OTHERS)
}
"""GPT-2's table: printable bytes are themselves, the others follow from 256 on."""


class TokenTexts:
    """The texts of a tokenizer's ids, by its `tokenizer.json`; None knows no text."""

    def __init__(self, path: Path | None) -> None:
        self._bytes: dict[int, bytes] = {}
        self._special: set[int] = set()
        if path is None:
            return
        tree: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tree["model"].get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        decode = _of_byte_level if "ByteLevel" in json.dumps(tree.get("decoder")) else _of_pieces
        self._bytes = {number: decode(token) for token, number in vocabulary.items()}
        for added in tree.get("added_tokens", ()):
            self._bytes[added["id"]] = added["content"].encode()
            self._special |= {added["id"]}

    def of(self, ids: Iterable[int]) -> JsonObject:
        """Return `[text, bytes as hex, whether the token is an added one]` by id, as JSON has it.

        Bytes that are no whole character are shown as `\\xNN`. Unknown ids are left out.
        """
        return {
            str(token): [
                self._bytes[token].decode("utf-8", "backslashreplace"),
                self._bytes[token].hex(" "),
                token in self._special,
            ]
            for token in sorted(ids)
            if token in self._bytes
        }


def find_tokenizer(run: Path, config: Mapping[str, object]) -> Path | None:
    """Return the `tokenizer.json` of a run, or None if it is gone.

    Looks in the run's checkpoints, at `model.tokenizer` and `model.path` (from the working
    directory, and from the folder above `runs`), and in the cache of the Hugging Face Hub.
    """
    folders = [*reversed(numbered(run / "checkpoints", "step")), run / "merged"]
    names = [str(config[key]) for key in ("model.tokenizer", "model.path") if config.get(key)]
    for name in names:
        own = converted(name)
        folders += [Path(name), run.resolve().parent.parent / name, *([own] if own else [])]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    for name in names:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # downloaded before; nothing is downloaded
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, "tokenizer.json")
            if isinstance(cached, str):
                return Path(cached)
    return None


def _of_byte_level(token: str) -> bytes:
    """Return the bytes that a byte-level token stands for: one printable character each."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _of_pieces(token: str) -> bytes:
    if found := _BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("\u2581", " ").encode()
