"""`TrainingTrace`, OpenEnv's format of captured calls, from and to trajectories.

A trace is JSON: `{"schema_version": 1, "turns": [...]}`, where a turn is one call of an engine with
`node_id`, `prompt_token_ids`, `completion_token_ids`, `per_token_logps` and a `loss_mask` over
both (`openenv.core.harness.training`, version 0.10). Fields that the format lacks are in
`metadata`, under `turnwise`, unless another program wrote it, so that a trajectory comes back. So
are images: their positions in each prompt, and their files once, in the first call's.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import compress, groupby
from pathlib import Path

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, translate_unwritable
from turnwise.trajectory.allowed import sets_of
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.files import read_jsonl, write_jsonl
from turnwise.trajectory.images import (
    Image,
    PlacedImage,
    PromptIds,
    of_described,
    placed,
    restored,
)
from turnwise.trajectory.trajectory import Trajectory

SCHEMA_VERSION = 1
_OURS = "turnwise"
_SAMPLING = ("distribution", "untrained", "allowed")
_OF_TRAJECTORY = tuple(
    item.name
    for item in fields(Trajectory)
    if item.name != "turns" and not item.name.startswith("_")
)
_OF_TURNS = tuple(name for name in _OF_TRAJECTORY if name.startswith("turn_"))
"""Fields with an entry for each turn, if they are not empty."""


def to_training_trace(trajectory: Trajectory) -> JsonObject:
    """Return a trajectory as a training trace; `from_training_trace` gives it back unchanged.

    Log-probs above 0 (rounding) are 0 in `per_token_logps`, as the format demands, and exact in the
    metadata. InputError when the trajectory has no turn.
    """
    if not trajectory.turns:
        raise InputError(f"{trajectory.problem_id} has no turns, so it is no training trace")
    tree = json.loads(trajectory.to_json(whole=True))
    turns: list[JsonObject] = []
    for index, turn in enumerate(trajectory.turns):
        prompt = trajectory.prompt_token_ids(index)
        names = "weight_versions finish_reason fork_reason adapter added_logprobs record"
        plain = tree["turns"][index]
        ours: JsonObject = {name: plain[name] for name in names.split()}
        if turn.same_call:
            ours["same_call"] = True
        if seen := placed(prompt):
            ours["images"] = [[each.image.hash, each.start, each.length] for each in seen]
        ours |= {name: plain[name] for name in _SAMPLING if name in plain}
        if any(logprob > 0 for logprob in turn.logprobs):
            ours["logprobs"] = turn.logprobs
        turns.append(
            {
                "node_id": f"{trajectory.problem_id}/{trajectory.sample_index}/{index}",
                "prompt_token_ids": prompt,
                "completion_token_ids": turn.completion_token_ids,
                "per_token_logps": [min(logprob, 0.0) for logprob in turn.logprobs],
                "loss_mask": [0] * len(prompt)
                + [int(not turn.untrained)] * len(turn.completion_token_ids),
                "request": {"messages": plain["messages"]} if turn.messages else {},
                "response": {},
                "metadata": {_OURS: ours},
            }
        )
    first = turns[0]["metadata"][_OURS]
    first["trajectory"] = {name: tree[name] for name in _OF_TRAJECTORY}
    if "images" in tree:
        first["files"] = tree["images"]
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def from_training_trace(
    trace: JsonObject, *, name: str = "trace", weight_version: int = 0
) -> Trajectory:
    """Return the trajectory of a training trace, also from another program.

    A call whose loss mask trains no token is left out: later prompts hold its tokens as context.
    Tokens that the mask leaves out at the ends of a completion are context too.

    Args:
        name: The trajectory's `problem_id`, if the trace has none.
        weight_version: Version of tokens whose trace has none.

    Raises:
        InputError: naming the first call that is malformed, or that was changed after its export.
    """
    turns = trace.get("turns")
    if trace.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION or not isinstance(turns, list):
        raise InputError(f"{name}: a training trace has schema_version {SCHEMA_VERSION} and turns")
    known: set[str] = set()
    kept: JsonObject = {}
    trained: list[bool] = []  # of each call of the engine
    trajectory = Trajectory(name, status="completed")
    files: dict[str, Image] = {}
    for number, turn in enumerate(turns):
        where = f"{name}, turn {number}"
        if not isinstance(turn, dict) or not isinstance(turn.get("node_id"), str):
            raise InputError(f"{where} has no node_id")
        if turn["node_id"] in known:
            raise InputError(f"{where}: another turn has the node_id {turn['node_id']}")
        known.add(turn["node_id"])
        ours = (turn.get("metadata") or {}).get(_OURS) or {}
        kept = kept or ours.get("trajectory") or {}
        try:
            files |= of_described(ours.get("files") or {}, None)
            seen = ours.get("images", ())
            images = [PlacedImage(files[key], int(start), int(n)) for key, start, n in seen]
            turn = {**turn, "images": images}
        except (AttributeError, LookupError, TypeError, ValueError, TrajectoryError) as error:
            raise InputError(f"{where}: its images are not those exported: {error!r}") from error
        added = _add_turn(trajectory, turn, ours, weight_version, where)
        if not (trained and ours.get("same_call")):
            trained.append(added)
        elif added and trained[-1]:
            trajectory.turns[-1] = replace(trajectory.turns[-1], same_call=True)
        else:
            trained[-1] = trained[-1] or added
    number = len(trained)
    for field in _OF_TURNS:
        if values := kept.get(field):
            if not isinstance(values, list) or len(values) != number:
                raise InputError(f"{name}: {field} must have an entry for each of {number} turns")
            kept = kept | {field: list(compress(values, trained))}
    for field, value in kept.items():
        if field not in _OF_TRAJECTORY:
            raise InputError(f"{name}: a trajectory has no {field}")
        setattr(trajectory, field, Counter(value) if field == "events" else value)
    trajectory.messages = restored(trajectory.messages, files)
    for made in trajectory.turns:
        made.messages[:] = restored(made.messages, files)
    return trajectory


def _add_turn(
    trajectory: Trajectory, turn: JsonObject, ours: JsonObject, version: int, where: str
) -> bool:
    """Add a call to a trajectory, with the `images` of its prompt; returns False if its mask trains
    nothing."""
    prompt = _ids(turn, "prompt_token_ids", where)
    completion = _ids(turn, "completion_token_ids", where)
    logprobs = ours.get("logprobs") or turn.get("per_token_logps")
    versions = ours.get("weight_versions", [version] * len(completion))
    mask = turn.get("loss_mask")
    if not isinstance(logprobs, list) or any(
        type(logprob) not in (int, float) or not math.isfinite(logprob) for logprob in logprobs
    ):
        raise InputError(f"{where}: per_token_logps must be finite numbers")
    if len(logprobs) != len(completion) or len(versions) != len(completion):
        raise InputError(f"{where}: a log-prob and a version belong to each completion token")
    if not isinstance(mask, list) or len(mask) != len(prompt) + len(completion):
        raise InputError(f"{where}: loss_mask must cover prompt and completion")
    if any(mask[: len(prompt)]):
        raise InputError(f"{where}: loss_mask trains a token of the prompt")
    mask = mask[len(prompt) :]
    if any(type(bit) is not int or bit not in (0, 1) for bit in mask):
        raise InputError(f"{where}: loss_mask must hold 0 and 1")
    if (untrained := str(ours.get("untrained", ""))) and not any(mask):
        mask = [1] * len(completion)  # its turn says it
    pieces = [bit for bit, _ in groupby(mask)].count(1)
    if pieces > 1:
        raise InputError(f"{where}: loss_mask trains a completion in {pieces} pieces")
    if completion and not pieces:
        return False
    first = mask.index(1) if pieces else 0
    last = first + sum(mask)
    prompt = PromptIds([*prompt, *completion[:first]], turn["images"])
    added: Sequence[float | None] | None = ours.get("added_logprobs")
    unknown: list[float | None] = [None] * (len(prompt) - first - len(added or ()))
    made = trajectory.add_turn(
        prompt,
        completion[first:last],
        [float(logprob) for logprob in logprobs[first:last]],
        versions[first:last],
        ours.get("finish_reason", "stop"),
        None if added is None else [*unknown, *added, *logprobs[:first]],
        fork_reason=ours.get("fork_reason"),
        adapter=ours.get("adapter", ""),
        messages=(turn.get("request") or {}).get("messages") or () if ours else (),
        distribution=Distribution.of(ours.get("distribution")),
        allowed=sets_of(ours.get("allowed"))[first:last],
        untrained=untrained,
    )
    if all(mask) and "record" in ours and tuple(ours["record"]) != made.record:
        why = "its images, tokens, log-probs, versions or sampling are not those exported"
        raise InputError(f"{where}: {why}")
    return True


def _ids(turn: JsonObject, key: str, where: str) -> list[int]:
    ids = turn.get(key)
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise InputError(f"{where}: {key} must be a list of token ids")
    return ids


def export_traces(source: Path, target: Path) -> int:
    """Write the trajectories of a JSON Lines file that have turns as training traces, and return
    their number; InputError when the source cannot be read."""
    try:
        lines = [
            json.dumps(to_training_trace(trajectory), ensure_ascii=False, separators=(",", ":"))
            for trajectory in read_jsonl(source)
            if trajectory.turns
        ]
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source} holds no trajectories: {error!r}") from error
    with translate_unwritable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def import_traces(source: Path, target: Path) -> int:
    """Write the training traces of a JSON Lines file as trajectories, and return their number;
    InputError names the first line that is no training trace."""
    trajectories = []
    try:
        lines = source.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            trace = json.loads(line)
        except ValueError as error:
            raise InputError(f"{source}:{number} is not JSON: {error}") from error
        if not isinstance(trace, dict):
            raise InputError(f"{source}:{number} is no training trace")
        trajectories.append(from_training_trace(trace, name=f"{source.name}:{number}"))
    write_jsonl(target, trajectories)
    return len(trajectories)
