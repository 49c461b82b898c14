"""Where a run's metrics go: metrics.jsonl and TensorBoard always, trackers where asked for.

metrics.jsonl is the record: what it cannot take ends the run. All other sinks are copies for
people: one that fails is warned about, once, and gets nothing more. Nothing here waits for the
event loop; call it from a thread.
"""

import importlib
import importlib.util
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter

from turnwise.config import Config
from turnwise.errors import InputError, told_when_unwritable

logger = logging.getLogger(__name__)

_PROJECT = "turnwise"


class Sinks:
    """One run's metrics, written one step at a time.

    Args:
        folder: The run's folder, which exists.
        config: Of the run; `sinks` names the trackers, which get all of it but its API key.
        after_step: Where a run is gone on with: the step of its checkpoint. What was written
            of later steps is removed, or hidden where a tracker keeps everything.

    Raises:
        InputError: when a tracker is not installed or does not start; no other is left open.
    """

    def __init__(self, folder: Path, config: Config, after_step: int | None = None) -> None:
        for name in config.sinks:
            if importlib.util.find_spec(name) is None:
                raise InputError(f"sinks names {name}, which is missing: pip install {name}")
        self._path = folder / "metrics.jsonl"
        self.rows: list[dict[str, Any]] = []
        """Every step's metrics, those of a run that is gone on with included."""
        if after_step is not None:
            self.rows = _cut(self._path, after_step)
        self._sinks: dict[str, Sink] = {"TensorBoard": TensorBoard(folder, after_step)}
        for name in config.sinks:
            try:
                self._sinks[name] = _TRACKERS[name](folder, config, after_step is not None)
            except Exception as error:
                self.close()
                reason = str(error).strip() or type(error).__name__
                raise InputError(f"sinks: {name} does not start: {reason}") from error

    def write(self, metrics: dict[str, Any]) -> None:
        """Take one step's metrics, which hold `step`.

        A dictionary among them is written as `key/name`; what is no number (None, a text) goes
        to metrics.jsonl alone, where NaN and infinity are null: JSON has neither.

        Raises:
            TurnwiseError: when metrics.jsonl cannot be written.
        """
        metrics = _finite(metrics)
        self.rows.append(metrics)
        with told_when_unwritable(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, allow_nan=False) + "\n")
        values = dict(_numbers(metrics))
        step = int(values.pop("step"))
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(step, values)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        """Let every sink finish what it has."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        del self._sinks[name]
        logger.warning(
            "%s failed and gets no more metrics: %s: %s", name, type(error).__name__, error
        )


class Sink(Protocol):
    """Takes a step's numbers, by names of letters, digits and `_-./` alone; may raise anything."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, after_step: int | None) -> None:
        purge = None if after_step is None else after_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. It keeps the first of two writes of one step."""

    def __init__(self, folder: Path, config: Config, resumed: bool) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=_PROJECT,
            name=config.name,
            dir=str(folder),
            config=_public(config),
            id=_known_run(folder, "wandb") if resumed else None,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        _remember_run(folder, "wandb", self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow, at the tracking server that its own environment variables name. It keeps both of
    two writes of one step."""

    def __init__(self, folder: Path, config: Config, resumed: bool) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        known = _known_run(folder, "mlflow") if resumed else None
        if known is None:
            experiment = self._client.get_experiment_by_name(_PROJECT)
            number = experiment.experiment_id if experiment else None
            number = number or self._client.create_experiment(_PROJECT)
            run = self._client.create_run(number, run_name=config.name)
            self._run_id: str = run.info.run_id
            self._client.log_dict(self._run_id, _public(config), "config.json")
            _remember_run(folder, "mlflow", self._run_id)
        else:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")

    def write(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio:
    """Trackio. It keeps both of two writes of one step."""

    def __init__(self, folder: Path, config: Config, resumed: bool) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=_PROJECT,
            name=config.name,
            config=_public(config),
            resume="allow" if resumed else "never",
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Any] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def _cut(path: Path, after_step: int) -> list[dict[str, Any]]:
    """Keep the rows up to a step; a last line that a crash cut short goes too."""
    rows: list[dict[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] <= after_step:
                rows.append(row)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(path)
    except FileNotFoundError:
        raise InputError(f"there is no {path} to go on with") from None
    except OSError as error:
        raise InputError(f"{path} cannot be gone on with: {error.strerror}") from error
    return rows


def _finite(value: Any) -> Any:
    """The same tree with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        name = prefix + re.sub(r"[^A-Za-z0-9_./-]", "_", key)
        if isinstance(value, dict):
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)


def _public(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"serving": {"api_key"}})


def _remember_run(folder: Path, tracker: str, run_id: str) -> None:
    (folder / f"{tracker}_run").write_text(run_id)


def _known_run(folder: Path, tracker: str) -> str | None:
    """The tracker's own name of the run that is gone on with, where it had one."""
    path = folder / f"{tracker}_run"
    return path.read_text() if path.exists() else None
