"""The log of a run's metrics (`MetricsLog`): metrics.jsonl, and the trackers, which get copies.

Trackers are TensorBoard, if it is installed, and the configured `trackers`. A failure to write
metrics.jsonl ends the run. A tracker that fails, or does not answer in time, is reported once, and
gets no more metrics. All calls block; make them in a thread.

To add a tracker: write a function that returns a `Tracker`, register it in `_TRACKERS`, and add its
name to `trackers` of `config/schema.py`.
"""

import importlib
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

try:
    from tensorboardX import SummaryWriter
except ImportError:  # an extra
    SummaryWriter = None

from turnwise.config import Config
from turnwise.config.load import masked
from turnwise.core.files import write_file
from turnwise.core.json_types import JsonObject, leaves
from turnwise.core.user_code import call_and_wait
from turnwise.errors import InputError, text_of, translate_unwritable
from turnwise.observe.conversations import conversation
from turnwise.trajectory import Trajectory

logger = logging.getLogger(__name__)

_START_SECONDS = 180.0  # deadline for a tracker to start, which may ask a server
_CALL_SECONDS = 60.0  # deadline for each later call of a tracker
_EVALUATED = "step_evaluated"  # W&B's x axis of an evaluation's metrics
_COLUMNS = ["problem", "reward", "status", "conversation"]  # columns of tables of conversations


class Tracker(NamedTuple):
    """Receives a step's numbers and conversations; may raise anything."""

    write: Callable[[int, dict[str, float]], None]
    write_samples: Callable[[int, list[JsonObject]], None]
    close: Callable[[], None]


class MetricsLog:
    """One run's metrics, written one step at a time to metrics.jsonl and to the trackers. If a run
    is resumed after `after_step`, later steps are removed from the file and hidden in TensorBoard;
    the other trackers keep them."""

    def __init__(self, folder: Path, config: Config, after_step: int | None = None) -> None:
        for name in config.trackers:
            if importlib.util.find_spec(name) is None:
                raise InputError(f"trackers names {name}, which is missing: pip install {name}")
        self._path = folder / "metrics.jsonl"
        self.rows: list[JsonObject] = []  # metrics of every step, including those before a resume
        if after_step is not None:
            try:
                for line in self._path.read_text(encoding="utf-8").splitlines():
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError:
                        break  # a last line that a crash truncated
                    if row["step"] <= after_step:
                        self.rows.append(row)
                write_file(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
            except FileNotFoundError:
                raise InputError(f"there is no {self._path} to resume from") from None
            except OSError as error:
                why = f"{self._path} cannot be resumed from: {error.strerror}"
                raise InputError(why) from error
        self._calling = threading.Lock()  # an evaluation may coincide with a step's samples
        self._trackers: dict[str, Tracker] = {}
        if SummaryWriter is None:
            logger.info("no TensorBoard files: pip install 'turnwise[tensorboard]'")
        else:
            self._trackers["TensorBoard"] = _tensorboard(folder, after_step)
        for name in config.trackers:
            start = partial(_TRACKERS[name], folder, config, after_step is not None)
            try:
                self._trackers[name] = call_and_wait(
                    start, name=f"the tracker {name}", seconds=_START_SECONDS
                )
            except Exception as error:
                self.close()
                raise InputError(f"trackers: {name} does not start: {text_of(error)}") from error

    def write(self, metrics: JsonObject) -> None:
        """Write one step's metrics to metrics.jsonl, where NaN and infinity become null. Trackers
        get only numbers; nested numbers are named `key/name`."""
        metrics = _plain(metrics)
        self.rows.append(metrics)
        with translate_unwritable(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        self._track(metrics, {})

    def amend(self, metrics: JsonObject) -> None:
        """Write a step's line again, with late metrics; trackers get only these."""
        (place,) = (n for n, row in enumerate(self.rows) if row["step"] == metrics["step"])
        earlier = self.rows[place]
        self.rows[place] = earlier | _plain(metrics)
        with translate_unwritable(self._path):
            write_file(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._track(self.rows[place], earlier)

    def _track(self, metrics: JsonObject, earlier: JsonObject) -> None:
        """Write metrics to the trackers, except those that are equal in the step's `earlier`
        metrics."""
        known = {"step": metrics["step"]} | dict(leaves(earlier, separator="/"))
        values = {
            re.sub(r"[^A-Za-z0-9_./-]", "_", name): float(value)
            for name, value in leaves(metrics, separator="/")
            if isinstance(value, int | float) and known.get(name) != value
        }
        self._each(lambda tracker: tracker.write(int(metrics["step"]), values))

    def write_samples(self, step: int, samples: Sequence[Trajectory]) -> None:
        rows = [
            {
                "problem": f"{trajectory.problem_id} #{trajectory.sample_index}",
                "reward": trajectory.reward,
                "status": trajectory.status,
                "conversation": conversation(trajectory).plain,
            }
            for trajectory in samples
        ]
        self._each(lambda tracker: tracker.write_samples(step, rows))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        """Call every tracker; one that fails is reported, and gets no more calls."""
        with self._calling:
            for name, tracker in list(self._trackers.items()):
                who = f"the tracker {name}"
                try:
                    call_and_wait(partial(do, tracker), name=who, seconds=_CALL_SECONDS)
                except Exception as error:
                    del self._trackers[name]
                    why = f"{type(error).__name__}: {error}"
                    logger.warning("%s failed and gets no more metrics: %s", name, why)


def _plain(metrics: JsonObject) -> JsonObject:
    """Return metrics as JSON values; NaN and infinity become null."""
    plain: JsonObject = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
    return plain


def _tensorboard(folder: Path, after_step: int | None) -> Tracker:
    """Write event files in the run's folder with tensorboardX."""
    purge = None if after_step is None else after_step + 1
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def write_samples(step: int, rows: list[JsonObject]) -> None:
        for number, row in enumerate(rows):
            indented = "\n".join(f"    {line}" for line in row["conversation"].splitlines())
            writer.add_text(f"samples/{number}", indented, step)  # verbatim in Markdown

    return Tracker(write, write_samples, writer.close)


def _logged(package: ModuleType, run: Any) -> Tracker:
    """Write to a run of Weights & Biases, or of Trackio, which has the same methods. If a step is
    written twice, W&B keeps the first values, while Trackio keeps both."""

    def write_samples(step: int, rows: list[JsonObject]) -> None:
        data = [[row[name] for name in _COLUMNS] for row in rows]
        run.log({"samples": package.Table(columns=_COLUMNS, data=data)}, step=step)

    return Tracker(lambda step, values: run.log(values, step=step), write_samples, run.finish)


def _wandb(folder: Path, config: Config, resumed: bool) -> Tracker:
    wandb, kept = importlib.import_module("wandb"), folder / "wandb_run"
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        tags=config.tags,
        name=config.name,
        dir=str(folder),
        config=masked(config),
        id=kept.read_text() if resumed and kept.exists() else None,
        resume="allow",
        settings=wandb.Settings(console="off"),
    )
    kept.write_text(run.id)
    newest = 0

    def write(step: int, values: dict[str, float]) -> None:
        """Write a late evaluation with the newest step, because W&B refuses metrics of earlier
        steps; its x axis is the step whose weights were evaluated."""
        nonlocal newest
        newest = max(newest, step)
        if measured := [name for name in values if "heldout" in name]:
            for name in measured:
                run.define_metric(name, step_metric=_EVALUATED)
            values = {**values, _EVALUATED: float(step)}
        run.log(values, step=newest)

    return _logged(wandb, run)._replace(write=write)


def _trackio(folder: Path, config: Config, resumed: bool) -> Tracker:
    trackio = importlib.import_module("trackio")
    run = trackio.init(
        project=config.project,
        name=config.name,
        config=masked(config),
        resume="allow" if resumed else "never",
    )
    return _logged(trackio, run)


def _mlflow(folder: Path, config: Config, resumed: bool) -> Tracker:
    """Write to MLflow, whose own environment variables name the tracking server. If a step is
    written twice, MLflow keeps both values."""
    mlflow, kept = importlib.import_module("mlflow"), folder / "mlflow_run"
    client = mlflow.MlflowClient()
    if resumed and kept.exists():
        run_id = kept.read_text()
        client.update_run(run_id, status="RUNNING")
    else:
        experiment = client.get_experiment_by_name(config.project)
        number = experiment.experiment_id if experiment else None
        number = number or client.create_experiment(config.project)
        tags = dict.fromkeys(config.tags, "")
        run_id = str(client.create_run(number, run_name=config.name, tags=tags).info.run_id)
        client.log_dict(run_id, masked(config), "config.json")
        kept.write_text(run_id)

    def write(step: int, values: dict[str, float]) -> None:
        now, make = int(time.time() * 1000), mlflow.entities.Metric
        metrics = [make(name, value, now, step) for name, value in values.items()]
        client.log_batch(run_id, metrics=metrics)

    def write_samples(step: int, rows: list[JsonObject]) -> None:
        table = {name: [row[name] for row in rows] for name in _COLUMNS}
        client.log_table(run_id, {"step": [step] * len(rows), **table}, "samples.json")

    return Tracker(write, write_samples, lambda: client.set_terminated(run_id))


_TRACKERS: dict[str, Callable[[Path, Config, bool], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
