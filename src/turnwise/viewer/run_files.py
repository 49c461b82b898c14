"""Run folders as the viewer reads them: by byte ranges, while a run may still write.

metrics.jsonl is read from an offset on. A file of trajectories is scanned once, for the byte range
and a summary of each line; then only the range of a trajectory is read. Without a run, the viewer
shows two recorded runs, which `examples/calculator/recording.py` trained. The archive of these runs
has the files that the viewer reads, and the tokenizer.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from turnwise.chat.messages import said
from turnwise.config.load import masked_value, read_tree
from turnwise.core.files import numbered
from turnwise.core.gguf import converted
from turnwise.core.images import MAX_BYTES
from turnwise.core.json_types import JsonObject, leaves
from turnwise.core.run_files import judgements
from turnwise.core.untrusted_files import open_untrusted, path_of, read_untrusted
from turnwise.errors import InputError, TrajectoryError
from turnwise.observe.alarms import alarms_of_run
from turnwise.observe.conversations import NO_TRAJECTORY
from turnwise.observe.timeline import TIMELINE
from turnwise.run.token_values import TokenColumns, read_columns
from turnwise.trajectory import Trajectory, audit
from turnwise.trajectory.images import FILE, FOLDER, hash_of
from turnwise.viewer.template_diff import Comparison, comparison

RECORDING = Path(__file__).with_name("demo_runs.zip")  # the archive of the recorded runs
_EXCERPT = 160  # characters of a question or an answer in a summary
_INDICES = 8  # files whose summaries are kept in memory, for each run
_OFFSET = re.compile(r"(0|\d{1,18}-[0-9a-f]{16})?")
_NAME = re.compile(r"(step|eval)-\d+|eval|rollouts")
_SEPARATE = ("eval", "rollouts")  # files that these commands write

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [value for value in range(256) if value not in _PRINTABLE]
_BYTE_OF = {chr(value): value for value in _PRINTABLE} | {
    chr(256 + number): value for number, value in enumerate(_OTHERS)
}
"""GPT-2's table: a printable byte is its own character; other bytes are characters from 256 on."""


class FileIndex(NamedTuple):
    """The lines of one file of trajectories."""

    version: tuple[int, int]  # size and time of change of the file that was scanned
    ranges: list[tuple[int, int]]  # start and length of each line, in bytes
    summaries: list[JsonObject]  # one for each line: what lists and filters show


def read_vocabulary(path: Path | None) -> dict[int, tuple[bytes, bool]]:
    """Return the bytes of each token of a `tokenizer.json`, and whether it is an added token."""
    if path is None:
        return {}
    with open_untrusted(path) as file:
        tree: JsonObject = json.load(file)
    tokens = tree["model"].get("vocab", {})
    if isinstance(tokens, list):  # Unigram: pairs of token and score
        tokens = {token: number for number, (token, _) in enumerate(tokens)}
    by_bytes = "ByteLevel" in json.dumps(tree.get("decoder"))

    def decode(token: str) -> bytes:
        if by_bytes:  # one printable character for each byte
            printable = all(character in _BYTE_OF for character in token)
            return bytes(map(_BYTE_OF.__getitem__, token)) if printable else token.encode()
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    known = {number: (decode(token), False) for token, number in tokens.items()}
    added = tree.get("added_tokens", ())
    return known | {token["id"]: (token["content"].encode(), True) for token in added}


def texts_of(vocabulary: Mapping[int, tuple[bytes, bool]], ids: Iterable[int]) -> JsonObject:
    """Return `[text, bytes as hex, whether it is an added token]` of each known id; bytes that
    do not form a whole character are shown as `\\xNN`."""
    known = ((token, *vocabulary[token]) for token in sorted(ids) if token in vocabulary)
    return {
        str(token): [text.decode("utf-8", "backslashreplace"), text.hex(" "), added]
        for token, text, added in known
    }


class ViewedRun:
    """Reads one run folder; it is thread-safe. A missing file, line or turn raises a LookupError;
    an unreadable file or line raises an InputError."""

    def __init__(self, path: Path, name: str) -> None:
        try:
            open_untrusted(path / "config.yaml", path).close()
        except OSError as error:
            raise InputError(f"there is no run in {path} (a folder with config.yaml)") from error
        self.path, self.name = path, name
        self._indices: dict[str, FileIndex] = {}
        self._lock = threading.Lock()

    def describe(self) -> JsonObject:
        """Return the run's name, path and files of trajectories."""
        return {"name": self.name, "path": str(self.path), "files": self.files()}

    def may_be_running(self) -> bool:
        """Return whether a process may still write the run."""
        if sys.platform != "linux":  # a run needs Linux: this is another machine's folder
            return True
        from turnwise.core.stacks import may_be_running  # can be imported on Linux only

        return may_be_running(self.path)

    def rows(self, after: str = "") -> JsonObject:
        """Return the complete lines of metrics.jsonl after a position ("" is the beginning), and
        the position after these lines. If a resumed run has changed the bytes before the position,
        return all lines and set `reset`."""
        if not _OFFSET.fullmatch(after):
            raise InputError(f"{after!r} is no place in metrics.jsonl")
        path = self.path / "metrics.jsonl"
        data = self._read(path)
        start = int(after.partition("-")[0] or 0)
        reset = bool(start) and _place(data, start) != after
        start = 0 if reset else start
        end = data.rfind(b"\n") + 1
        lines = data[start:end].splitlines()
        try:
            rows = [parse(line) for line in lines if line.strip()]
        except ValueError as error:
            raise InputError(f"{path} has a line that cannot be read: {error}") from error
        return {"rows": rows, "offset": _place(data, max(start, end)), "reset": reset}

    def config(self, *, public: bool = False) -> dict[str, object]:
        """Return the configuration by dotted key; if `public`, secrets are masked."""
        tree = read_tree(self.path / "config.yaml")
        return dict(leaves(masked_value("", tree) if public else tree))

    def alarms(self) -> JsonObject:
        """Return the run's alarms, and an error if they cannot be computed."""
        try:
            found = alarms_of_run(self.path)
        except (InputError, ValueError, KeyError) as error:
            return {"alarms": [], "error": str(error)}
        return {"alarms": [asdict(alarm) for alarm in found], "error": None}

    def files(self) -> dict[str, int]:
        """Return the sizes of the files of trajectories by name, such as `step-0003`: steps,
        evaluations, then the files of separate commands."""
        found = [
            *numbered(self.path / "trajectories", "step", ".jsonl"),
            *numbered(self.path / "trajectories", "eval", ".jsonl"),
            *(self.path / f"{name}.jsonl" for name in _SEPARATE),
        ]
        sizes: dict[str, int] = {}
        for path in found:
            with suppress(OSError), open_untrusted(path, self.path) as file:
                sizes[path.stem] = os.fstat(file.fileno()).st_size
        return sizes

    def _read(self, path: Path) -> bytes:
        """Return the bytes of a file of the run folder; b"" if the file does not exist."""
        with self._opened(path) or BytesIO() as file:
            return file.read()

    def _opened(self, path: Path) -> BinaryIO | None:
        """Open a file of the run folder; None if the file does not exist."""
        try:
            return open_untrusted(path, self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise KeyError(name)
        return self.path / ("" if name in _SEPARATE else "trajectories") / f"{name}.jsonl"

    def _open(self, name: str) -> BinaryIO:
        """Open a file of trajectories."""
        try:
            return open_untrusted(self._file(name), self.path)
        except OSError:
            raise KeyError(name) from None

    def index(self, name: str) -> FileIndex:
        """Return the lines of a file of trajectories, scanned again only if it has changed."""
        with self._open(name) as file, self._lock:
            stat = os.fstat(file.fileno())
            version = stat.st_size, stat.st_mtime_ns
            kept = self._indices.pop(name, None)
            if kept is None or kept.version != version:
                kept, start = FileIndex(version, [], []), 0
                for number, line in enumerate(_whole_lines(file), start=1):
                    try:
                        kept.summaries.append(summarise(parse(line)))
                    except NO_TRAJECTORY as error:
                        why = f"{self._file(name)}, line {number} is no trajectory: {error}"
                        raise InputError(why) from error
                    kept.ranges.append((start, len(line)))
                    start += len(line)
            self._indices[name] = kept
            while len(self._indices) > _INDICES:
                del self._indices[next(iter(self._indices))]
        return kept

    def files_with(self, problem: str) -> JsonObject:
        """Return the names of the files that have trajectories of a problem."""
        start = f'{{"problem_id":{json.dumps(problem, ensure_ascii=False)},'.encode()
        found = list[str]()
        for name in self.files():
            with suppress(KeyError), self._open(name) as file:  # it was removed meanwhile
                if any(line.startswith(start) for line in _whole_lines(file)):
                    found.append(name)
        return {"files": found}

    def line(self, name: str, index: int) -> bytes:
        """Return one trajectory as the bytes of its line."""
        ranges = self.index(name).ranges
        if not 0 <= index < len(ranges):
            raise IndexError(index)
        start, length = ranges[index]
        with self._open(name) as file:
            file.seek(start)
            return file.read(length)

    def image(self, name: str, image: str) -> bytes:
        """Return an image of a file's trajectories by its name, `HASH.FORMAT`; raise
        TrajectoryError when the image's bytes have been changed."""
        if (known := FILE.fullmatch(image)) is None:
            raise KeyError(image)
        place = self._file(name).parent / FOLDER / image
        try:
            data = read_untrusted(place, MAX_BYTES, self.path)
        except OSError:
            raise KeyError(image) from None
        if hash_of(data) != known[1]:
            raise TrajectoryError("image_lost", f"{place} has been changed")
        return data

    def search(self, name: str, text: str) -> JsonObject:
        """Return the indices of the trajectories whose messages contain a text, ignoring case."""
        wanted = text.casefold()
        plain = text.isascii() and json.dumps(text)[1:-1] == text
        found = []
        ranges = self.index(name).ranges  # once: a run may be writing to the file
        with self._open(name) as file:
            for index, (start, length) in enumerate(ranges):
                file.seek(start)
                line = file.read(length)
                if plain and wanted.encode() not in line.lower():
                    continue
                tree = parse(line)
                spoken = (tree["messages"], *(turn.get("messages", ()) for turn in tree["turns"]))
                if any(wanted in said(message).casefold() for message in chain(*spoken)):
                    found.append(index)
        return {"found": found}

    def audit(self, name: str, index: int) -> JsonObject:
        return audit(self._trajectory(name, index)).to_dict()

    def _trajectory(self, name: str, index: int) -> Trajectory:
        line = self.line(name, index)
        try:
            return Trajectory.from_json(line.decode())
        except NO_TRAJECTORY as error:
            raise InputError(f"{name}, line {index + 1} is no trajectory: {error}") from error

    def judgements(self, name: str, index: int) -> JsonObject:
        """Return the requests to a trajectory's judges, and the judges' answers, by request key."""
        wanted = {each["request"] for each in self._trajectory(name, index).judgements}
        return dict(judgements(self.path, wanted)) if wanted else {}

    def token_values(self, name: str, index: int) -> JsonObject:
        """Return the values of a trajectory's trained tokens, if the run has them."""
        path = self.path / "training" / f"{self._file(name).stem}.safetensors"
        columns: TokenColumns = {}
        if (file := self._opened(path)) is not None:
            with file:
                columns = read_columns(path_of(file), index)
        return {key: np.nan_to_num(values).tolist() for key, values in columns.items()}

    def timeline(self, name: str) -> JsonObject:
        path = self.path / TIMELINE / f"{self._file(name).stem}.jsonl"
        try:
            return {"calls": [json.loads(line) for line in self._read(path).splitlines()]}
        except ValueError as error:
            raise InputError(f"{path} cannot be read: {error}") from error

    def vocabulary(self, name: str, *indices: int) -> JsonObject:
        """Return text and bytes of every token of some trajectories, by id."""
        ids: set[int] = set()
        for index in indices:
            for turn in parse(self.line(name, index))["turns"]:
                ids.update(turn["added_token_ids"], turn["completion_token_ids"])
        return texts_of(self._vocabulary, ids)

    @cached_property
    def _vocabulary(self) -> dict[int, tuple[bytes, bool]]:
        return read_vocabulary(find_tokenizer(self.path, self.config()))

    @cached_property
    def _compare(self) -> Comparison:
        model = read_tree(self.path / "config.yaml").get("model")
        tokenizer = find_tokenizer(self.path, self.config())
        return comparison(tokenizer, model if isinstance(model, dict) else {})

    def compare_with_template(self, name: str, index: int, leaf: int) -> JsonObject:
        """Return the `comparison` of a branch, with the `texts` of the ids in it."""
        compared = self._compare(self._trajectory(name, index), leaf)
        ids = {*compared.get("closing", ())}
        ids.update(*(rendered for _, _, rendered, _ in compared.get("pieces", ())))
        return compared | {"texts": texts_of(self._vocabulary, ids)}


def open_runs(paths: Sequence[Path]) -> dict[str, ViewedRun]:
    """Return run folders by unique name, in the order of `paths`."""
    runs: dict[str, ViewedRun] = {}
    for path in paths:
        name, number = path.resolve().name, 2
        while name in runs:
            name, number = f"{path.resolve().name}-{number}", number + 1
        runs[name] = ViewedRun(path, name)
    return runs


@contextmanager
def demo_runs() -> Iterator[list[Path]]:
    """Unpack the recorded runs for the length of a `with` block; return their folders."""
    with tempfile.TemporaryDirectory(prefix="turnwise-demo-") as place:
        with zipfile.ZipFile(RECORDING) as archive:
            archive.extractall(place)
        yield sorted(Path(place).iterdir())


def summarise(tree: JsonObject) -> JsonObject:
    """Return the summary of a trajectory that lists and filters show."""
    turns, messages = tree["turns"], tree["messages"]
    versions = [v for turn in turns for v in turn["weight_versions"][:: max(1, len(turns))]]
    versions += [turn["weight_versions"][-1] for turn in turns if turn["weight_versions"]]
    forks = Counter(turn["fork_reason"] for turn in turns if turn.get("fork_reason"))
    nothing: JsonObject = {}
    asked = next((m for m in messages if m.get("role") == "user"), nothing)
    answered = next((m for m in reversed(messages) if m.get("role") == "assistant"), nothing)
    # For each tool: the number of its answers, and the number of errors among them. An error begins
    # with "Error", as a `Toolbox` writes it, or has no name because the call was unreadable.
    tools: dict[str, list[int]] = {}
    names: dict[object, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or []:
            names[call.get("id")] = str((call.get("function") or call).get("name"))
        if message.get("role") == "tool":
            name = names.get(message.get("tool_call_id")) or message.get("name")
            counted = tools.setdefault(str(name or "an unreadable call"), [0, 0])
            counted[0] += 1
            counted[1] += not name or said(message).casefold().startswith("error")
    return {
        "problem": tree["problem_id"],
        "sample": tree.get("sample_index", 0),
        "environment": tree.get("environment", ""),
        "reward": tree.get("reward"),
        "parts": tree.get("reward_parts", {}),
        "status": tree.get("status", ""),
        "events": tree.get("events", {}),
        "metrics": tree.get("metrics", {}),
        "forks": dict(forks),
        "tools": tools,
        "turns": sum(not turn.get("same_call") for turn in turns),  # older files split a call
        "tokens": sum(sum(v >= 0 for v in turn["weight_versions"]) for turn in turns),
        "length": max(
            (
                turn.get("prefix_length", 0)
                + len(turn["added_token_ids"])
                + len(turn["completion_token_ids"])
                for turn in turns
            ),
            default=0,
        ),
        "versions": [max(0, min(versions)), max(versions)] if versions else [],
        "question": said(asked)[:_EXCERPT],
        "answer": said(answered)[-_EXCERPT:],
    }


def parse(line: bytes) -> JsonObject:
    """Read one line; numbers that JSON does not have (NaN) become None."""
    tree: JsonObject = json.loads(line, parse_constant=lambda _: None)
    return tree


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in file if line.endswith(b"\n"))  # the last may still be written


def _place(data: bytes, offset: int) -> str:
    # Hash all bytes before the offset: an earlier line may change without changing its length.
    before = hashlib.sha256(data[:offset]).hexdigest()[:16]
    return f"{offset}-{before}" if offset <= len(data) else ""


def find_tokenizer(run: Path, config: Mapping[str, object]) -> Path | None:
    """Return a run's `tokenizer.json`, or None if it is not found. Search the run's checkpoints and
    merged model, then `model.tokenizer` and `model.path` as folders, relative to the working
    directory or to the folder above `runs`, then the cache of the Hugging Face Hub."""
    folders = [*reversed(numbered(run / "checkpoints", "step")), run / "merged"]
    names = [str(config[key]) for key in ("model.tokenizer", "model.path") if config.get(key)]
    for name in names:
        own = converted(name)
        folders += [Path(name), run.resolve().parent.parent / name, *([own] if own else [])]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    for name in names:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # only the cache: nothing is downloaded
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, "tokenizer.json")
            if isinstance(cached, str):
                return Path(cached)
    return None
