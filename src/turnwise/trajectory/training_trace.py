"""`TrainingTrace`, OpenEnv's format of captured calls, from and to trajectories.

A trace is JSON: `{"schema_version": 1, "turns": [...]}`, where a turn is one call of an engine with
`node_id`, `prompt_token_ids`, `completion_token_ids`, `per_token_logps` and a `loss_mask` over
prompt and completion (`openenv.core.harness.training`, version 0.10). A trace that turnwise wrote
has more fields in `metadata`, under `turnwise`, so that the trajectory can be restored. Images are
there, too: their positions with each call, and their files once, with the first call.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, translate_unwritable
from turnwise.trajectory.allowed import sets_of
from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.files import read_jsonl, write_jsonl
from turnwise.trajectory.images import Image, images_of, restored
from turnwise.trajectory.prompt import PlacedImage, Prompt
from turnwise.trajectory.trajectory import Trajectory
from turnwise.trajectory.turn import MASK

SCHEMA_VERSION = 1
_OURS = "turnwise"
_SAMPLING = ("distribution", "untrained", "allowed", "streams")


def to_training_trace(trajectory: Trajectory) -> JsonObject:
    """Return a trajectory as a training trace; `from_training_trace` gives it back unchanged.

    Log-probs that rounding put above 0 are 0 in `per_token_logps`, as the format demands, and exact
    in the metadata. Raise InputError when the trajectory has no turn.
    """
    if not trajectory.turns:
        raise InputError(f"{trajectory.problem_id} has no turns, so it is no training trace")
    tree = json.loads(trajectory.to_json(whole=True))
    turns: list[JsonObject] = []
    for index, (turn, plain) in enumerate(zip(trajectory.turns, tree.pop("turns"), strict=True)):
        prompt = trajectory.prompt(index)
        names = "weight_versions finish_reason fork_reason adapter added_logprobs record"
        ours: JsonObject = {name: plain[name] for name in names.split()}
        if seen := prompt.images:
            ours["images"] = [[each.image.hash, each.start, each.length] for each in seen]
        ours |= {name: plain[name] for name in _SAMPLING if name in plain}
        if any(logprob > 0 for logprob in turn.logprobs):
            ours["logprobs"] = turn.logprobs
        turns.append(
            {
                "node_id": f"{trajectory.problem_id}/{trajectory.sample_index}/{index}",
                "prompt_token_ids": prompt.tolist(),
                "completion_token_ids": turn.completion_token_ids,
                "per_token_logps": [min(logprob, 0.0) for logprob in turn.logprobs],
                "loss_mask": [0] * len(prompt) + turn.trainable(),
                "request": {"messages": plain["messages"]} if turn.messages else {},
                "response": {},
                "metadata": {_OURS: ours},
            }
        )
    first = turns[0]["metadata"][_OURS]
    if (files := tree.pop("images", None)) is not None:
        first["files"] = files
    first["trajectory"] = tree
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def from_training_trace(
    trace: JsonObject, *, name: str = "trace", weight_version: int = 0
) -> Trajectory:
    """Return the trajectory of a training trace, which another program may have written.

    Tokens that a call's loss mask leaves out are not trained. A call of another program is left out
    if its mask trains no token.

    Args:
        name: The trajectory's `problem_id` if the trace does not contain one.
        weight_version: Weight version of all tokens for which the trace does not contain a version.

    Raises:
        InputError: that names the first call that is malformed, or that was changed after its
            export.
    """
    turns = trace.get("turns")
    if trace.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION or not isinstance(turns, list):
        raise InputError(f"{name}: a training trace has schema_version {SCHEMA_VERSION} and turns")
    known: set[str] = set()
    kept: JsonObject = {}
    trajectory = Trajectory(name)
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
            files |= images_of(ours.get("files") or {}, None)
            seen = ours.get("images", ())
            images = [PlacedImage(files[key], int(start), int(n)) for key, start, n in seen]
        except (AttributeError, LookupError, TypeError, ValueError, TrajectoryError) as error:
            raise InputError(f"{where}: its images are not those exported: {error!r}") from error
        _add_turn(trajectory, turn, images, ours, weight_version, where)
    try:
        own = {"problem_id": name, "status": "completed", "events": {}, **kept}
        made = Trajectory.from_tree({**own, "turns": []})
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: it does not describe a trajectory: {error}") from error
    for field in ("turn_rewards", "turn_players"):
        values = getattr(made, field)
        if values and (not isinstance(values, list) or len(values) != len(turns)):
            raise InputError(f"{name}: {field} must have an entry for each of {len(turns)} turns")
    made.messages = restored(made.messages, files)
    for one in trajectory.turns:
        one.messages[:] = restored(one.messages, files)
    made.turns, made._last = trajectory.turns, trajectory._last
    return made


def _add_turn(
    trajectory: Trajectory,
    turn: JsonObject,
    images: Sequence[PlacedImage],
    ours: JsonObject,
    version: int,
    where: str,
) -> None:
    """Add a call, whose prompt has these images, to a trajectory."""
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
    if completion and not ours and not any(mask):
        return  # later prompts hold its tokens as context
    added: Sequence[float | None] | None = ours.get("added_logprobs")
    unknown: list[float | None] = [None] * (len(prompt) - len(added or ()))
    made = trajectory.add_turn(
        Prompt(prompt, images),
        completion,
        [float(logprob) for logprob in logprobs],
        versions,
        ours.get("finish_reason", "stop"),
        None if added is None else [*unknown, *added],
        fork_reason=ours.get("fork_reason"),
        adapter=ours.get("adapter", ""),
        messages=(turn.get("request") or {}).get("messages") or () if ours else (),
        distribution=Distribution.of(ours.get("distribution")),
        allowed=sets_of(ours.get("allowed")),
        untrained=str(ours.get("untrained", "")),
    )
    if "record" in ours and tuple(ours["record"]) != made.record:
        why = "its images, tokens, log-probs, versions or sampling are not those exported"
        raise InputError(f"{where}: {why}")
    for stream, values in (ours.get("streams") or {}).items():
        made.streams[stream] = np.asarray(values, np.float32)
    if made.trainable() != mask and not made.untrained:
        made.streams[MASK] = np.asarray(mask, np.float32)


def _ids(turn: JsonObject, key: str, where: str) -> list[int]:
    ids = turn.get(key)
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise InputError(f"{where}: {key} must be a list of token ids")
    return ids


def export_traces(source: Path, target: Path) -> int:
    """Write the trajectories of a JSON Lines file as training traces, without trajectories that
    have no turns, and return the number of traces. Raise InputError when the source cannot be
    read."""
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
    raise InputError that names the first line that is not a training trace."""
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
