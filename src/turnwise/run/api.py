"""Plain calls for programs: train, open, sft, evaluate, rollout, serve; `turnwise` exports them.

The calls run the commands in a separate thread, so that scripts, notebooks and programs with a
running event loop can all call them. Arguments take precedence over keywords (`sampling={"n": 4}`,
`**{"rollout.max_turns": 4}`), and keywords take precedence over `config`. Rows and classes passed
as objects are used directly; config.yaml in the run folder then contains no path for the rows, and
only the name of the class.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, TypeVar, cast

from rich.console import Console

from turnwise.config import NO_DEADLINE, Config, ConfigSource, known_keys, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.core.interrupt import exit_on_sigterm
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread
from turnwise.core.optional import load_object
from turnwise.errors import InputError
from turnwise.run import commands
from turnwise.run.commands import ProgramInputs, TrainingResult
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from turnwise.rollouts.environment import EnvironmentType
    from turnwise.rollouts.evaluation import Evaluation
    from turnwise.run.opened import Run
    from turnwise.serving.openai.server import OpenAIServer

_Result = TypeVar("_Result")
Source = str | Path | Sequence[JsonObject] | None
"""Rows, or the path or Hugging Face name of a dataset; None uses the dataset of `config`."""
_START_SECONDS = 120.0
"""Seconds allowed for imports and Ray, before the engines start."""
_SECTIONS = {name.rpartition(".")[0] for name in known_keys()} - {""}


def train(
    model: str | Path | None = None,
    environment: "str | Callable[[JsonObject], object] | None" = None,
    data: Source = None,
    steps: int | None = None,
    *,
    eval_data: Source = None,
    config: ConfigSource | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    **keys: object,
) -> TrainingResult:
    """Train a model, and write all results to the run folder, output_dir/name.

    Args:
        model: Folder or Hugging Face name of the model to start from (model.path).
        environment: A class of environments, or `package.module:Class`.
        data: Training rows: dictionaries, or a path or name (data.path).
        steps: Training steps (training.steps).
        eval_data: Held-out rows, in the same forms as `data` (data.eval_path).
        config: The rest of the configuration: a YAML file, a dictionary, a `Config`, OmegaConf's
            `DictConfig` or a dataclass.
        resume: Folder of a run to continue from its last complete checkpoint, with its own
            configuration; cannot be combined with `config`.
        progress: Print a live table on a terminal, or lines elsewhere.
        **keys: Other keys of the configuration; they take precedence over `config`. Wherever a key
            takes package.module:name, it takes the class or function itself, too.

    Raises:
        InputError: when an argument or a configuration key cannot be used.
        TurnwiseError: when the run fails; the message names what failed.

    Example:
        class Weather:
            def __init__(self, row):
                self.problem, self.answer = row["question"], row["answer"]
                self.tools = [forecast]

            def reward(self, trajectory):
                return float(self.answer in trajectory.final_text)

        result = turnwise.train(
            model="Qwen/Qwen3-0.6B", environment=Weather, data=rows, steps=100, name="weather"
        )
        print(result.checkpoint)
    """
    values = {"model.path": model, "training.steps": steps}
    resolved, inputs = _prepare(config, keys, values, environment, data, eval_data, resume=resume)
    console, run = Console(quiet=not progress), None if resume is None else Path(resume)
    work = partial(commands.train, resolved, console, run, inputs)
    return run_command(work, "the training run")


def open(
    config: ConfigSource | None = None,
    environment: "str | Callable[[JsonObject], object] | None" = None,
    data: Source = None,
    *,
    model: str | Path | None = None,
    eval_data: Source = None,
    resume: str | Path | None = None,
    progress: bool = True,
    **keys: object,
) -> "Run":
    """Open a run for a training loop of your own, in a `with` block, or in an `async with` block,
    where the run's methods are coroutines. The arguments are the same as for `train`;
    `training.steps` is only the length of the learning-rate schedule.

    Args:
        resume: Folder of a run to continue from the last checkpoint that `run.save()` wrote there,
            with its own configuration; cannot be combined with `config`.

    Raises:
        InputError: when an argument or a configuration key cannot be used.

    Example:
        with turnwise.open("config.yaml") as run:
            for _ in range(100):
                groups = run.rollout(run.problems(16))
                run.forward_backward(run.samples(groups), loss="ppo_clip")
                print(run.optim_step(), run.sync())
            run.save("my_model")
    """
    from turnwise.run.opened import Run, opened_run  # seconds to import

    values = {"model.path": model}
    resolved, inputs = _prepare(config, keys, values, environment, data, eval_data, resume=resume)
    console, run = Console(quiet=not progress), None if resume is None else Path(resume)
    return Run(resolved, partial(opened_run, resolved, inputs, console, run))


def sft(
    model: str | Path | None = None,
    data: Source = None,
    steps: int | None = None,
    *,
    eval_data: Source = None,
    config: ConfigSource | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    **keys: object,
) -> TrainingResult:
    """Train a model on the rows themselves (supervised training), without engines and rewards; the
    other arguments are the same as for `train`.

    Args:
        data: Rows, or a path or name (data.path). The rows are dictionaries with `messages` and, if
            there are any, `tools`; trajectories of a run; or training traces. The path may be a run
            folder.
        steps: Training steps of `rollout.prompts_per_step` rows each (training.steps).
        eval_data: Held-out rows on which the loss is measured, in the same forms as `data`
            (data.eval_path).

    Raises:
        InputError: when an argument or a configuration key cannot be used.
        StepError: when more than rollout.max_failed_fraction of the rows cannot be trained exactly.

    Example:
        result = turnwise.sft(model="Qwen/Qwen3-0.6B", data="rows.jsonl", steps=100)
        # Rejection sampling: the trajectories of a run that earned the reward.
        good = {"data.filter": "reward >= 1", "name": "good"}
        turnwise.sft(model="Qwen/Qwen3-0.6B", data="runs/run", steps=100, **good)
    """
    values: dict[str, object] = {"model.path": model, "training.steps": steps}
    resolved, inputs = _prepare(
        config, keys, values, None, data, eval_data, optional=["environment"], resume=resume
    )
    console, run = Console(quiet=not progress), None if resume is None else Path(resume)
    work = partial(commands.train, resolved, console, run, inputs, supervised=True)
    return run_command(work, "the training run")


def evaluate(
    model: str | Path | None = None,
    environment: "str | Callable[[JsonObject], object] | None" = None,
    data: Source = None,
    *,
    config: ConfigSource | None = None,
    progress: bool = True,
    **keys: object,
) -> "Evaluation":
    """Evaluate a model on held-out rows, under `eval.sampling`; the other arguments are the same as
    for `train`.

    Args:
        model: Folder or Hugging Face name, such as a checkpoint (model.path).
        data: Rows: dictionaries, or a path or name (data.eval_path).

    Returns:
        Accuracy, pass@k and the trajectories, which are read from eval.jsonl in the run folder on
        access.

    Raises:
        InputError: when an argument or a configuration key cannot be used.
        StepError: when more than rollout.max_failed_fraction of the trajectories fail.

    Example:
        evaluation = turnwise.evaluate(model=result.checkpoint, environment=Weather, data=rows)
        print(evaluation.accuracy)
    """
    resolved, inputs = _prepare(
        config, keys, {"model.path": model}, environment, eval_data=data, optional=["data.path"]
    )
    work = partial(commands.evaluate, resolved, Console(quiet=not progress), inputs)
    return run_command(work, "the evaluation")


def rollout(
    model: str | Path | None = None,
    environment: "str | Callable[[JsonObject], object] | None" = None,
    data: Source = None,
    *,
    output: str | Path | None = None,
    config: ConfigSource | None = None,
    progress: bool = True,
    **keys: object,
) -> Sequence[Trajectory]:
    """Sample `sampling.n` trajectories of each row, as training would, and reward them; the other
    arguments are the same as for `train`.

    Args:
        output: A JSON Lines file to which finished groups are appended; None writes none.

    Returns:
        The trajectories, in the rows' order: a list, or with `output` a sequence that reads each
        trajectory from the file on access.

    Raises:
        InputError: when an argument or a configuration key cannot be used.
        StepError: when more than rollout.max_failed_fraction of the trajectories fail.

    Example:
        for trajectory in turnwise.rollout(model="...", environment=Weather, data=rows[:4]):
            print(trajectory.reward, trajectory.final_text)
    """
    resolved, inputs = _prepare(config, keys, {"model.path": model}, environment, data)
    console, file = Console(quiet=not progress), None if output is None else Path(output)
    work = partial(commands.rollout, resolved, console, file, inputs)
    return run_command(work, "the rollouts")[0]


@contextmanager
def serve(
    model: str | Path | None = None,
    *,
    config: ConfigSource | None = None,
    progress: bool = True,
    **keys: object,
) -> "Iterator[OpenAIServer]":
    """Serve a model to OpenAI and Anthropic clients for the length of a `with` block; the arguments
    are the same as for `train`.

    Yields:
        The server; its `base_url` ends with /v1.

    Raises:
        InputError: when an argument or a configuration key cannot be used.

    Example:
        with turnwise.serve(model="Qwen/Qwen3-0.6B", serving={"port": 0}) as server:
            client = openai.OpenAI(base_url=server.base_url, api_key="-")
    """
    resolved, _ = _prepare(config, keys, {"model.path": model}, optional=NEEDED_KEYS)
    console = Console(quiet=not progress)
    thread = EventLoopThread(
        lambda: commands.serving(resolved, console, commands.openai_server), "the server"
    )
    with thread:
        yield thread.start(resolved.engine.start_timeout + _START_SECONDS)


def run_command(work: Callable[[], Coroutine[object, object, _Result]], name: str) -> _Result:
    """Run a coroutine in a separate thread and wait for it; Ctrl-C and SIGTERM end everything that
    the coroutine started.
    """
    thread = EventLoopThread(nullcontext[None], name)
    with exit_on_sigterm(), thread:
        thread.start(_START_SECONDS)
        return thread.call(work, NO_DEADLINE, name)


def _plain(value: object, key: str) -> object:
    """Return a key's value as a file has it: classes and functions as package.module:name."""
    if isinstance(value, Mapping):
        return {name: _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, type | FunctionType):
        path = f"{value.__module__}:{value.__qualname__}"
        if "." in value.__qualname__ or load_object(path, key) is not value:
            raise InputError(f"{key}: {path} must be at the top level of a module, to be imported")
        return path
    return str(value) if isinstance(value, Path) else value


def _prepare(
    config: ConfigSource | None,
    keys: Mapping[str, object],
    values: Mapping[str, object],
    environment: "str | Callable[[JsonObject], object] | None" = None,
    data: Source = None,
    eval_data: Source = None,
    *,
    optional: Sequence[str] = (),
    resume: str | Path | None = None,
) -> tuple[Config, ProgramInputs]:
    """Return the configuration, and the objects for the run. The `values`, by dotted key, take
    precedence over `keys`; values that are None are ignored."""

    def flat(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        for key, value in values.items():
            if isinstance(value, Mapping) and prefix + key in _SECTIONS:
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, _plain(value, prefix + key)

    settings: dict[str, object] = {}
    for key, value in flat(keys, ""):
        if key in settings:
            raise InputError(f"{key} is given twice, in its section and as a dotted keyword")
        settings[key] = value
    settings |= {key: value for key, value in flat(values, "") if value is not None}
    needless = list(optional)
    rows: dict[str, Sequence[JsonObject] | None] = {}
    for key, source in (("data.path", data), ("data.eval_path", eval_data)):
        rows[key] = None
        if isinstance(source, str | Path):
            settings[key] = str(source)
        elif source is not None:
            from turnwise.rollouts.data import given_rows  # slow to import

            rows[key] = cast("Sequence[JsonObject]", given_rows(source))
            settings[key] = None
            needless.append(key)
    factory: EnvironmentType | None = None
    if isinstance(environment, str):
        settings["environment"] = environment
    elif environment is not None:  # checked when it makes the first environment
        factory = cast("EnvironmentType", environment)
        name = getattr(environment, "__qualname__", type(environment).__qualname__)
        settings["environment"] = f"{getattr(environment, '__module__', '__main__')}:{name}"
    inputs = ProgramInputs(factory, rows["data.path"], rows["data.eval_path"])
    if resume is not None:
        if config is not None:
            raise InputError("resume uses the configuration of the run: omit config")
        return commands.config_of_run(Path(resume), settings=settings, optional=needless), inputs
    return load_config(config or {}, settings=settings, optional=needless), inputs
