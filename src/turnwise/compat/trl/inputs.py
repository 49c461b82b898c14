"""Convert the arguments of `GRPOTrainer` to a run's inputs: rows, rewards and models.

Objects in memory that other processes need (models, tokenizers) are saved below the run folder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from turnwise.compat.trl.config import GRPOConfig
from turnwise.compat.trl.environment import RewardFunction, TrlEnvironments, reward_of
from turnwise.compat.trl.refusals import refuse_argument
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.data import given_rows
from turnwise.rollouts.problems import Lazy

_CONTEXT = 4096
"""Default context length in tokens. Twice the maximum completion length replaces a smaller default,
but the result never exceeds the positions of the model."""
RewardSource = str | Path | RewardFunction
Rows = Iterable[Mapping[str, Foreign]]
HeldoutRows = Rows | Mapping[str, Rows]
"""Held-out rows, or several sets of them by name."""


def is_stream(rows: object) -> bool:
    """Return whether rows have no length, so that they can only be iterated."""
    return rows is not None and not isinstance(rows, Sized)


def check_streams(args: GRPOConfig, *datasets: Foreign) -> None:
    """If a dataset is a stream, check `args`, and change `args` as TRL does.

    Args:
        datasets: The training rows, then held-out rows, which may be several sets by name.
    """
    sets = (rows.values() if isinstance(rows, Mapping) else [rows] for rows in datasets)
    if not any(is_stream(rows) for each in sets for rows in each):
        return
    given: Foreign = args.accelerator_config
    known = dict(given if isinstance(given, Mapping) else getattr(given, "__dict__", {}))
    if known.get("dispatch_batches"):
        raise InputError(
            "Iterable datasets require `dispatch_batches=False`, as in TRL, but accelerator_config "
            "sets it to True"
        )
    args.accelerator_config = SimpleNamespace(**known | {"dispatch_batches": False})
    if is_stream(datasets[0]):
        args.dataloader_num_workers = 0


def heldout_rows(
    rows: Foreign,
) -> Sequence[JsonObject] | dict[str, Sequence[JsonObject]] | None:
    """Return held-out rows as dictionaries; several sets stay a mapping by name."""
    name = "eval_dataset"
    if isinstance(rows, Mapping):
        return {str(of): listed(each, f"{name}[{of!r}]") for of, each in rows.items()}
    return None if rows is None else listed(rows, name)


def training_rows(given: Rows | None, factory: object, args: GRPOConfig) -> Sequence[JsonObject]:
    """Return the training rows; if the environment has the data, return rows with an empty
    prompt."""
    if given is None:
        if factory is None:
            raise InputError("`train_dataset` is required unless an `environment_factory` has it")
        if isinstance(factory, Mapping):
            raise InputError(
                "a dictionary of environments requires a `train_dataset` with a column "
                "`environment`, which names the one of each row"
            )
        row = {"prompt": [{"role": "user", "content": ""}]}
        return [row] * max(1, args.num_generations or 1)
    limit = None
    if is_stream(given):
        if args.max_steps <= 0:
            raise InputError("GRPOConfig.max_steps must be set: train_dataset has no length")
        limit = args.per_device_train_batch_size * args.max_steps
        limit *= args.gradient_accumulation_steps
    rows = listed(given, "train_dataset", limit)
    if factory is None and "prompt" not in rows[0]:
        raise InputError(f'train_dataset has no column "prompt", but {", ".join(rows[0])}')
    return rows


def listed(rows: Rows, name: str, limit: int | None = None) -> Sequence[JsonObject]:
    """Return rows as dictionaries, at most the first `limit` of them."""
    if isinstance(rows, Mapping):
        refuse_argument(name, "give one dataset, not several by name")
    given = given_rows(cast("Iterable[JsonObject]", rows))
    if isinstance(given, Lazy) and len(given) and {"image", "images"} & {*given[0]}:
        return given  # a dataset that decodes its images when they are needed
    found = [dict(row) for row in islice(given, limit)]
    if not found:
        raise InputError(f"{name} has no rows")
    return found


class TrlRewards:
    """The rewards of a script: as entries of `rollout.rewards`, and as attributes of TRL's trainer.

    Args:
        given: The argument `reward_funcs`.
        weights: The argument `reward_weights`; None gives each reward the weight 1.
        tokenizers: The argument `reward_processing_classes`.
        environments: Keeps the reward functions for the run. Environments with a `get_reward` add a
            reward.
        folder: Models and tokenizers in memory are saved below it.
    """

    def __init__(
        self,
        given: RewardSource | Sequence[RewardSource] | None,
        weights: Sequence[float] | None,
        tokenizers: object,
        environments: TrlEnvironments,
        folder: Path,
    ) -> None:
        self.sources = _several(given)
        count = len(self.sources)
        self.weights = list(weights or [1.0] * count)
        self.tokenizers = _several(tokenizers) or [None] * count
        self.names: list[str] = []
        self.parts: list[dict[str, object]] = []
        self._environments, self._folder = environments, folder
        each = {"reward_weights": self.weights, "reward_processing_classes": self.tokenizers}
        for name, found in each.items():
            if len(found) != count:
                raise InputError(
                    f"the number of {name} ({len(found)}) must match that of reward_funcs ({count})"
                )
        for source, weight, tokenizer in zip(
            self.sources, self.weights, self.tokenizers, strict=True
        ):
            if isinstance(source, str | Path) or hasattr(source, "save_pretrained"):
                self._add(*self._model(source, tokenizer), weight)
            elif callable(source) and not hasattr(source, "state_dict"):
                self._add(name_of(source), {}, weight, source)
            else:
                why = f"{source!r:.80} is no function, model of Transformers, or path of a model"
                refuse_argument("reward_funcs", why)
        for kind in dict.fromkeys(map(type, environments.first_instances())):
            if hasattr(kind, "get_reward"):
                function = reward_of(kind)
                self.sources.append(function)
                self.weights.append(1.0)
                self.tokenizers.append(None)
                # With several classes, each class needs a reward for its own instances only.
                self._add(kind.__name__, {}, 1.0, function if environments.chooses else None)
        if not self.parts:
            raise InputError(
                "No reward source provided: pass reward_funcs, or an environment_factory whose "
                "environments have a get_reward"
            )

    def _model(self, source: Foreign, tokenizer: Foreign) -> tuple[str, dict[str, object]]:
        """Return the name of a reward model and its entry of `rollout.rewards`.

        A model in memory is saved, and so is a given tokenizer. Without a given tokenizer, a model
        in memory uses the tokenizer of the path or name that it was loaded from.
        """
        path, place = str(source), str(self._folder / f"reward_model_{len(self.parts)}")
        entry: dict[str, object] = {"model": path}
        if not isinstance(source, str | Path):
            if tokenizer is not None:  # the model scores the last token that is not padding
                source.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            source.save_pretrained(place)
            path = str(source.config.name_or_path)
            entry = {"model": place, "tokenizer": path}
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
            entry["tokenizer"] = place
        return Path(path).name, entry

    def _add(
        self,
        name: str,
        entry: dict[str, object],
        weight: float,
        function: RewardFunction | None = None,
    ) -> None:
        """Add an entry of `rollout.rewards` under a unique name."""
        taken = [each.partition("#")[0] for each in self.names].count(name)
        name = f"{name}#{taken + 1}" if taken else name
        if function is not None:
            path = f"{getattr(function, '__module__', '__main__')}:{name}"
            self._environments.reward_functions[path] = function
            entry = {"trl": path}
        self.names.append(name)
        self.parts.append({**entry, "name": name, "weight": weight})


def _several(given: Foreign) -> list[Foreign]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def name_of(function: object) -> str:
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def environment_path(factory: object) -> str:
    """Return the value of the key `environment` for a factory."""
    if factory is None or isinstance(factory, Mapping):
        return f"{TrlEnvironments.__module__}:{TrlEnvironments.__name__}"
    return f"trl:{getattr(factory, '__module__', '__main__')}:{name_of(factory)}"


def saved_policy(model: Foreign, tokenizer: Foreign, folder: Path) -> dict[str, object]:
    """Return the settings with the paths of model and tokenizer; objects in memory are first saved
    below the run folder."""
    values: dict[str, object] = {}
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained"):
            refuse_argument("processing_class", "it must be a tokenizer or a processor")
        values["model.tokenizer"] = str(folder / "tokenizer")
        tokenizer.save_pretrained(values["model.tokenizer"])
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    if isinstance(model, str | Path):
        if processor is not None:
            own = getattr(_processor(str(model)), "image_processor", None)
            if own is None or own.to_dict() != processor.image_processor.to_dict():
                why = "its image processor has other settings than the model's own: save it there"
                refuse_argument("processing_class", why)
        return values | {"model.path": str(model)}
    if not hasattr(model, "save_pretrained"):
        refuse_argument("model", "it must be a path, a name, or a model of Transformers or PEFT")
    if tokenizer is None:
        values["model.tokenizer"] = str(getattr(model, "name_or_path", ""))
    plain = deepcopy(model).unload() if hasattr(model, "peft_config") else model
    plain.save_pretrained(str(folder / "initial_model"))
    if hasattr(plain.config, "vision_config"):
        processor = processor or _processor(str(getattr(model, "name_or_path", "")))
        processor.save_pretrained(str(folder / "initial_model"))
    return values | {"model.path": str(folder / "initial_model")}


def _processor(path: str) -> Foreign:
    from transformers import AutoProcessor  # seconds to import

    return AutoProcessor.from_pretrained(resolve_model(path))


def context_length(values: Mapping[str, object], args: GRPOConfig) -> int:
    """Return the context length in tokens: `vllm_max_model_length`, or a default that the model
    supports (see `_CONTEXT`)."""
    from transformers import AutoConfig  # seconds to import

    if args.vllm_max_model_length is not None:
        return args.vllm_max_model_length
    wanted = max(_CONTEXT, 2 * (args.max_completion_length or 0))
    load: Callable[..., Foreign] = AutoConfig.from_pretrained
    trusted = bool(values["model.trust_remote_code"])
    try:
        model = load(resolve_model(str(values["model.path"])), trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(f"GRPOTrainer: model: {error}") from error
        return wanted  # the start of the run reports the error
    known = getattr(model.get_text_config(), "max_position_embeddings", None)
    return min(wanted, known or wanted)
