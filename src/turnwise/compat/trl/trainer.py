"""`GRPOTrainer` with the arguments and methods of TRL's class; TRL is not imported."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from rich.console import Console

from turnwise.compat.trl.config import GRPOConfig, lora_settings, settings
from turnwise.compat.trl.environment import RewardFunction, TextLoop, TrlEnvironments
from turnwise.compat.trl.masks import TokenMasks
from turnwise.config import Config, make_config
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts.data import given_rows
from turnwise.run import commands
from turnwise.run.api import run_command
from turnwise.run.commands import ProgramInputs, TrainingResult
from turnwise.tools import ToolFunction

_CONTEXT = 4096
"""Context length where neither the model nor the configuration sets a smaller or larger one."""
RewardSource = str | Path | RewardFunction
Rows = Iterable[Mapping[str, Any]]


class TrainOutput(NamedTuple):
    """The result of `GRPOTrainer.train`, as in Transformers."""

    global_step: int
    training_loss: float
    """Mean loss of the steps that trained anything."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainState:
    """The trainer's `state`: the position, and a record for each training step."""

    global_step: int = 0
    max_steps: int = 0
    log_history: list[JsonObject] = field(default_factory=list)


class GRPOTrainer(TokenMasks):
    """Trains a model by GRPO with TRL's arguments; what has no equal here is refused by name.

    Args:
        model: Folder or Hugging Face name, or a Transformers model, which is saved first.
        reward_funcs: A function with TRL's signature, the path of a reward model, or a list.
        args: Fields of TRL's configuration; None uses the defaults.
        train_dataset: Rows with a column `prompt`. Not needed if the environment has the data.
        eval_dataset: Held-out rows.
        processing_class: Tokenizer; None uses the model's.
        peft_config: PEFT's `LoraConfig`: adapters are trained instead of the weights.
        tools: Functions that the model may call.
        environment_factory: A class or function without arguments, or a dictionary of them.

    Raises:
        InputError: naming an argument that cannot be used.

    Example:
        trainer = GRPOTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=brevity,
            args=GRPOConfig(output_dir="brevity", max_steps=10),
            train_dataset=rows,
        )
        trainer.train()
        trainer.save_model("brevity-model")
    """

    def __init__(
        self,
        model: object,
        reward_funcs: RewardSource | Sequence[RewardSource] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: object = None,
        reward_processing_classes: object = None,
        callbacks: Sequence[object] | None = None,
        optimizers: tuple[object, object] = (None, None),
        quantization_config: object = None,
        peft_config: object = None,
        tools: Sequence[ToolFunction] | None = None,
        rollout_func: object = None,
        environment_factory: object = None,
    ) -> None:
        unsupported: dict[str, object] = {
            "reward_processing_classes": reward_processing_classes,
            "callbacks": callbacks,
            "optimizers": any(one is not None for one in optimizers),
            "quantization_config": quantization_config,
            "rollout_func": rollout_func,
        }
        for name in filter(unsupported.get, unsupported):
            _refuse(name)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "start the script with python, not with torchrun or accelerate launch: the run "
                'starts its own processes, GRPOConfig(turnwise={"training.ranks": N}) of them'
            )
        self.args = _with_folder(args, model)
        self._environments = TrlEnvironments(environment_factory, tools or ())
        rows = self._rows(train_dataset, environment_factory)
        eval_rows = None if eval_dataset is None else _listed(eval_dataset, "eval_dataset")
        with_tools = bool(tools) or environment_factory is not None
        values = settings(self.args, None if train_dataset is None else len(rows), tools=with_tools)
        folder = Path(str(self.args.output_dir)).resolve()
        values |= {
            "output_dir": str(folder.parent),
            "name": folder.name,
            "environment": _environment_path(environment_factory),
            "rollout.rewards": self._rewards(reward_funcs),
        }
        if isinstance(rows[0].get("prompt"), str):
            if with_tools:
                raise InputError("prompt must be a list of messages where there are tools")
            values["rollout.loop"] = f"{TextLoop.__module__}:{TextLoop.__name__}"
        values |= _saved(model, processing_class, folder)
        if peft_config is not None:
            trust = self.args.trust_remote_code
            values |= lora_settings(peft_config, str(values["model.path"]), trust_remote_code=trust)
        values.setdefault("model.max_length", _context(values, self.args))
        self.settings = values | self.args.turnwise
        """Keys of Turnwise's configuration, with their values."""
        self._console = Console(quiet=bool(self.args.disable_tqdm))
        self._inputs = ProgramInputs(self._environments, rows, eval_rows)
        training = self._config.training
        self.state = TrainState(max_steps=training.steps * training.versions_per_step)
        self._result: TrainingResult | None = None

    @property
    def _config(self) -> Config:
        return make_config({}, settings=self.settings, optional=["data.path"])

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, and write all results to the run folder `args.output_dir`.

        Args:
            resume_from_checkpoint: True, or the run folder, continues from its last checkpoint.
        """
        config = self._config
        updates = config.training.versions_per_step
        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        if resume:
            run = commands.run_folder(config)
            if resume is not True:
                run = Path(str(resume)).resolve()
                run = run.parent.parent if run.parent.name == "checkpoints" else run
            home = {"output_dir": str(run.parent), "name": run.name}
            config = config.model_copy(update=home)
            work = partial(commands.train, config, self._console, run, self._inputs)
        else:
            work = partial(commands.train, config, self._console, None, self._inputs)
        self._result = result = run_command(work, "the training run")
        trained = [record for record in result.metrics if record["step"]]
        self.state.log_history = [
            {  # under the names of TRL's log, with our own beside them
                **record,
                **{f"rewards/{name}/mean": mean for name, mean in record["reward_parts"].items()},
                "step": record["step"] * updates,
                "reward": record["reward_mean"],
            }
            for record in trained
        ]
        self.state.global_step = trained[-1]["step"] * updates if trained else 0
        losses = [record["loss"] for record in trained if record.get("loss") is not None]
        loss = sum(losses) / len(losses) if losses else 0.0
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def evaluate(self) -> dict[str, float]:
        """Evaluate the trained model, or before training the given one, on `eval_dataset`."""
        if self._inputs.eval_rows is None:
            raise InputError("GRPOTrainer.evaluate needs eval_dataset")
        settings = dict(self.settings)
        if self._result is not None and self._result.checkpoint is not None:
            settings["model.path"] = str(self._result.checkpoint)
        config = make_config({}, settings=settings, optional=["data.path"])
        work = partial(commands.evaluate, config, self._console, self._inputs)
        evaluation = run_command(work, "the evaluation")
        return {f"eval_{name}": value for name, value in evaluation.summary.items()}

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained model or adapter, with its tokenizer; None means `args.output_dir`."""
        checkpoint = None if self._result is None else self._result.checkpoint
        if checkpoint is None:
            raise InputError("GRPOTrainer.save_model needs a finished train()")
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        for file in checkpoint.iterdir():
            if file.is_file():  # not the state to resume from
                shutil.copy2(file, folder / file.name)

    def _rows(self, train_dataset: Rows | None, factory: object) -> Sequence[JsonObject]:
        """Return the training rows; placeholders if the environment has the data."""
        if train_dataset is None:
            if factory is None or isinstance(factory, Mapping):
                raise InputError("train_dataset is required unless one environment has the data")
            row = {"prompt": [{"role": "user", "content": ""}]}
            return [row] * max(1, self.args.num_generations or 1)
        most = None
        if not isinstance(train_dataset, Sized):
            if self.args.max_steps <= 0:
                raise InputError("GRPOConfig.max_steps must be set: train_dataset has no length")
            most = self.args.per_device_train_batch_size * self.args.max_steps
            most *= self.args.gradient_accumulation_steps
        rows = _listed(train_dataset, "train_dataset", most)
        if factory is None and "prompt" not in rows[0]:
            raise InputError(f'train_dataset has no column "prompt", but {", ".join(rows[0])}')
        return rows

    def _rewards(
        self, given: RewardSource | Sequence[RewardSource] | None
    ) -> list[dict[str, object]]:
        """Return the parts of the reward, and keep the functions by their paths."""
        sources: list[object] = [] if given is None else [given]
        if isinstance(given, list | tuple):
            sources = list(given)
        weights = self.args.reward_weights or [1.0] * len(sources)
        if len(weights) != len(sources):
            raise InputError(
                f"GRPOConfig.reward_weights has {len(weights)} numbers for {len(sources)} "
                "reward_funcs"
            )
        parts: list[dict[str, object]] = []
        for source, weight in zip(sources, weights, strict=True):
            if isinstance(source, str | Path):
                parts.append({"model": str(source), "weight": weight})
                continue
            if not callable(source) or hasattr(source, "state_dict"):
                _refuse("reward_funcs", f"{source!r:.80} is no function or path of a model")
            name = _name(source)
            taken = [str(part.get("name")).partition("#")[0] for part in parts]
            if name in taken:
                name = f"{name}#{taken.count(name) + 1}"
            path = f"{getattr(source, '__module__', '__main__')}:{name}"
            self._environments.reward_functions[path] = source
            parts.append({"trl": path, "name": name, "weight": weight})
        if self._environments.rewards:
            parts.append({"name": "environment", "weight": 1.0})
        if not parts:
            raise InputError("reward_funcs is required unless the environment has a get_reward")
        return parts


def _refuse(name: str, why: str = "Turnwise has nothing of the kind") -> NoReturn:
    raise InputError(f"GRPOTrainer: {name} is not supported: {why}")


def _with_folder(args: GRPOConfig | None, model: object) -> GRPOConfig:
    """Return the configuration with an output folder, as TRL chooses it."""
    if args is not None and not isinstance(args, GRPOConfig):
        raise InputError(f"args must be turnwise.trl.GRPOConfig, not {type(args).__name__}")
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "model")
    if args is None:
        return GRPOConfig(output_dir=f"{Path(str(name)).name}-GRPO")
    args.output_dir = args.output_dir or "trainer_output"
    return args


def _listed(rows: Rows, name: str, most: int | None = None) -> Sequence[JsonObject]:
    """Return rows, or the first of a stream, as dictionaries."""
    if isinstance(rows, Mapping):
        _refuse(name, "give one dataset, not several by name")
    given = given_rows(cast("Iterable[JsonObject]", rows))
    listed = [dict(row) for row in islice(given, most)]
    if not listed:
        raise InputError(f"{name} has no rows")
    for column in ("image", "images"):
        if column in listed[0]:
            _refuse(name, f"it has a column {column!r}, and only text is supported")
    return listed


def _environment_path(factory: object) -> str:
    """Return the configuration's name of the environments."""
    if factory is None or isinstance(factory, Mapping):
        return f"{TrlEnvironments.__module__}:{TrlEnvironments.__name__}"
    return f"trl:{getattr(factory, '__module__', '__main__')}:{_name(factory)}"


def _name(function: object) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _saved(model: object, tokenizer: object, folder: Path) -> dict[str, object]:
    """Return the paths of model and tokenizer; objects are saved below the run folder."""
    values: dict[str, object] = {}
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained") or hasattr(tokenizer, "image_processor"):
            _refuse("processing_class", "it must be a tokenizer")
        values["model.tokenizer"] = str(folder / "tokenizer")
        tokenizer.save_pretrained(values["model.tokenizer"])
    if isinstance(model, str | Path):
        return values | {"model.path": str(model)}
    if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
        _refuse("model", "it must be a path, a name or a Transformers model without adapters")
    if tokenizer is None:
        values["model.tokenizer"] = str(getattr(model, "name_or_path", ""))
    model.save_pretrained(str(folder / "initial_model"))
    return values | {"model.path": str(folder / "initial_model")}


def _context(values: Mapping[str, object], args: GRPOConfig) -> int:
    """Return the context length: the configured one, or a usual one that the model has."""
    from transformers import AutoConfig  # seconds to import

    if args.vllm_max_model_length is not None:
        return args.vllm_max_model_length
    wanted = max(_CONTEXT, 2 * (args.max_completion_length or 0))
    try:
        model = AutoConfig.from_pretrained(
            resolve_model(str(values["model.path"])), trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError):  # named when the run starts
        return wanted
    known = getattr(model.get_text_config(), "max_position_embeddings", None)
    return min(wanted, known or wanted)
