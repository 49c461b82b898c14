"""A run's folder: what a run leaves for people and programs to read.

runs/NAME/
  config.yaml                     the resolved configuration
  metrics.jsonl                   one object a step; step 0 is the model as it was given
  tensorboard/                    the same numbers
  trajectories/step-NNNN.jsonl    what each step trained on; eval-NNNN.jsonl: held-out ones
  exactness.json                  what became of every sampled token, and the first violation
  checkpoints/step-NNNN/          Hugging Face format
  reward.png                      reward and held-out accuracy against step
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from turnwise.config import Config, dump_config
from turnwise.errors import InputError
from turnwise.trajectory import ExactnessReport, Trajectory, write_jsonl


class RunFolder:
    """Writes one run's files.

    Raises:
        InputError: when the folder already holds a run, or cannot be written.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir) / config.name
        if (self.path / "metrics.jsonl").exists():
            raise InputError(
                f"{self.path} already holds a run; choose another name=..., or remove it"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(config))
        except OSError as error:
            raise InputError(f"the run folder {self.path} cannot be written: {error}") from error
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"))
        self._rows: list[dict[str, Any]] = []

    def write_step(self, metrics: dict[str, Any]) -> None:
        self._rows.append(metrics)
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        for key, value in metrics.items():
            if isinstance(value, dict):
                for name, count in value.items():
                    self._tensorboard.add_scalar(f"{key}/{name}", count, metrics["step"])
            elif value is not None:
                self._tensorboard.add_scalar(key, value, metrics["step"])

    def write_trajectories(self, kind: str, step: int, trajectories: Iterable[Trajectory]) -> None:
        write_jsonl(self.path / "trajectories" / f"{kind}-{step:04d}.jsonl", trajectories)

    def write_exactness(self, report: ExactnessReport) -> None:
        (self.path / "exactness.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        folder = self.path / "checkpoints" / f"step-{step:04d}"
        folder.parent.mkdir(exist_ok=True)
        return folder.resolve()

    @property
    def picture(self) -> Path:
        return self.path / "reward.png"

    def draw(self) -> None:
        """Draw reward and held-out accuracy against the step."""
        from matplotlib.figure import Figure  # a second to import; no window, no pyplot state

        trained = [row for row in self._rows if row["step"] > 0]
        measured = [row for row in self._rows if row["accuracy_heldout"] is not None]
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [row["step"] for row in trained],
            [row["reward_mean"] for row in trained],
            color="#8da0cb",
            label="mean reward of the step's trajectories",
        )
        axes.plot(
            [row["step"] for row in measured],
            [row["accuracy_heldout"] for row in measured],
            color="#d95f02",
            marker="o",
            label="accuracy on held-out problems",
        )
        axes.set_xlabel("training step")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        axes.set_title(self.path.name)
        figure.savefig(self.picture, dpi=120)

    def close(self) -> None:
        self._tensorboard.close()
