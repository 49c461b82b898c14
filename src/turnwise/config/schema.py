"""The whole configuration: all sections, and the checks that involve several of them.

To add a configuration key: write a field with a docstring in the file of its section, or here. A
test fails if no code reads the key, or if no rule in `config/resume.py`, for the key or its whole
section, says whether it may change on resume. The README and `tests/test_config.py` have the number
of keys.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator

from turnwise.config.algorithm import AlgorithmConfig, Dpo, Gae, NoAdvantage, TeacherConfig
from turnwise.config.aliases import REPLACED_KEYS, VLLM_NAMES
from turnwise.config.base import NonNegativeInt, Seconds, Section, Tree, satisfies
from turnwise.config.data import DataConfig, ModelConfig, RowsConfig
from turnwise.config.rollout import (
    BASE,
    LOOP_NAMES,
    EnvironmentConfig,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
)
from turnwise.config.serving import EngineConfig, ServingConfig, WeightsConfig
from turnwise.config.training import (
    AlarmsConfig,
    MetricsConfig,
    TrainingConfig,
    TrajectoriesConfig,
)

_OTHER_POLICIES = (BASE, "policy", "reference", "value", "default", "critic")
"""Names that `rollout.policies` may not use, because the trainer uses them for models."""


class Config(Section):
    """The whole configuration of a run; `load_config` reads one from a file.

    Example:
        config = load_config("config.yaml", ["training.steps=10"])
        print(config.training.steps, config.sampling.temperature)
    """

    name: Annotated[
        str,
        satisfies(
            lambda name: name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name},
            "must be one folder in output_dir, not {!r}: choose a name without slashes, "
            "and set output_dir for another place",
        ),
    ] = "run"
    """Name of the run's folder in output_dir: one name, not a path."""
    output_dir: str = "runs"
    """Folder that contains the run folders."""
    seed: int = 0
    """Seed of the data order and of sampling; only deterministic runs repeat exactly."""
    deterministic: bool = False
    """Make runs repeat bit for bit; slow, because the engine computes one request at a time."""
    exactness: Literal["stop", "warn"] = "stop"
    """Reaction if a token to be trained differs from the sampled token: end the run (stop), or only
    report it (warn)."""
    environment: str | None = None
    """Environment that turns rows into problems, tools and rewards, as package.module:Class;
    reasoning_gym:NAME, gymnasium:NAME, textarena:NAME, skyrl_gym:NAME or bfcl:NAME for an
    environment of these packages; or openenv:ws://host:port or nemo_gym:http://host:port for the
    environment of a server."""
    environment_args: Tree = {}
    """Keyword arguments of the environment, such as {size: 1000}."""
    environments: dict[str, EnvironmentConfig] = {}
    """Several environments by name, in place of environment and data.path; their groups are mixed.
    Each entry has environment, environment_args, data (path, eval_path, ...) and weight (its share
    of the groups, relative to the other weights; 1 by default). Its loop, tools and teacher replace
    rollout.loop, rollout.tools and algorithm.teacher."""
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = []
    """Experiment trackers that receive the metrics in addition to metrics.jsonl and TensorBoard;
    their packages must be installed."""
    project: str = "turnwise"
    """Name of the project in wandb and trackio, and of the experiment in mlflow."""
    entity: str | None = None
    """Team or user of wandb; null uses wandb's default."""
    tags: list[str] = []
    """Tags of the run in wandb and mlflow."""
    samples_every: NonNegativeInt = 10
    """Interval in steps at which the best and the worst trajectory of the step are shown, on the
    terminal and in trackers; 0 shows none."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level of turnwise's log lines on the terminal. The files in the run folder's `logs`
    contain the lines of all processes, including vLLM's and Ray's, from level info up, or debug if
    this is debug."""
    watchdog_seconds: Seconds = 60.0
    """Seconds without any progress after which the run reports what it is waiting for."""
    ray_address: str | None = None
    """Address of a running Ray cluster, or `auto`; null starts Ray on this machine. If the program
    has already called `ray.init`, the run uses that Ray in any case, and does not shut it down."""
    ray_env: dict[str, str] = {}
    """Environment variables of all Ray actors on all nodes (workers, trainer ranks and others),
    such as {HF_HOME: /data/hf, NCCL_DEBUG: INFO}. They override the variables of the node and the
    variables that Turnwise sets. If the mapping is empty, actors on this machine have the variables
    of this process."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    weights: WeightsConfig = WeightsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="before")
    @classmethod
    def _evaluate_as_sampled(cls, tree: object) -> object:
        """Fill eval.sampling with what `sampling` sets, and with `EvalConfig`'s own defaults."""
        if not isinstance(tree, dict):
            return tree
        evaluation = _set_keys(tree.get("eval"))
        sampling, chosen = _set_keys(tree.get("sampling")), evaluation.get("sampling")
        if not all(isinstance(one, Section | dict | None) for one in (tree.get("eval"), chosen)):
            return tree  # the later checks refuse it
        common = {key: sampling[key] for key in SamplingConfig.model_fields.keys() & sampling}
        own = _set_keys(EvalConfig.model_fields["sampling"].default)
        filled = {**common, **own, **_set_keys(chosen)}
        return {**tree, "eval": {**evaluation, "sampling": filled}}

    def parts(self) -> dict[str, "Config"]:
        """Return a configuration for each environment by name, as if it were the only environment.
        Without `environments`, the only name is ""."""
        if not self.environments:
            return {"": self}
        parts: dict[str, Config] = {}
        for name, entry in self.environments.items():
            rollout = {"loop": entry.loop, "tools": entry.tools}
            changed = {key: value for key, value in rollout.items() if value is not None}
            parts[name] = self.changed(
                {
                    "environment": entry.environment,
                    "environment_args": entry.environment_args,
                    "environments": {},
                    "data": {key: getattr(entry.data, key) for key in RowsConfig.model_fields},
                    "rollout": changed,
                    "algorithm": {"teacher": entry.teacher or self.algorithm.teacher},
                }
            )
        return parts

    def only(self, names: Collection[str]) -> "Config":
        kept = {name: entry for name, entry in self.environments.items() if name in names}
        return self.model_copy(update={"environments": kept})

    def with_row_limit(self, limit: int) -> "Config":
        """Return the configuration with at most this number of training rows per environment."""
        of_each = {
            name: entry.model_copy(update={"data": entry.data.first(limit)})
            for name, entry in self.environments.items()
        }
        data = self.data if of_each else self.data.first(limit)
        return self.model_copy(update={"data": data, "environments": of_each})

    def teachers(self) -> dict[str, TeacherConfig]:
        """Return the teachers of the environments that have one, by the names of `parts`."""
        found = {name: part.algorithm.teacher for name, part in self.parts().items()}
        return {name: teacher for name, teacher in found.items() if teacher is not None}

    def teacher_key(self, environment: str) -> str:
        """Return the key that sets the teacher of an environment."""
        entry = self.environments.get(environment)
        own = entry is not None and entry.teacher is not None
        return f"environments.{environment}.teacher" if own else "algorithm.teacher"

    def teacher_engines(self) -> dict[str, TeacherConfig]:
        """Return the teachers that have engines, without duplicates, each keyed by one of the
        configuration keys that set it."""
        of_sources = {
            teacher.source: (self.teacher_key(name), teacher)
            for name, teacher in self.teachers().items()
            if teacher.engines
        }
        return dict(of_sources.values())

    def for_teacher(self, teacher: TeacherConfig) -> "Config":
        """Return the configuration of a teacher's engines. Their context is one token longer,
        because they score a sequence by sampling one token after it."""
        kept = self.model.model_dump(include={"dtype", "trust_remote_code"})
        length = self.model.max_length + 1
        return self.changed(
            {
                "model": ModelConfig(path=teacher.model or "", max_length=length, **kept),
                "serving": {"workers": teacher.engines, "adapters": {}, "worker_servers": False},
                "engine": {"routing_replay": False, "logits_processors": []},
                "training": {"colocated": False},
                **{"algorithm": AlgorithmConfig(), "weights": WeightsConfig(), "environments": {}},
            }
        )

    def row_paths(self) -> dict[str, str]:
        """Return the paths of training and held-out rows that are set, by key."""
        found: dict[str, str | None] = {}
        for name, part in self.parts().items():
            section = f"environments.{name}.data" if name else "data"
            found |= {f"{section}.eval_sets.{of}": each for of, each in part.data.eval_sets.items()}
            found |= {f"{section}.eval_path": part.data.eval_path}
            found |= {f"{section}.path": part.data.path}
        return {key: path for key, path in found.items() if path is not None}

    def other_models(self) -> dict[str, str]:
        """Return the paths that are set for models other than the policy, by key."""
        models = {"algorithm.kl.model.path": self.algorithm.kl.model.path}
        if isinstance(self.algorithm.advantage, Gae):
            models["algorithm.advantage.model.path"] = self.algorithm.advantage.model.path
        for name, teacher in self.teachers().items():
            models[self.teacher_key(name)] = None if teacher.url else teacher.model
        return {key: path for key, path in models.items() if path is not None}

    @property
    def run_folder(self) -> Path:
        """Folder of the run."""
        return Path(self.output_dir, self.name)

    def with_api_key(self) -> "Config":
        """Return the configuration with the API key in it, for servers on nodes whose environment
        may lack the key."""
        return self.changed({"serving": {"api_key": self.serving.key}})

    @property
    def policies(self) -> list[str]:
        """Names of the policies that are trained."""
        return self.rollout.policies or ["policy"]

    @property
    def environment_weights(self) -> dict[str, float]:
        """Shares of the groups of several environments, by name."""
        return {name: entry.weight for name, entry in self.environments.items()}

    @property
    def versions_per_step(self) -> int:
        """Optimizer steps, hence weight versions, per training step."""
        return self.training.optimizer_steps * len(self.policies)

    def recent_versions(self, version: int = 0, known: Iterable[int] | None = None) -> deque[int]:
        """Return the weight versions at the ends of the last steps, the oldest first. Each step
        appends its version; the deque keeps as many steps as `training.max_staleness` needs.

        `known` are the versions in a checkpoint of `version`; None if an old checkpoint lacks them,
        or there is no checkpoint.
        """
        steps = self.training.steps_of_group
        if known is None:
            oldest = version - (steps - 1) * self.versions_per_step
            known = [oldest, version] if version else [0]
        return deque(known, maxlen=steps)

    @property
    def learning_rate(self) -> float:
        """`training.learning_rate`; if it is null, the default of reinforcement learning."""
        return self.training.learning_rate or (1e-5 if self.model.lora.rank else 1e-6)

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens in a trajectory's response."""
        turns = 1 if self.loops == {"single_turn"} else self.rollout.max_turns
        return self.rollout.max_response_tokens or self.sampling.max_tokens * turns

    @property
    def loops(self) -> set[str]:
        """Agent loops of all environments of the run."""
        return {part.rollout.loop for part in self.parts().values()}

    def mistakes(self) -> Iterator[str]:
        for name in self.ray_env:
            if name == "PYTHONPATH" or name.startswith("TURNWISE_"):
                yield f"ray_env: {name} is set by the run itself, and may not be changed"
        own = [key for key in ("environment", "environment_args") if getattr(self, key)]
        fields = RowsConfig.model_fields.items()
        rows = [f"data.{key}" for key, of in fields if getattr(self.data, key) != of.default]
        for key in [*own, *rows] if self.environments else ():
            yield (
                f"environments has its own environments and rows, and {key} is set too: "
                "move it into an entry of environments, or remove environments"
            )
        for name, entry in self.environments.items():
            if not re.fullmatch(r"[\w-]+", name):
                yield (
                    f"environments: the name {name!r} must have letters, digits, _ and - only: "
                    "problems, metrics and files are named by it"
                )
            for key in ("agent", "chat_scheduler", "sampler"):
                if entry.loop == key and not getattr(self.rollout, key):
                    yield f"environments.{name}.loop {key} needs rollout.{key}"
        limit, longest = self.rollout.context.limit, self.model.max_length
        if limit is not None and limit >= longest:
            yield (
                f"rollout.context.limit {limit} must be below model.max_length {longest}, where a "
                "conversation has no room left for a summary"
            )
        if (buffer := self.algorithm.overlong_tokens) > longest:
            yield (
                f"algorithm.overlong_tokens {buffer} exceeds model.max_length {longest}, so that "
                "even an empty trajectory would be punished: lower it"
            )
        yield from _engine_mistakes(self)
        yield from _layout_mistakes(self)
        yield from _training_mistakes(self)
        yield from _weights_mistakes(self)
        yield from _teacher_mistakes(self)
        yield from _policies_mistakes(self)


def _set_keys(section: object) -> dict[str, object]:
    """Return the keys of a section that have a value, as given or already checked."""
    if isinstance(section, Section):
        return {key: getattr(section, key) for key in section.model_fields_set}
    if not isinstance(section, dict):
        return {}
    return {key: value for key, value in section.items() if value is not None}


def _engine_mistakes(config: Config) -> Iterator[str]:
    engine, together = config.engine, config.engine.max_num_batched_tokens
    if together < config.model.max_length and (
        engine.vllm_args.get("enable_chunked_prefill") is False
    ):
        yield (
            f"engine.max_num_batched_tokens {together} is below model.max_length "
            f"{config.model.max_length}, and engine.vllm_args.enable_chunked_prefill is false: "
            "raise the first, lower the second, or remove the third"
        )
    if together < engine.max_num_seqs and not config.deterministic:
        yield (
            f"engine.max_num_batched_tokens {together} is below engine.max_num_seqs "
            f"{engine.max_num_seqs}, and each sequence computes at least one token per "
            "step: raise the first or lower the second"
        )
    for key in REPLACED_KEYS.keys() & engine.vllm_args.keys():
        yield f"engine.vllm_args.{key} is not supported: {REPLACED_KEYS[key]}"
    own_keys = {key: f"engine.{key}" for key in EngineConfig.model_fields} | VLLM_NAMES
    for key in own_keys.keys() & engine.vllm_args.keys():
        yield f"engine.vllm_args.{key} has its own key: set {own_keys[key]} instead"
    if "logprobs_mode" in engine.vllm_args:
        yield (
            "engine.vllm_args.logprobs_mode: training needs the log-probs of the distribution that "
            "was sampled from, processed_logprobs, which engines use: remove it"
        )
    allowed = engine.logits_processors_allowed
    for key, sampling in (("sampling", config.sampling), ("eval.sampling", config.eval.sampling)):
        for one in sampling.logits_processors:
            name = one if isinstance(one, str) else one.qualname
            if allowed is None or not re.fullmatch(allowed, name):
                yield (
                    f"{key}.logits_processors: engine.logits_processors_allowed does not match "
                    f"{name!r}; set it to a pattern that matches the name"
                )
    if engine.pipeline_parallel_size > 1 and (config.training.colocated or config.serving.spread):
        yield (
            "engine.pipeline_parallel_size above 1 requires engines in separate processes: set "
            "it to 1, or set training.colocated and serving.spread to false"
        )
    if engine.routing_replay and (
        config.deterministic or not engine.prefix_caching or engine.pipeline_parallel_size > 1
    ):
        yield (
            "engine.routing_replay: vLLM returns the experts of an engine with a prefix cache "
            "and without pipeline parallelism only: set engine.prefix_caching to true, "
            "deterministic to false, and engine.pipeline_parallel_size to 1"
        )


def _layout_mistakes(config: Config) -> Iterator[str]:
    training = config.training
    if training.ranks % training.context_parallel:
        yield (
            f"training.context_parallel {training.context_parallel} does not divide "
            f"training.ranks {training.ranks}: each sequence is shared by as many ranks"
        )
    if training.context_parallel > 1 and training.attention != "auto":
        yield (
            f"training.attention: {training.attention} computes whole rows, which "
            "training.context_parallel divides over ranks: set training.attention to auto, or "
            "training.context_parallel to 1"
        )
    for key, value, set_to in (
        ("training.context_parallel", training.context_parallel > 1, "1"),
        ("training.attention", training.attention != "auto", "auto"),
        ("engine.routing_replay", config.engine.routing_replay, "false"),
    ):
        if training.packing == "shared" and value:
            yield (
                "training.packing: shared computes a common prefix of sequences once, which "
                f"{key} does not support: set it to {set_to}, or training.packing to packed"
            )


def _training_mistakes(config: Config) -> Iterator[str]:
    training, model, ranks = config.training, config.model, config.training.ranks
    if training.max_staleness and config.deterministic:
        yield "deterministic runs are synchronous: set training.max_staleness to 0"
    if training.offload and not training.colocated:
        yield (
            "training.offload frees memory for engines in the trainer's processes: set "
            "training.colocated to true"
        )
    if training.weights_dtype == "bfloat16" and model.dtype != "bfloat16":
        yield (
            "training.weights_dtype: bfloat16 is less precise than the forward passes: set "
            "model.dtype to bfloat16, too"
        )
    if training.weights_dtype == "bfloat16" and model.lora.rank:
        yield (
            "training.weights_dtype: bfloat16 is for weights; adapters are float32, and the "
            "weights below them are kept in model.dtype: set it to float32, or model.lora.rank to 0"
        )
    if config.algorithm.kl.sync_steps and model.lora.rank:
        yield (
            "algorithm.kl.sync_steps moves a reference model's weights, and with model.lora it is "
            "the policy without its adapter: set it to 0, or model.lora.rank to 0"
        )
    workers, size = config.serving.min_workers, config.engine.tensor_parallel_size
    if training.colocated and config.serving.max_workers > workers:
        yield (
            f"serving.workers: {config.serving.workers} is a range, but with training.colocated "
            "engines run in the trainer's processes, whose number is fixed: set one number"
        )
    if training.colocated and workers * size != ranks:
        yield (
            f"training.colocated needs one rank per engine device: serving.workers {workers} * "
            f"engine.tensor_parallel_size {size} is not training.ranks {ranks}"
        )


def _weights_mistakes(config: Config) -> Iterator[str]:
    transport, training = config.weights.transport, config.training
    if transport in ("ipc", "collective") and (mistake := stream_mistake(config)):
        yield mistake
    if config.weights.delta and transport not in ("shm", "collective", "disk"):
        yield f"weights.delta: {transport} sends all tensors: use shm, collective or disk"
    if config.weights.delta and training.colocated and training.ranks == 1:
        yield "weights.delta: a colocated engine reads the trainer's own tensors: set it to false"
    if config.weights.delta and config.model.lora.rank and config.weights.lora == "adapter":
        yield "weights.delta: all values of an adapter change in each update: set it to false"


def _policies_mistakes(config: Config) -> Iterator[str]:
    names, advantage = config.rollout.policies, config.algorithm.advantage
    if not names:
        return
    for name in names:
        if not re.fullmatch(r"[A-Za-z]\w*", name) or name in _OTHER_POLICIES:
            yield (
                f"rollout.policies: {name!r} cannot be a policy's name: take letters, digits and "
                f"_, and none of {', '.join(_OTHER_POLICIES)}"
            )
    if len(set(names)) < len(names):
        yield "rollout.policies: the same name is there twice"
    trains = config.model.lora.rank and config.weights.lora == "adapter"
    if not trains and any(name not in config.serving.adapters for name in names):
        yield (
            "rollout.policies: each policy is an adapter: set model.lora.rank, and weights.lora to "
            "adapter, or without training its folder in serving.adapters"
        )
    if others := config.loops & {*LOOP_NAMES} - {"self_play"}:
        yield (
            f"rollout.policies: the loop {min(others)} has no players: use self_play, or a loop of "
            "your own that calls sample(policy=...)"
        )
    if isinstance(advantage, Gae) or isinstance(config.algorithm.loss, Dpo):
        yield (
            "rollout.policies: several policies cannot be trained with a value model or a loss of "
            "pairs: choose another algorithm.advantage and algorithm.loss"
        )


def _teacher_mistakes(config: Config) -> Iterator[str]:
    parts, sampling, teachers = config.algorithm, config.sampling, config.teachers()
    inside = {teacher.model for teacher in teachers.values() if teacher.in_ranks}
    kl = parts.kl
    if len(inside) > 1 or (inside and (kl.coef or kl.model.path or kl.sync_steps)):
        yield (
            "algorithm.teacher: the trainer's ranks hold one model beside the policy, a teacher or "
            "the reference model of algorithm.kl: set engines, or a url, of the other teachers"
        )
    if teachers and isinstance(parts.loss, Dpo):
        yield "algorithm.teacher: loss dpo compares trajectories, and has no use for tokens' scores"
    if teachers and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        yield (
            "algorithm.teacher: sampling.top_p, top_k and min_p change the policy's log-probs, and "
            "not a teacher's: remove these keys"
        )
    if sampling.temperature != 1 and any(not teacher.in_ranks for teacher in teachers.values()):
        yield (
            "algorithm.teacher: engines and servers give log-probs at temperature 1: set "
            "sampling.temperature to 1, or remove engines and url"
        )
    if isinstance(parts.advantage, NoAdvantage) and not (parts.has_penalties or teachers):
        yield "algorithm.advantage none leaves nothing to train on: set algorithm.teacher"


def stream_mistake(config: Config) -> str:
    """Return why the run cannot use a `weights.transport` that streams; "" if it can."""
    if not config.training.colocated or config.training.ranks == 1:
        return ""
    return (
        f"weights.transport: {config.weights.transport} sends while engines load, which a "
        "process that hosts an engine cannot: with training.colocated and several "
        "training.ranks, set it to shm or disk"
    )
