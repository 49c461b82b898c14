"""A run's folder: the files that a run writes, as docs/how-to/viewer.md describes them."""

import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import Config, dump_config
from turnwise.config.load import has_secrets
from turnwise.core.files import number_of, numbered, write_file
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import TurnTimes
from turnwise.errors import InputError, translate_unwritable
from turnwise.observe.timeline import TIMELINE
from turnwise.observe.trackers import MetricsLog
from turnwise.rollouts.evaluation import GroupLog
from turnwise.rollouts.group import write_times
from turnwise.run.token_values import TokenColumns, write_columns
from turnwise.training import checkpoint
from turnwise.trajectory import ExactnessReport, Trajectory, write_jsonl
from turnwise.trajectory.files import remove_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_SHARE = (-0.02, 1.02)  # limits of the y axis for values between 0 and 1


@dataclass(frozen=True, slots=True)
class Resume:
    """A complete checkpoint, and the loop's state in it."""

    checkpoint: Path
    step: int
    state: JsonObject
    flaws: list[str]  # flaws of newer checkpoints, which are skipped


def find_resume(run: Path) -> Resume:
    """Return the newest complete checkpoint of a run."""
    folder, flaws = checkpoint.newest_whole(checkpoint.checkpoints_of(run))
    state = checkpoint.read_loop(folder)
    return Resume(folder.resolve(), state["step"], state, flaws)


def write_config(config: Config, *, replace: bool = True) -> None:
    """Write a configuration into its run folder; without `replace`, unless there is one."""
    path = Path(config.output_dir) / config.name / "config.yaml"
    if replace or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # To resume, a run needs all values, including the secrets of tools and engines.
        write_file(path, dump_config(config), private=has_secrets(config))


def make_figure(name: str, rows: Sequence[JsonObject], success_reward: float) -> "Figure":
    """Return a plot of a run's metrics: rewards on the left axis, accuracy on the right."""
    from matplotlib.figure import Figure  # a second to import; no window, no pyplot state
    from matplotlib.ticker import MaxNLocator

    trained = [row for row in rows if row["step"] > 0]
    measured = [row for row in rows if row["accuracy_heldout"] is not None]
    rewards = [row["reward_mean"] for row in trained]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = axes.plot(
        [row["step"] for row in trained],
        rewards,
        color="#5a6fa8",
        marker=".",
        label="mean reward of the step's trajectories",
    )
    axes.set_ylabel("reward")
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(_SHARE)
    if measured:
        beside = axes.twinx()
        beside.set_ylim(_SHARE)
        beside.set_ylabel("accuracy")
        lines += beside.plot(
            [row["step"] for row in measured],
            [row["accuracy_heldout"] for row in measured],
            color="#d95f02",
            marker="o",
            label=f"accuracy on held-out problems (reward ≥ {success_reward:g})",
        )
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.set_title(name)
    figure.legend(handles=lines, loc="outside lower center", ncols=2)
    return figure


class RunDir:
    """Writes one run's files. A resumed run continues its files, and overwrites output of steps
    after its checkpoint. If a file cannot be written, for example on a full disk, a TurnwiseError
    is raised."""

    def __init__(self, config: Config, resume: Resume | None = None) -> None:
        self.path = Path(config.output_dir) / config.name
        if resume is None and (self.path / "metrics.jsonl").exists():
            raise InputError(
                f"{self.path} already holds a run; choose another name=..., remove it, or "
                f"resume it: --resume {self.path}"
            )
        try:
            write_config(config)
        except OSError as error:
            raise InputError(f"the run folder {self.path} cannot be written: {error}") from error
        self._config = config
        self.metrics = MetricsLog(self.path, config, None if resume is None else resume.step)

    def write_trajectories(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        with self._place("trajectories", "step", step) as path:
            write_jsonl(path, trajectories)

    def write_timeline(self, step: int, calls: Iterable[Sequence[TurnTimes]]) -> None:
        with self._place(TIMELINE, "step", step) as path:
            write_times(path, calls)

    def group_log(self, kind: str, step: int) -> GroupLog:
        """Return the files to which the groups of an evaluation are appended as they end."""
        first, second = (self._place(name, kind, step) for name in ("trajectories", TIMELINE))
        with first as path, second as times:
            return GroupLog(path, times)

    def write_token_values(self, step: int, columns: TokenColumns) -> None:
        with self._place("training", "step", step, ".safetensors") as path:
            write_columns(path, columns)

    @contextmanager
    def _place(self, name: str, kind: str, step: int, suffix: str = ".jsonl") -> Iterator[Path]:
        """Yield the path of a step's file. Once the file is written, remove the oldest files of its
        kind in excess of `trajectories.keep`."""
        folder, keep = self.path / name, self._config.trajectories.keep
        path = folder / f"{kind}-{step:04d}{suffix}"
        yield path
        others = [each for each in numbered(folder, kind, suffix) if each != path]
        remove_files([] if keep is None else others[: max(0, len(others) + 1 - keep)])

    def write_exactness(self, report: ExactnessReport) -> None:
        path = self.path / "exactness.json"
        with translate_unwritable(path):
            write_file(path, json.dumps(report.to_dict(), indent=1) + "\n")

    def begin_checkpoint(self, step: int) -> Path:
        """Return the folder that a step's checkpoint is written to until it is whole."""
        return checkpoint.begin(checkpoint.folder_of(self.path, step).resolve())

    def commit_checkpoint(self, step: int, state: JsonObject) -> None:
        """Complete a checkpoint with the loop's state; remove older ones, except the best."""
        folder = checkpoint.folder_of(self.path, step).resolve()
        checkpoint.write_loop(folder, state)
        checkpoint.commit(folder)
        saved = {number_of(each) for each in checkpoint.list_checkpoints(folder.parent)}
        measured = []
        for row in self.metrics.rows:
            loss, quality = row.get("loss_heldout"), row["accuracy_heldout"]
            quality = quality if loss is None else -loss
            if row["step"] in saved and quality is not None:
                measured.append((quality, row["step"]))
        best = max(measured)[1] if measured else None  # the newest if tied
        checkpoint.prune(folder.parent, self._config.training.keep_last, best, step)

    def draw(self) -> None:
        """Plot the reward of each step, and the held-out accuracy of the steps where it was
        measured."""
        if importlib.util.find_spec("matplotlib") is None:
            logger.info("no reward.png: pip install 'turnwise[plots]'")
            return
        figure = make_figure(self.path.name, self.metrics.rows, self._config.eval.success_reward)
        picture = self.path / "reward.png"
        with translate_unwritable(picture):
            figure.savefig(picture, dpi=120)
