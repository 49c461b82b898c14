"""The values of a step's trained tokens, in a file next to its trajectories.

training/step-NNNN.safetensors holds columns of equal length, with a row for each trained token,
ordered by trajectory. The rows of one trajectory can be read alone, by the trajectory's number.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

from turnwise.errors import translate_unwritable
from turnwise.training.reports import RECORDED, TrainedSample
from turnwise.trajectory import Trajectory

TokenColumns = dict[str, npt.NDArray[np.generic]]
"""Columns by name: `trajectory` (its line in the step's file), `turn`, `at` (position among the
turn's completion tokens), `staleness`, and the columns of `RECORDED`."""


def columns_of(
    trained: Sequence[TrainedSample],
    origins: Mapping[int, Trajectory],
    trajectories: Sequence[Trajectory],
    version: int,
) -> TokenColumns:
    """Return the values of a step's trained tokens. `origins` maps `id(sample)` to the sample's
    trajectory; trajectories are numbered as in the step's file. `version` is the weight version at
    the start of the step.
    """
    numbers = {id(trajectory): number for number, trajectory in enumerate(trajectories)}
    parts: list[TokenColumns] = []
    ordered = sorted(trained, key=lambda pair: numbers[id(origins[id(pair[0])])])
    for sample, values_KN in ordered:
        trajectory = origins[id(sample)]
        starts = np.array([turn.prompt_length for turn in trajectory.turns])
        place_N = np.flatnonzero(sample.response_mask_T)
        turn_N = sample.calls_T[place_N]
        part: TokenColumns = {
            "trajectory": np.full(len(place_N), numbers[id(trajectory)], np.int32),
            "turn": turn_N.astype(np.int32),
            "at": (place_N - starts[turn_N]).astype(np.int32),
            "staleness": (version - sample.weight_versions_T[place_N]).astype(np.int32),
        }
        part |= dict(zip(RECORDED, values_KN, strict=True))
        part["clipped"] = part["clipped"].astype(np.uint8)
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_columns(path: Path, columns: TokenColumns) -> None:
    """Write columns to a file atomically."""
    temporary = path.with_suffix(".tmp")
    with translate_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save(columns))
        temporary.replace(path)


def read_columns(path: Path, trajectory: int) -> TokenColumns:
    """Return the rows of one trajectory, given the number of its line in the step's file.

    Example:
        columns = read_columns(Path("runs/demo/training/step-0001.safetensors"), 0)
        print(columns["turn"], columns["at"], columns["advantage"])
    """
    with safe_open(path, framework="np") as file:
        numbers = file.get_tensor("trajectory")
        start, end = np.searchsorted(numbers, [trajectory, trajectory + 1]).tolist()
        there = file.keys()  # files of older runs have no column `loss`
        names = [name for name in ("turn", "at", "staleness", *RECORDED) if name in there]
        if start == end:  # a slice must not begin at the end
            return {name: np.zeros(0) for name in names}
        return {name: file.get_slice(name)[start:end] for name in names}
