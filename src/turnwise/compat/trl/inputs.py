"""Arguments of `GRPOTrainer` in the form that a run takes: rows, rewards and models.

Objects in memory that other processes need (models, tokenizers) are saved below the run folder.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

from turnwise.compat.trl.config import GRPOConfig
from turnwise.compat.trl.environment import RewardFunction, TrlEnvironments, reward_of
from turnwise.compat.trl.policy import without_adapters
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.data import given_rows

_CONTEXT = 4096
"""Context length where neither the model nor the configuration sets a smaller or larger one."""
RewardSource = str | Path | RewardFunction
Rows = Iterable[Mapping[str, Foreign]]
HeldoutRows = Rows | Mapping[str, Rows]
"""Held-out rows, or several sets of them by name."""


class ScriptError(InputError, ValueError):
    """A mistake in a script; a `ValueError` too, as which TRL raises its own.

    Example:
        try:
            GRPOTrainer(model="Qwen/Qwen3-0.6B", train_dataset=rows)
        except ValueError as error:
            print(error)  # there is no reward
    """


@contextmanager
def as_value_error() -> Iterator[None]:
    """Raise the InputErrors of what TRL's users call as `ScriptError`."""
    try:
        yield
    except ScriptError:
        raise
    except InputError as error:
        raise ScriptError(str(error)) from error


def refuse(name: str, why: str = "Turnwise has nothing of the kind") -> NoReturn:
    raise InputError(f"GRPOTrainer: {name} is not supported: {why}")


def is_stream(rows: object) -> bool:
    """Return whether rows can only be read one after another, in an unknown number."""
    return rows is not None and not isinstance(rows, Sized)


def check_streams(args: GRPOConfig, *datasets: Foreign) -> None:
    """Check, and set, what TRL requires of `args` where a dataset is a stream; the first one is
    that of the training. Held-out rows may be several sets by name."""
    sets = (rows.values() if isinstance(rows, Mapping) else [rows] for rows in datasets)
    if not any(is_stream(rows) for each in sets for rows in each):
        return
    given: Foreign = args.accelerator_config
    if given is None or isinstance(given, Mapping):
        given = SimpleNamespace(**{"dispatch_batches": None, **(given or {})})
    if given.dispatch_batches:
        raise InputError(
            "Iterable datasets require `dispatch_batches=False`, as in TRL, but accelerator_config "
            "sets it to True"
        )
    given.dispatch_batches = False
    args.accelerator_config = given
    if is_stream(datasets[0]):
        args.dataloader_num_workers = 0


def heldout_rows(
    rows: Foreign,
) -> Sequence[JsonObject] | dict[str, Sequence[JsonObject]] | None:
    """Return held-out rows, or those of each set by name, as dictionaries."""
    name = "eval_dataset"
    if isinstance(rows, Mapping):
        return {str(of): listed(each, f"{name}[{of!r}]") for of, each in rows.items()}
    return None if rows is None else listed(rows, name)


def training_rows(given: Rows | None, factory: object, args: GRPOConfig) -> Sequence[JsonObject]:
    """Return the training rows; placeholders if the environment has the data."""
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
    most = None
    if is_stream(given):
        if args.max_steps <= 0:
            raise InputError("GRPOConfig.max_steps must be set: train_dataset has no length")
        most = args.per_device_train_batch_size * args.max_steps
        most *= args.gradient_accumulation_steps
    rows = listed(given, "train_dataset", most)
    if factory is None and "prompt" not in rows[0]:
        raise InputError(f'train_dataset has no column "prompt", but {", ".join(rows[0])}')
    return rows


def listed(rows: Rows, name: str, most: int | None = None) -> Sequence[JsonObject]:
    """Return rows, or the first of a stream, as dictionaries."""
    if isinstance(rows, Mapping):
        refuse(name, "give one dataset, not several by name")
    given = given_rows(cast("Iterable[JsonObject]", rows))
    found = [dict(row) for row in islice(given, most)]
    if not found:
        raise InputError(f"{name} has no rows")
    for column in ("image", "images"):
        if column in found[0]:
            refuse(name, f"it has a column {column!r}, and only text is supported")
    return found


class Rewards:
    """The rewards of a script: as entries of `rollout.rewards`, and as TRL's trainer keeps them.

    Args:
        given: `reward_funcs`.
        weights: `reward_weights`; None means 1 each.
        tokenizers: `reward_processing_classes`.
        environments: Environments, some of which may have a reward of their own (`get_reward`),
            and which keep the functions for the run.
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
        sources: list[Foreign] = list(given) if isinstance(given, list | tuple) else [given]
        self.sources = [] if given is None else sources
        self.weights = list(weights or [1.0] * len(self.sources))
        self.tokenizers = _beside(tokenizers, len(self.sources))
        self.names: list[str] = []
        self.parts: list[dict[str, object]] = []
        self._environments = environments
        self._folder = folder
        if len(self.weights) != len(self.sources):
            raise InputError(
                f"GRPOConfig.reward_weights has {len(self.weights)} numbers for "
                f"{len(self.sources)} reward_funcs"
            )
        for source, weight, tokenizer in zip(
            self.sources, self.weights, self.tokenizers, strict=True
        ):
            self._add(source, weight, tokenizer)
        self._add_environments()
        if not self.parts:
            raise InputError(
                "No reward source provided: pass reward_funcs, or an environment_factory whose "
                "environments have a get_reward"
            )

    def _add(self, source: Foreign, weight: float, tokenizer: Foreign) -> None:
        if isinstance(source, str | Path):
            entry: dict[str, object] = {"model": str(source)}
            name = Path(source).name
        elif hasattr(source, "state_dict"):
            entry, name = self._saved_model(source, tokenizer)
        elif callable(source):
            self._add_function(source, name_of(source), weight)
            return
        else:
            refuse("reward_funcs", f"{source!r:.80} is no function, model or path of a model")
        if tokenizer is not None:
            place = self._folder / f"reward_tokenizer_{len(self.parts)}"
            tokenizer.save_pretrained(str(place))
            entry["tokenizer"] = str(place)
        self.parts.append({**entry, "name": self._named(name), "weight": weight})

    def _saved_model(self, model: Foreign, tokenizer: Foreign) -> tuple[dict[str, object], str]:
        """Save a reward model; its tokenizer is that of its name, unless another is given."""
        if not hasattr(model, "save_pretrained"):
            refuse("reward_funcs", f"{type(model).__name__} is no model of Transformers")
        if tokenizer is not None:  # the score is that of the last token that is not padding
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        place = self._folder / f"reward_model_{len(self.parts)}"
        model.save_pretrained(str(place))
        path = str(model.config.name_or_path)
        return {"model": str(place), "tokenizer": path}, Path(path).name

    def _add_function(self, function: RewardFunction, name: str, weight: float) -> None:
        name = self._named(name)
        path = f"{getattr(function, '__module__', '__main__')}:{name}"
        self._environments.reward_functions[path] = function
        self.parts.append({"trl": path, "name": name, "weight": weight})

    def _named(self, name: str) -> str:
        """Return a name that no other part has, and keep it."""
        taken = [each.partition("#")[0] for each in self.names]
        self.names.append(f"{name}#{taken.count(name) + 1}" if name in taken else name)
        return self.names[-1]

    def _add_environments(self) -> None:
        """Add the environments' own rewards: a part for each class that has a `get_reward`."""
        kinds = dict.fromkeys(map(type, self._environments.first_instances()))
        for kind in kinds:
            if hasattr(kind, "get_reward"):
                function = reward_of(kind)
                self.sources.append(function)
                self.weights.append(1.0)
                self.tokenizers.append(None)
                if self._environments.chooses:  # the part of a class does not apply to others
                    self._add_function(function, kind.__name__, 1.0)
                else:
                    self.parts.append({"name": self._named(kind.__name__), "weight": 1.0})


def _beside(tokenizers: object, count: int) -> list[Foreign]:
    """Return a tokenizer or None for each reward function."""
    if tokenizers is None:
        return [None] * count
    given = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if len(given) != count:
        raise InputError(
            f"the number of reward_processing_classes ({len(given)}) must match that of "
            f"reward_funcs ({count}); None stands for no tokenizer"
        )
    return given


def name_of(function: object) -> str:
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def environment_path(factory: object) -> str:
    """Return the configuration's name of the environments."""
    if factory is None or isinstance(factory, Mapping):
        return f"{TrlEnvironments.__module__}:{TrlEnvironments.__name__}"
    return f"trl:{getattr(factory, '__module__', '__main__')}:{name_of(factory)}"


def saved_policy(model: Foreign, tokenizer: Foreign, folder: Path) -> dict[str, object]:
    """Return the paths of model and tokenizer; objects are saved below the run folder."""
    values: dict[str, object] = {}
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained") or hasattr(tokenizer, "image_processor"):
            refuse("processing_class", "it must be a tokenizer")
        values["model.tokenizer"] = str(folder / "tokenizer")
        tokenizer.save_pretrained(values["model.tokenizer"])
    if isinstance(model, str | Path):
        return values | {"model.path": str(model)}
    if not hasattr(model, "save_pretrained"):
        refuse("model", "it must be a path, a name, or a model of Transformers or PEFT")
    if tokenizer is None:
        values["model.tokenizer"] = str(getattr(model, "name_or_path", ""))
    without_adapters(model).save_pretrained(str(folder / "initial_model"))
    return values | {"model.path": str(folder / "initial_model")}


def context_length(values: Mapping[str, object], args: GRPOConfig) -> int:
    """Return the context length: the configured one, or a usual one that the model has."""
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
        return wanted  # named when the run starts
    known = getattr(model.get_text_config(), "max_position_embeddings", None)
    return min(wanted, known or wanted)
