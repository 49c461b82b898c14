"""The typed configuration: YAML plus `key.sub=value` overrides, checked before anything starts.

Every key has a default or is required, one meaning (its docstring, which `turnwise config`
prints) and a reader in the code (a test looks for it). Knows no other part of turnwise and
imports no torch, vLLM or Ray.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from turnwise.errors import InputError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
NO_DEADLINE = 20 * 24 * 3600.0
"""Seconds of a deadline that is set to null: 20 days, which every clock and library takes."""
Seconds = Annotated[
    float,
    Field(gt=0, le=NO_DEADLINE),
    BeforeValidator(lambda value: NO_DEADLINE if value is None else value),
    PlainSerializer(lambda value: None if value == NO_DEADLINE else value),
]
"""A deadline; null is none."""

_NO_PENALTY = (
    "a penalty samples from another distribution than the one that the trainer computes; shape "
    "answers by the reward, or by sampling.temperature"
)
_NO_SWAP = (
    "vLLM recomputes preempted requests instead of swapping them; give engine.kv_cache_gib "
    "enough room"
)
_BATCHES = (
    "vLLM forms its batches token by token; bound them by engine.max_num_seqs and "
    "engine.max_num_batched_tokens"
)
_GRAPHS = (
    "vLLM captures CUDA graphs by the batch's size; set engine.extra.max_cudagraph_capture_size, "
    "or engine.extra.enforce_eager to have none"
)

# Keys of other systems that no vLLM of today reads, or that we do not, and what took their place.
REPLACED_KEYS = {
    "use_beam_search": "vLLM no longer samples by beam search; use sampling.n with "
    "sampling.temperature for several answers to one prompt",
    "early_stopping": "it belongs to beam search, which vLLM no longer has; use sampling.n",
    "length_penalty": "it belongs to beam search, which vLLM no longer has; use sampling.n",
    "best_of": "vLLM no longer has it; sample sampling.n answers and let the reward choose",
    "presence_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "repetition_penalty": _NO_PENALTY,
    "min_p": "the trainer computes no min_p; use sampling.top_p or sampling.top_k",
    "max_paddings": "vLLM packs batches without padding; bound a batch by "
    "engine.max_num_seqs and engine.max_num_batched_tokens",
    "batch_generation": _BATCHES,
    "vllm_micro_batch_size": _BATCHES,
    "num_scheduler_steps": "vLLM schedules while it computes, in every step; bound a batch by "
    "engine.max_num_seqs",
    "max_seq_len_to_capture": _GRAPHS,
    "max_context_len_to_capture": _GRAPHS,
    "swap_space": _NO_SWAP,
    "blocks_to_swap_in": _NO_SWAP,
    "blocks_to_swap_out": _NO_SWAP,
    "blocks_to_copy": "vLLM shares the blocks of a common prefix instead of copying them; see "
    "engine.prefix_caching",
    "sliding_window": "the model's own config.json holds it, for the engine and the trainer; "
    "change it in the folder of model.path, or bound the context by model.max_length; it is no "
    "key of engine",
}

_NEUTRAL: dict[str, float] = {
    "best_of": 1,
    "length_penalty": 1,
    "num_scheduler_steps": 1,
    "repetition_penalty": 1,
    "vllm_micro_batch_size": -1,
}
"""Values of such keys that ask for nothing, beside false, 0 and empty ones."""


def asks_for_nothing(key: str, value: Any) -> bool:
    """Whether a value of one of `REPLACED_KEYS` means what happens without the key."""
    if isinstance(value, dict):
        return all(asks_for_nothing(key, below) for below in value.values())
    return value in (None, False, 0, "", [], "None") or value == _NEUTRAL.get(key)


# What other trainers call a key of ours, by the last part of its name.
ALIASES = {
    "actor_lr": "training.learning_rate",
    "adv_estimator": "algorithm.advantage.name",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl.coef",
    "clip_eps": "algorithm.loss.clip_high",
    "clip_grad": "training.max_grad_norm",
    "clip_ratio": "algorithm.loss.clip_high",
    "cliprange": "algorithm.loss.clip_high",
    "cliprange_value": "algorithm.advantage.clip",
    "context_length": "model.max_length",
    "data_path": "data.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "env": "environment",
    "epochs": "training.steps",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "eval_data_num_limit": "data.eval_limit",
    "eval_data_path": "data.eval_path",
    "eval_dataset": "data.eval_path",
    "eval_episode_interval": "eval.every",
    "eval_freq": "eval.every",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "eval_temperature": "eval.sampling.temperature",
    "eval_top_k": "eval.sampling.top_k",
    "eval_top_p": "eval.sampling.top_p",
    "exp_name": "name",
    "generation_batch_size": "engine.max_num_seqs",
    "grad_clip": "training.max_grad_norm",
    "gradient_checkpointing": "training.activation_checkpointing",
    "group_size": "sampling.n",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "load": "model.path",
    "logger": "sinks",
    "logging": "sinks",
    "logits_processor_pattern": "engine.logits_processors_allowed",
    "loss_type": "algorithm.loss.name",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.lr_schedule",
    "lr_scheduler_type": "training.lr_schedule",
    "max_cache_size": "serving.known_sessions",
    "max_completion_length": "sampling.max_tokens",
    "max_model_len": "model.max_length",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_seq_len": "model.max_length",
    "max_seq_length": "model.max_length",
    "max_steps": "training.steps",
    "micro_batch_size": "training.micro_batch_tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "new_token_limit": "sampling.max_tokens",
    "num_engines": "serving.workers",
    "num_episode": "training.steps",
    "num_epochs": "training.steps",
    "num_generations": "sampling.n",
    "num_gpus": "training.ranks",
    "num_inference_per_prompt": "sampling.n",
    "num_ppo_episode": "training.steps",
    "num_rollouts": "sampling.n",
    "num_samples": "sampling.n",
    "num_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "num_workers": "serving.workers",
    "output": "output_dir",
    "per_device_train_batch_size": "training.micro_batch_tokens",
    "pipeline_model_parallel_size": "engine.pipeline_parallel_size",
    "ppo_epochs": "training.updates_per_step",
    "prompt_length": "data.max_prompt_tokens",
    "report_to": "sinks",
    "response_length": "sampling.max_tokens",
    "reward": "rollout.rewards",
    "reward_fn": "rollout.rewards",
    "reward_funcs": "rollout.rewards",
    "rollout_n": "sampling.n",
    "run_name": "name",
    "sample_per_episode": "rollout.prompts_per_step",
    "save_episode_interval": "training.checkpoint_every",
    "save_freq": "training.checkpoint_every",
    "save_interval": "training.checkpoint_every",
    "save_steps": "training.checkpoint_every",
    "save_total_limit": "training.keep_last",
    "seq_length": "model.max_length",
    "stop_token_list": "sampling.stop",
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "test_freq": "eval.every",
    "tokenizer_model": "model.tokenizer",
    "tokenizer_path": "model.tokenizer",
    "total_steps": "training.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "train_dataset": "data.path",
    "train_file": "data.path",
    "train_files": "data.path",
    "train_micro_batch_size": "training.micro_batch_tokens",
    "training_data_num_limit": "data.limit",
    "val_file": "data.eval_path",
    "val_files": "data.eval_path",
    "warmup": "training.warmup_steps",
}

LOOP_NAMES = ("tool_calling", "single_turn", "interleaved", "agent", "chat_scheduler")
"""The agent loops that come with turnwise; `rollout.loops` has them."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, docstrings are the help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, tree: Any) -> Any:
        """A required key or a section with nothing behind its colon is not set, nor is a key of
        another system whose value asks for nothing."""
        if not isinstance(tree, dict):
            return tree

        def is_set(key: Any, value: Any) -> bool:
            field = cls.model_fields.get(key)
            if field is None:
                return key not in REPLACED_KEYS or not asks_for_nothing(key, value)
            return value is not None or not (field.is_required() or _sections(field.annotation))

        return {key: value for key, value in tree.items() if is_set(key, value)}


class ModelConfig(Section):
    path: str
    """Folder or Hugging Face name of the model to start from, tokenizer included."""
    tokenizer: str | None = None
    """Folder or Hugging Face name of its tokenizer and chat template; unset: model.path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights, in the engine and in the trainer."""
    max_length: PositiveInt = 4096
    """Context in tokens: the longest prompt plus everything sampled after it."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""
    template_args: dict[str, Any] = {}
    """Extra variables for the chat template, such as {enable_thinking: false}."""
    escape_special_tokens: bool = False
    """Special tokens (<|im_end|>) in what users and tools say are plain text to the model, so that
    no tool result can end its turn and open another."""


class OtherModel(Section):
    """A model beside the policy, with the policy's tokenizer."""

    path: str | None = None
    """Folder or Hugging Face name; unset: model.path."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of its forward passes, float32 or bfloat16; unset: model.dtype."""


class DataConfig(Section):
    path: str
    """Training rows: a .jsonl, .csv, .tsv (every value of these two is text) or .parquet file, a
    folder that `save_to_disk` wrote, or the name of a Hugging Face dataset."""
    eval_path: str | None = None
    """Held-out rows for evaluation; without it `turnwise eval` takes data.path."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset, such as `main` for GSM8K."""
    split: str = "train"
    """Split of data.path when it is a Hugging Face dataset."""
    eval_split: str = "test"
    """Split of data.eval_path when it is a Hugging Face dataset."""
    limit: PositiveInt | None = None
    """Use only the first rows of data.path."""
    max_prompt_tokens: PositiveInt | None = None
    """Leave out rows whose prompt is longer, and say how many; unset: a prompt that does not fit
    model.max_length is an error."""
    eval_limit: PositiveInt | None = None
    """Use only the first rows of data.eval_path."""


class ProcessorCall(Section):
    """A logits processor that is made for each request, by calling `qualname`."""

    qualname: str
    """package.module:name of the class or function that makes it."""
    args: list[Any] | None = None
    """Positional arguments of the call."""
    kwargs: dict[str, Any] | None = None
    """Keyword arguments of the call."""


class SamplingConfig(Section):
    n: PositiveInt = 8
    """Trajectories per problem: the size of a group."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature, at most 2; 0 is greedy."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with this probability; 1 or 0 is all."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0 or -1 is all."""
    max_tokens: PositiveInt = 512
    """Tokens that one turn may sample, within what the context still holds."""
    min_tokens: NonNegativeInt = 0
    """Tokens that one turn samples before it may stop."""
    stop: list[str] = []
    """Strings that end a turn; they stay in its tokens."""
    stop_token_ids: list[int] = []
    """Token ids that end a turn, beside the model's own."""
    ignore_eos: bool = False
    """Go on sampling after the model's end-of-turn token."""
    prompt_logprobs: bool = False
    """Record the log-probs of each turn's prompt too (slower: it bypasses the prefix cache)."""
    logits_processor_args: dict[str, Any] = {}
    """Values that engine.logits_processors see for each request."""
    logits_processors: list[str | ProcessorCall] = []
    """Logits processors of these requests alone, each as package.module:function or as
    {qualname, args, kwargs}; engine.logits_processors_allowed must match their names."""

    @field_validator("top_p", mode="before")
    @classmethod
    def _all_of_them(cls, top_p: Any) -> Any:
        """Megatron's 0, which switches it off."""
        return 1.0 if top_p == 0 else top_p

    @field_validator("top_k", mode="before")
    @classmethod
    def _all_tokens(cls, top_k: Any) -> Any:
        """vLLM's older -1."""
        return 0 if top_k == -1 else top_k

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _whether(cls, prompt_logprobs: Any) -> Any:
        """vLLM's null, which is none of them."""
        return False if prompt_logprobs is None else prompt_logprobs

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self


class RewardConfig(Section):
    """One part of the reward: the environment's own, a function, or a reward model."""

    function: str | None = None
    """package.module:function(trajectory, row) -> number, sync or async."""
    model: str | None = None
    """Folder or Hugging Face name of a sequence-classification model with one output."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's weights: float32, bfloat16, or (auto) as they were saved."""
    gpus: NonNegativeFloat = 0.0
    """GPUs of the model's process, or a share of one; 0 computes on CPU cores."""
    name: str | None = None
    """Name in metrics; unset: the function's or the model's."""
    weight: float = 1.0
    """What it is multiplied by in the sum."""

    @model_validator(mode="after")
    def _consistent(self) -> "RewardConfig":
        if self.function and self.model:
            raise ValueError("a reward is a function or a model, not both: make it two entries")
        return self


class RolloutConfig(Section):
    loop: str = "tool_calling"
    """Agent loop: tool_calling, single_turn, interleaved, agent, chat_scheduler, or
    package.module:Class."""
    agent: str | None = None
    """loop: agent runs this, an agent that knows only an OpenAI base URL and a problem:
    package.module:function, or a command."""
    chat_scheduler: str | None = None
    """package.module:Class, a ChatCompletionScheduler whose generate_sequences holds each
    trajectory's conversation; setting it sets loop to chat_scheduler."""
    agent_rewards: bool = False
    """The agent may read and reward its own session (GET and POST .../reward), and its reward takes
    the place of the environment's; otherwise it cannot touch its reward."""
    agent_env: list[str] = []
    """Environment variables that an agent's command gets, beside PATH, HOME, PYTHON* and such."""
    prompts_per_step: PositiveInt = 16
    """Problems (groups) in one training step."""
    concurrency: PositiveInt = 256
    """Trajectories in flight at once."""
    oversample: NonNegativeFloat = 0.0
    """Start this share of groups more than a step takes; the step trains on those done first."""
    retries: NonNegativeInt = 0
    """Times that a failed trajectory is tried again, so that its group is complete."""
    rewards: list[RewardConfig] = []
    """Parts of the reward, added up; an entry without function or model is the environment's
    own, and so is the whole where there is no entry."""
    history: Literal["exact", "template"] = "exact"
    """What the model sees of its earlier turns: its own tokens, or (template) what the chat
    template makes of them, in a new branch wherever that is another text."""
    max_turns: PositiveInt = 8
    """Calls of the engine that one trajectory may make."""
    max_response_tokens: PositiveInt | None = None
    """Tokens of one trajectory after its first prompt, those of tools included: what is left of
    them bounds each turn, beside sampling.max_tokens. Agents over HTTP are not bound by it."""
    stall_timeout: Seconds = 300.0
    """Seconds for which nothing of a trajectory may move between its turns and tools, which have
    engine.request_timeout and tool_timeout. Its environment and its reward have so long as well."""
    trajectory_timeout: Seconds = 21_600.0
    """Seconds for one trajectory in all, however it moves."""
    max_failed_fraction: Fraction = 0.5
    """A step (or an evaluation) in which more of the trajectories fail ends the run."""
    tool_parser: str = "hermes"
    """vLLM's name of the model's tool-call format."""
    tool_timeout: Seconds = 30.0
    """Seconds for one tool call."""
    tool_max_chars: PositiveInt = 8192
    """Characters of one tool result that the model gets to see."""
    result_format: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """interleaved: how a result is put into the assistant's turn."""
    call_start: str | None = None
    """interleaved: the text that opens a call, such as <code>, in place of rollout.tool_parser's;
    the chat template then offers no tools, so the environment's prompt has to describe them."""
    call_end: str | None = None
    """interleaved: the text that closes a call, such as </code>."""
    call_tool: str | None = None
    """interleaved: the tool that gets the text between call_start and call_end as its one argument;
    unset: the text is a JSON object with name and arguments."""

    @model_validator(mode="after")
    def _consistent(self) -> "RolloutConfig":
        if bool(self.call_start) != bool(self.call_end):
            raise ValueError("call_start and call_end belong together: set both, or neither")
        if self.call_tool and not self.call_start:
            raise ValueError("call_tool gets what stands between the tags: set call_start")
        if self.call_start and self.loop in set(LOOP_NAMES) - {"interleaved"}:
            raise ValueError(f"call_start belongs to loop: interleaved, not to {self.loop}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _loop_of_chat_scheduler(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("chat_scheduler") and tree.get("loop") is None:
            return {**tree, "loop": "chat_scheduler"}
        return tree

    @model_validator(mode="after")
    def _with_chat_scheduler(self) -> "RolloutConfig":
        if self.chat_scheduler and self.loop != "chat_scheduler":
            raise ValueError(
                f"loop {self.loop} does not read chat_scheduler: set loop to chat_scheduler"
            )
        if self.loop == "chat_scheduler" and not self.chat_scheduler:
            raise ValueError(
                "loop chat_scheduler needs chat_scheduler: package.module:Class, a "
                "ChatCompletionScheduler"
            )
        if self.chat_scheduler and ":" not in self.chat_scheduler:
            raise ValueError(f"chat_scheduler is package.module:Class, not {self.chat_scheduler!r}")
        return self

    @field_validator("loop")
    @classmethod
    def _known_loop(cls, loop: str) -> str:
        if loop not in LOOP_NAMES and ":" not in loop:
            raise ValueError(
                f"an agent loop is {', '.join(LOOP_NAMES)}, or package.module:Class, not {loop!r}"
            )
        return loop


class EvalConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate on data.eval_path before the first step, each so many steps, and at the end;
    0 is never."""
    target: Fraction | None = None
    """Accuracy on data.eval_path that ends the run, with a checkpoint, as soon as an evaluation
    reaches it; unset: the run ends at training.steps."""
    success_reward: float = 1.0
    """Reward from which a trajectory counts as right in accuracy, pass@k and mean@k."""
    sampling: SamplingConfig = SamplingConfig(n=1, temperature=0.0)
    """Sampling in evaluation; greedy unless set."""

    def reached(self, accuracy: float | None) -> bool:
        """Whether an evaluation, where there was one, ends the run."""
        return self.target is not None and accuracy is not None and accuracy >= self.target


class EngineConfig(Section):
    tensor_parallel_size: PositiveInt = 1
    """Devices that share each layer of one engine's model. On a CPU each is one process."""
    pipeline_parallel_size: PositiveInt = 1
    """Groups of such devices, each with some of the layers; on GPUs only, where it never ran."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for the KV cache in GiB; unset: 0.5 on a CPU, vLLM's own choice on a GPU."""
    max_num_seqs: PositiveInt = 256
    """Requests that the engine computes together."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens that the engine computes together; longer prompts are computed in several parts."""
    prefix_caching: bool = True
    """Reuse the KV cache of shared prefixes."""
    threads: PositiveInt = 1
    """CPU threads of the engine; more than one per core slows everything down."""
    logits_processors: list[str] = []
    """Logits processors of every request, each as package.module:name: a callable (token_ids,
    logits) -> logits, or one of vLLM's classes, which run first. Log-probs are those of the
    processed distribution; the trainer's own know no processor."""
    logits_processors_allowed: str | None = None
    """Pattern of the names, as package.module:function, that requests (and sampling) may choose as
    `logits_processors`; it must match the whole name. Whatever such a module defines is called with
    the client's arguments, so match modules that hold processors alone. Unset: none."""
    metrics: bool | None = None
    """Keep vLLM's own statistics, which /metrics shows as vllm:* with a label for the worker; each
    token costs some processor time. Unset: `turnwise serve` and serving.worker_servers do."""
    start_timeout: Seconds = 300.0
    """Seconds for the engine to start."""
    request_timeout: Seconds = 120.0
    """Seconds in which an engine with requests must sample a token of any of them, or answer a
    call. One request may wait in its queue, and take, any time."""
    extra: dict[str, Any] = {}
    """More arguments of vLLM's AsyncEngineArgs, such as {gpu_memory_utilization: 0.4}."""

    @field_validator("logits_processors_allowed")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern

    @property
    def devices(self) -> int:
        """Devices, and processes that compute, of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @field_validator("extra")
    @classmethod
    def _in_use(cls, extra: dict[str, Any]) -> dict[str, Any]:
        """Without keys of older vLLMs whose value asks for nothing."""
        return {
            key: value
            for key, value in extra.items()
            if key not in REPLACED_KEYS or not asks_for_nothing(key, value)
        }


class ServingConfig(Section):
    workers: PositiveInt = 1
    """Engines that sample side by side, each in a process of its own."""
    overload: Annotated[float, Field(ge=1)] = 1.5
    """A session leaves its worker at once when that has this many times the mean load, and a few
    requests more; a lasting overload of 5 % moves it too."""
    known_sessions: PositiveInt = 65_536
    """Sessions, and groups, whose worker is remembered; beyond it the one that was used longest ago
    is forgotten, and its next turn goes to the least loaded worker."""
    max_continuations: NonNegativeInt = 3
    """Times that one turn continues at another worker because its own failed; a request that
    ends two workers by itself is refused for ten minutes."""
    max_restarts: NonNegativeInt = 3
    """Times in a row that a dead worker is started again at once; then it is tried each minute,
    and less and less often, up to each ten minutes."""
    health_every: PositiveFloat = 2.0
    """Seconds between health checks of a worker."""
    health_timeout: Seconds = 20.0
    """Seconds for a worker to answer one; a worker that does not is replaced."""
    host: str = "127.0.0.1"
    """Address that the OpenAI server listens on; base URLs carry the node's own where it is
    0.0.0.0."""
    port: NonNegativeInt = 8000
    """Port of `turnwise serve`; 0 takes a free one, as the servers of agents and workers do."""
    resources: dict[str, float] = {}
    """Ray resources that each worker asks for, beside its GPU."""
    spread: bool = False
    """Each device of an engine is an actor of its own, so that one engine may span nodes."""
    worker_servers: bool = False
    """Each worker serves its own engine too, on a free port of `host`."""
    api_key: str | None = None
    """Key that its clients must send as a bearer token; TURNWISE_API_KEY where it is unset. It is
    not written to the run folder."""
    served_model_name: str | None = None
    """Name that /v1/models lists; unset: the last part of model.path, and model.path. Requests may
    name any model."""
    max_body_mb: PositiveInt = 16
    """Largest body of a request in MB; larger ones are refused before they are read."""
    session_idle: Seconds = 14_400.0
    """Seconds without a request after which a client's session is forgotten."""
    session_memory_mb: PositiveInt = 512
    """Memory of all clients' sessions in MB; beyond it the one idle for longest is forgotten."""
    reasoning_parser: str | None = None
    """vLLM's name of the model's reasoning format, where it has one."""


class WeightsConfig(Section):
    update_timeout: Seconds = 120.0
    """Seconds for one update to land and be checked, with what in_flight drain waits for."""
    transport: Literal["shm", "ipc", "collective", "disk"] = "shm"
    """How they travel: shared memory of one host; GPU memory of one GPU (ipc); broadcasts, gloo or
    NCCL, between hosts (collective); files in a folder that all hosts see (disk)."""
    folder: str | None = None
    """disk: the folder; unset: `weights` in the run folder."""
    in_flight: Literal["drain", "abort", "keep", "keep_cache"] = "keep"
    """What an update does to turns under way: finish them first; end them and continue them
    under the new weights; freeze them meanwhile and compute their cache anew (keep), or go on with
    the cache that the old weights computed (keep_cache)."""
    canary_tolerance: PositiveFloat | None = None
    """Largest log-prob difference on the canary prompt, engine against trainer; unset: 0.001
    in float32, 0.2 in bfloat16."""


class Grpo(Section):
    """(r - mean) / std within the group."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(Section):
    """r - mean within the group."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Rloo(Section):
    """r - the mean of the group's others."""

    name: Literal["rloo"] = "rloo"


class ReinforcePP(Section):
    """r, less its group's mean if `baseline` is group, normalised over the batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "group"
    """What is taken off a reward first."""


class Gae(Section):
    """PPO's: generalised advantage estimation with a value model, normalised over the batch."""

    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount of a token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda: 0 trusts the value model, 1 the rewards."""
    learning_rate: PositiveFloat = 1e-5
    """The value model's."""
    clip: PositiveFloat = 0.2
    """Values move at most this far from those before the step."""
    warmup_steps: NonNegativeInt = 0
    """Training steps that train the value model alone."""
    model: OtherModel = OtherModel()
    """Where the value model starts: a causal language model, with a head that says 0; or a
    reward model (sequence classification, one output), with that model's head."""


class PpoClip(Section):
    """Clipped ratio per token."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio where the advantage is negative; unset is none."""


class Gspo(Section):
    """Clipped ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped above 1 + clip_high."""


class Cispo(Section):
    """Clipped importance weights; every token keeps its gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0
    """The weight is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The weight is clipped above 1 + clip_high."""


class Dpo(Section):
    """Online DPO: each group's best and worst trajectory are a pair; advantages are not used."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference model."""


class KlConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty towards the reference model."""
    model: OtherModel = OtherModel()
    """The reference model, of the penalty and of dpo. It is loaded where one of the two needs it,
    or where its path is set."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the KL divergence."""
    where: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off each token's reward."""
    importance_weight: bool = False
    """In the loss, multiply a token's divergence by its importance ratio, which makes k3 and its
    gradient exact on average where tokens are off-policy."""

    @model_validator(mode="after")
    def _consistent(self) -> "KlConfig":
        if self.importance_weight and self.where != "loss":
            raise ValueError("importance_weight is for a penalty in the loss: set where to loss")
        if self.coef and self.estimator == "k1" and self.where == "loss":
            raise ValueError("k1 in the loss has no gradient on average: use k2 or k3, or reward")
        return self


class CorrectionConfig(Section):
    name: Literal["none", "token_tis", "sequence_tis", "mask"] = "none"
    """none takes the ratio against the engine's log-probs. The others take it against the
    trainer's own before the step, and weigh each token by trainer / engine: truncated at `high`
    (token_tis), the same for whole sequences (sequence_tis), or 1 within the band (mask)."""
    low: PositiveFloat = 0.5
    """Lower end of the band of `mask`."""
    high: PositiveFloat = 2.0
    """Where weights are truncated, and upper end of the band."""
    stale_only: bool = False
    """Correct only tokens of weight versions older than the one that begins the step."""

    @model_validator(mode="after")
    def _consistent(self) -> "CorrectionConfig":
        if not self.low <= 1 <= self.high:
            raise ValueError(f"1 must lie between low {self.low:g} and high {self.high:g}")
        return self


class AlgorithmConfig(Section):
    advantage: Annotated[Grpo | DrGrpo | Rloo | ReinforcePP | Gae, Field(discriminator="name")] = (
        Grpo()
    )
    """Estimator of each token's advantage from the rewards."""
    loss: Annotated[PpoClip | Gspo | Cispo | Dpo, Field(discriminator="name")] = PpoClip()
    """Loss that the trainer minimises."""
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """The batch's loss: the mean over tokens (DAPO), over trajectories of each one's mean (GRPO;
    dpo always), or the sum over trajectories * sampling.max_tokens * rollout.max_turns (Dr. GRPO).
    """
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: bool = False
    """Sample other problems for groups whose rewards, overlong_penalty included, are all equal
    (DAPO). Without it such groups count in the batch's mean, with advantage 0."""
    overlong_tokens: NonNegativeInt = 0
    """The last so many tokens before model.max_length cost reward, rising to overlong_penalty
    (DAPO); 0 is none."""
    overlong_penalty: PositiveFloat = 1.0
    """What a trajectory that fills the context loses."""

    def other_models(self) -> dict[str, str]:
        """The models that are set beside the policy, by their keys."""
        models = {"algorithm.kl.model": self.kl.model.path}
        if isinstance(self.advantage, Gae):
            models["algorithm.advantage.model"] = self.advantage.model.path
        return {key: path for key, path in models.items() if path is not None}

    @model_validator(mode="after")
    def _consistent(self) -> "AlgorithmConfig":
        if isinstance(self.loss, Dpo):
            if isinstance(self.advantage, Gae):
                raise ValueError("loss dpo compares trajectories and has no use for advantage gae")
            if self.correction.name != "none":
                raise ValueError("loss dpo has no importance ratio for a correction to mend")
        return self

    @model_validator(mode="before")
    @classmethod
    def _names(cls, tree: Any) -> Any:
        """A part without a name is the default's."""
        for key, name in (("advantage", "grpo"), ("loss", "ppo_clip")):
            if isinstance(tree, dict) and isinstance(tree.get(key), dict):
                tree = {**tree, key: {"name": name, **tree[key]}}
        return tree


class TrainingConfig(Section):
    steps: PositiveInt = 100
    """Training steps; one step consumes rollout.prompts_per_step groups."""
    max_staleness: NonNegativeInt = 0
    """Steps that rollouts may run ahead of the trainer; 0 is synchronous."""
    stale: Literal["mask", "drop"] = "mask"
    """What becomes of tokens older than that: they are context only, or their group is dropped."""
    ranks: PositiveInt = 1
    """Processes that train together, the model sharded over them."""
    colocated: bool = False
    """Engines live in the trainer's processes and take turns with it: serving.workers times
    engine.tensor_parallel_size must be training.ranks."""
    offload: list[Literal["params", "optimizer"]] = []
    """colocated: parts of the trainer whose memory the engines have while they run. Parameters, of
    reference and value model too, and AdamW's moments wait in host memory; on a CPU, on disk."""
    resources: dict[str, float] = {}
    """Ray resources that each rank asks for, beside its GPU."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """Micro-batches are one row of sequences end to end, or rows of like length, padded; auto:
    packed on GPUs, padded on CPUs."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per training step, each on an equal share of its samples."""
    learning_rate: PositiveFloat = 1e-6
    """AdamW's learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """After warm-up: constant, or falling linearly towards 0 at the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens, padding included, of one forward and backward pass."""
    threads: NonNegativeInt = 0
    """CPU threads of the trainer; 0 is one per core."""
    step_timeout: Seconds = 1800.0
    """Seconds for the trainer to answer one call."""
    checkpoint_every: NonNegativeInt = 0
    """Save a checkpoint each so many steps; 0 saves only the last."""
    keep_last: PositiveInt = 2
    """Checkpoints that are kept, beside the best on held-out problems."""
    restarts: NonNegativeInt = 0
    """Times that a run whose trainer died goes on from its last checkpoint by itself."""
    max_skipped: PositiveInt = 3
    """Updates in a row without a finite loss and gradient that end the run; each is skipped."""


class Config(Section):
    """Everything that a run depends on."""

    name: str = "run"
    """The run's folder under output_dir."""
    output_dir: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Seed of the data order and of sampling; only deterministic runs repeat exactly."""
    deterministic: bool = False
    """Bit-for-bit repeatable: the engine computes one request at a time, so it is slow."""
    exactness: Literal["stop", "warn"] = "stop"
    """When a token is about to be trained that is not as it was sampled: end the run, or say so."""
    environment: str
    """The environment that makes problems, tools and rewards of rows: package.module:Class."""
    sinks: list[Literal["wandb", "mlflow", "trackio"]] = []
    """Where metrics go beside metrics.jsonl and TensorBoard, where these packages are there."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Our lines on the terminal, from this level on; the files in the run folder's `logs` hold
    those of all processes, vLLM's and Ray's too, from info on, or from debug on."""
    watchdog: Seconds = 60.0
    """Seconds without any progress after which the run says whom it waits for."""
    ray_address: str | None = None
    """Address of a running Ray cluster, or `auto`; unset starts Ray on this machine."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    weights: WeightsConfig = WeightsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        together = self.engine.max_num_batched_tokens
        if together < self.model.max_length and (
            self.engine.extra.get("enable_chunked_prefill") is False
        ):
            raise ValueError(
                f"engine.max_num_batched_tokens {together} is below model.max_length "
                f"{self.model.max_length}, and engine.extra.enable_chunked_prefill is false: raise "
                "the one, lower the other, or leave the third out"
            )
        if together < self.engine.max_num_seqs and not self.deterministic:
            raise ValueError(
                f"engine.max_num_batched_tokens {together} is below engine.max_num_seqs "
                f"{self.engine.max_num_seqs}, which compute a token each in one step: raise the "
                "one or lower the other"
            )
        for key in REPLACED_KEYS.keys() & self.engine.extra.keys():
            raise ValueError(f"engine.extra.{key} is gone: {REPLACED_KEYS[key]}")
        allowed = self.engine.logits_processors_allowed
        for key, sampling in (("sampling", self.sampling), ("eval.sampling", self.eval.sampling)):
            for one in sampling.logits_processors:
                name = one if isinstance(one, str) else one.qualname
                if allowed is None or not re.fullmatch(allowed, name):
                    raise ValueError(
                        f"{key}.logits_processors: engine.logits_processors_allowed does not match "
                        f"{name!r}; set it to a pattern of such names"
                    )
        if self.algorithm.dynamic_sampling and self.sampling.n < 2:
            raise ValueError(
                "algorithm.dynamic_sampling compares the rewards of a group, and sampling.n 1 has "
                "nothing to compare: raise sampling.n or set algorithm.dynamic_sampling to false"
            )
        if self.eval.target is not None and not (self.eval.every and self.data.eval_path):
            raise ValueError(
                "eval.target needs evaluations: set data.eval_path, and eval.every above 0"
            )
        if self.training.max_staleness and self.deterministic:
            raise ValueError("deterministic runs are synchronous: set training.max_staleness to 0")
        for key in EngineConfig.model_fields.keys() & self.engine.extra.keys():
            raise ValueError(f"engine.extra.{key} has a key of its own: engine.{key}")
        if self.engine.pipeline_parallel_size > 1 and (
            self.training.colocated or self.serving.spread
        ):
            raise ValueError(
                "engine.pipeline_parallel_size wants engines in processes of their own: set it to "
                "1, or training.colocated and serving.spread to false"
            )
        size, ranks = self.engine.tensor_parallel_size, self.training.ranks
        if self.training.offload and not self.training.colocated:
            raise ValueError(
                "training.offload lends memory to engines in the trainer's own processes: set "
                "training.colocated to true"
            )
        if self.training.colocated and self.serving.workers * size != ranks:
            raise ValueError(
                f"training.colocated needs a rank for each device of an engine: serving.workers "
                f"{self.serving.workers} * engine.tensor_parallel_size {size} is not "
                f"training.ranks {ranks}"
            )
        return self


_CHOICES = {
    f"algorithm.{name}": AlgorithmConfig.model_fields[name] for name in ("advantage", "loss")
}
"""Keys whose value is one of several kinds."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), defaults: dict[str, Any] | None = None
) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides (values are YAML), and check it all.

    `defaults` fill in for required keys that a command does not need.

    Raises:
        InputError: naming the file, the override, or every key that is unknown, missing or
            of the wrong kind, with the nearest known key.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the configuration file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"the configuration file {path} must hold keys and values")
    return make_config(tree, overrides, defaults)


def make_config(
    tree: dict[str, Any], overrides: Sequence[str] = (), defaults: dict[str, Any] | None = None
) -> Config:
    """What `load_config` makes of a file's tree of plain values, which stays as it is."""
    changed = deepcopy(tree)
    for override in overrides:
        apply_override(changed, override)
    return parse_config(_filled(changed, defaults or {}))


def parse_config(tree: dict[str, Any]) -> Config:
    """Check a tree of plain values; raises `InputError` with one sentence for each mistake."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(dict(e)) for e in error.errors(include_url=False)]
        raise InputError("configuration: " + "; ".join(problems)) from None


def dump_config(config: Config, *, secrets: bool = False) -> str:
    """The resolved configuration as YAML that `load_config` reads back; without keys, unless
    `secrets` asks for them."""
    exclude: Any = None if secrets else {"serving": {"api_key"}}
    return yaml.safe_dump(config.model_dump(exclude=exclude), sort_keys=False)


def known_keys() -> dict[str, str]:
    """Every key as `section.key`, in order, with its meaning."""
    return dict(_keys(Config, ""))


def explain_config(config: Config | None = None) -> str:
    """A configuration as YAML, each key under its meaning; without one, the defaults, in which
    keys that must be set are marked and empty."""
    lines: list[str] = []
    _describe(Config, config, 0, lines)
    return "\n".join(lines) + "\n"


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        parts = _sections(field.annotation)
        if len(parts) > 1:
            yield f"{prefix}{name}.name", f"{_meaning(field)} {'; '.join(_kinds(parts))}"
        for part in parts:
            for key, meaning in _keys(part, f"{prefix}{name}."):
                if meaning:
                    yield key, meaning
        if not parts:
            yield prefix + name, _meaning(field)


def _sections(kind: Any) -> list[type[Section]]:
    """The section that a key is, or those that it may be."""
    members = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if all(isinstance(member, type) and issubclass(member, Section) for member in members):
        return list(members)
    return []


def _kinds(parts: Sequence[type[Section]]) -> list[str]:
    """The names of a key's possible kinds, each with its meaning."""
    return [f"{part.model_fields['name'].default}: {part.__doc__}" for part in parts]


def _meaning(field: FieldInfo) -> str:
    """A key's docstring in one line, with the values it may have where that does not name them."""
    text = " ".join((field.description or "").split())
    values = [str(value) for value in _literals(field.annotation)]
    if text and not all(re.search(rf"\b{value}\b", text) for value in values):
        text += f" Values: {', '.join(values)}."
    return text


def _required(section: str) -> list[str]:
    """The keys of a top-level section that must be set."""
    field = Config.model_fields.get(section)
    parts = _sections(field.annotation) if field is not None else []
    return [name for part in parts for name, f in part.model_fields.items() if f.is_required()]


def _literals(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _literals(part)


def _describe(kind: type[Section], section: Section | None, depth: int, lines: list[str]) -> None:
    indent = "  " * depth
    for name, field in kind.model_fields.items():
        default = None if field.is_required() else field.default
        value = default if section is None else getattr(section, name)
        value = None if value == NO_DEADLINE else value
        meaning, parts = _meaning(field), _sections(field.annotation)
        if parts:
            kinds = [f"  {text}" for text in _kinds(parts)] if len(parts) > 1 else []
            lines += ["", *(f"{indent}# {text}" for text in (meaning, *kinds) if text)]
            lines += [f"{indent}{name}:"]
            _describe(parts[0] if value is None else type(value), value, depth + 1, lines)
            continue
        required = "(required) " if section is None and field.is_required() else ""
        lines += [f"{indent}# {required}{meaning}"] if meaning else []
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
        text = "" if required else text.removesuffix("\n").removesuffix("...").strip()
        lines += [f"{indent}{name}: {text}".rstrip()]


def _filled(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The tree with defaults where a key is missing or empty."""
    filled = {**tree}
    for key, value in defaults.items():
        if filled.get(key) is None:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(filled[key], dict):
            filled[key] = _filled(filled[key], value)
    return filled


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key of a tree by `key.sub=value`.

    Raises:
        InputError: when it does not read so, or a part of the key is a value.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"an override reads key.sub=value, not {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"the value of {key} is not YAML: {text!r}") from None
    *parents, leaf = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise InputError(f"{key}: {parent} is a value and has no keys below it")
    tree[leaf] = value


def _explain(error: dict[str, Any]) -> str:
    # A part of one of several kinds is followed by its name.
    loc = [str(part) for part in error["loc"]]
    key = ".".join(p for i, p in enumerate(loc) if ".".join(loc[:i]) not in _CHOICES)
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.name is one of {known}, not {error['ctx']['tag']!r}"
    if error["type"] == "extra_forbidden":
        leaf = loc[-1]
        if leaf in REPLACED_KEYS:
            return f"{key} is gone: {REPLACED_KEYS[leaf]}"
        if key in known_keys():
            owner = key.rpartition(".")[0]
            kinds = [
                part.model_fields["name"].default
                for part in _sections(_CHOICES[owner].annotation)
                if leaf in part.model_fields
            ]
            return f"{key} belongs to {' and '.join(kinds)}, not to {loc[-2]} ({owner}.name)"
        return f"there is no key {key}{_nearest(key)}"
    if error["type"] == "missing":
        missing = [key, *(f"{key}.{name}" for name in _required(key))]
        known = known_keys()
        return "; ".join(f"{k} must be set ({known[k].rstrip('.')})" for k in missing if k in known)
    value = error["input"]
    if error["type"] == "model_type":
        return f"{key} is a section with keys of its own, not {value!r}"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    given = f", not {value!r}" if isinstance(value, str | int | float) else ""
    return f"{key}: {error['msg']}{given}"


def _nearest(key: str) -> str:
    """The known key, or failing that the section's keys, that somebody may have meant."""
    known = list(known_keys())
    section, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    sections = list(dict.fromkeys(k.partition(".")[0] for k in known))
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]

    def close(name: str, candidates: Sequence[str], least: float) -> list[str]:
        return difflib.get_close_matches(name, candidates, 1, least)

    beside = f"{section}." if section else ""
    alias = ALIASES.get(leaf.lower().replace("-", "_"), "")
    owner, _, own = alias.rpartition(".")
    if own in siblings and section.endswith(owner):
        alias = beside + own
    meant = (
        ([alias] if alias else [])
        or [beside + name for name in close(leaf, siblings, 0.75)]
        or elsewhere
        or ([] if section else close(key, sections, 0.75))
        or close(key, known, 0.75)
        or [beside + name for name in close(leaf, siblings, 0.4)]
    )
    return f"; did you mean {meant[0]}?" if meant else "; `turnwise config` prints all keys"
