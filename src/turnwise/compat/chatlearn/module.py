"""Modules of a pipeline: the policy, the reference, value and reward models, and the trainer.

Methods have the names and arguments of ChatLearn's modules, and each method can be overridden on
its own. The policy's `forward_step` calls `generate_vllm` and then `decode_internal`;
`eval_forward` does the same with `eval.sampling`. `generate_vllm` calls `_add_request` and waits
with a deadline. `_add_request` begins the trajectories; for token ids, it calls
`_add_request_internal`. The other modules read the policy's outputs, and return lists with one
entry for each trajectory.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from turnwise.chat.template import read_tokenizer
from turnwise.compat.chatlearn.model_file import (
    Args,
    Settings,
    check_structure,
    read_model,
    sentences,
)
from turnwise.compat.chatlearn.outputs import Data, Outputs, RequestOutput, request_outputs
from turnwise.compat.chatlearn.pipeline import Module, Pipeline, log_notes
from turnwise.compat.chatlearn.prompts import (
    ConversationProblem,
    ConversationPrompt,
    ProblemBuilder,
    Prompt,
    PromptColumns,
    PromptFields,
    PromptList,
    PromptLoop,
    scheduled,
)
from turnwise.config import Config, SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner, check_failures
from turnwise.serving.seats import limits_of
from turnwise.training import checkpoint
from turnwise.training.model import ModelName
from turnwise.trajectory import ChatTemplate, Trajectory

Batch = Sequence[Problem | Mapping[str, object]] | Mapping[str, Sequence[Any]]
"""Problems of `build_dataset`, mappings with token ids, or one mapping with lists of texts and
ids."""


class VLLMModule(Module):
    """A model that samples with the pipeline's engines.

    Args:
        name: Unique among the modules of a pipeline; appears in errors and requests' names.
        model_file: The model's YAML file (see `compat.chatlearn.model_file`). Its values take
            precedence over the pipeline's file, and the pipeline's overrides take precedence over
            both files.

    Example:
        class Policy(VLLMModule):
            def decode_internal(self, batched_outputs):
                answers = [done for output in batched_outputs for done in output.outputs]
                return {"texts": [done.text for done in answers]}

        policy = Policy("policy", "policy.yaml")
        with Pipeline("pipeline.yaml", policy) as pipeline:
            data = policy.build_dataset(["What is 3 + 4?", {"input_ids": [5, 6, 7]}])
            outputs = policy.forward_step(data)
            outputs["rewards"] = [float("7" in text) for text in outputs["texts"]]
            pipeline.train(outputs)
    """

    def __init__(self, name: str, model_file: str | Path | None = None) -> None:
        super().__init__(name)
        if model_file is not None:
            self._settings, self._args, notes = read_model(model_file)
            log_notes(sentences(notes))
        self._numbers = itertools.count(1)
        self._folder: TemporaryDirectory[str] | None = None  # for the model of `model_provider`

    def plan(self, config: Config, args: Args) -> None:
        super().plan(config, args)
        own, self._args = self._args, args | self._args
        model: Foreign = self.model_provider()
        provided = self._provided(model)
        log_notes(check_structure(own, provided.get("model.path", config.model.path)))
        self._settings |= provided
        # ChatLearn's modules call model_provider in `setup`; that call returns this same model.
        self.model_provider = lambda: model  # type: ignore[method-assign]

    def _provided(self, model: Foreign) -> Settings:
        """Return the settings that load `model`; a model object is first saved to a folder."""
        if model is None:
            return {}
        if isinstance(model, str | Path):
            return {"model.path": str(model)}
        if not hasattr(model, "save_pretrained"):
            raise InputError(
                f"{self.name}: model_provider returns a model's folder or name, a model of "
                f"transformers or its configuration, not {repr(model)[:80]}: vLLM builds its own "
                "module of it in the engines; override generator_provider to replace the sampler"
            )
        tokenizer = self._settings.get("model.tokenizer") or getattr(model, "name_or_path", "")
        if not tokenizer:
            raise InputError(
                f"{self.name}: the model of model_provider has no tokenizer; name one in the "
                "module's file (tokenizer)"
            )
        if not hasattr(model, "state_dict"):  # a configuration: random weights
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(model)
        self._folder = TemporaryDirectory(prefix="turnwise-model-")
        model.save_pretrained(self._folder.name)
        return {"model.path": self._folder.name, "model.tokenizer": tokenizer}

    def start(self, pipeline: Pipeline) -> None:
        super().start(pipeline)
        vars(self).pop("model_provider", None)  # frees the model: the engines have loaded it

    def join(self, pipeline: Pipeline) -> None:
        super().join(pipeline)
        # These may have been cached before a pipeline was joined.
        for name in ("conversations", "generator", "tokenizer", "_fields"):
            vars(self).pop(name, None)
        decode = self.decode_internal

        @wraps(decode)
        def decode_and_keep(batched_outputs: Sequence[RequestOutput]) -> Outputs:
            decoded = decode(batched_outputs)
            if not isinstance(decoded, dict):
                raise InputError(f"{self.name}: decode_internal must return a dictionary")
            # One group may have several outputs.
            groups = {id(output.group): output.group for output in batched_outputs}
            return {"groups": list(groups.values()), **decoded}

        # Every caller, including an override of forward_step, gets the groups to train on.
        self.decode_internal = decode_and_keep  # type: ignore[method-assign]
        self.forward_step = self._step(self.forward_step, False)  # type: ignore[method-assign]
        self.eval_forward = self._step(self.eval_forward, True)  # type: ignore[method-assign]

    def _step(self, forward: Callable[..., Foreign], is_eval: bool) -> Callable[..., Foreign]:
        """Wrap a `forward_step`, so that it may read `data` as a scheduler's batch and may return
        the undecoded outputs of `execute_step`."""

        @wraps(forward)
        def step(data: Batch, *iteration: int, **named: int) -> Foreign:
            returned = forward(scheduled(data, is_eval), *iteration, **named)
            if isinstance(returned, list) and all(isinstance(o, RequestOutput) for o in returned):
                return self.decode_internal(returned)
            return returned

        return step

    @property
    def runner(self) -> Runner:
        """Makes the trajectories of rows, with the configured environment and loop."""
        return self.pipeline.runner

    @cached_property
    def conversations(self) -> Runner:
        """Makes the trajectories of texts, messages and token ids: one turn, no tools."""
        return self.runner.with_environment(ConversationPrompt, PromptLoop())

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self.runner.template

    @cached_property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer. Its attribute `tokenizer` is the tokenizer itself,
        because code for ChatLearn writes `self.tokenizer.tokenizer`."""
        planned = self._pipeline is None
        if planned and self.model_args["tokenizer"] is None:
            raise InputError(f"{self.name}: model_provider reads a tokenizer that no file names")
        tokenizer: Any = read_tokenizer(self.config.model) if planned else self.template.tokenizer
        tokenizer.tokenizer = tokenizer
        return tokenizer

    @cached_property
    def generator(self) -> Generator:
        """The sampler that `generator_provider` returned."""
        return self.generator_provider()

    def is_last_rank(self) -> bool:
        """Return True: a module is one process, whatever the parallel sizes of its engines."""
        return True

    def setup(self) -> None:
        """Load what sampling needs. An override need not do this, because the first use loads it
        too."""
        _ = self.generator, self.tokenizer, self.runner.tool_parser

    def model_provider(self) -> object:
        """Return the model that engines and trainer load; None, as here, loads `model.path`.

        Called once, before anything starts; `model_args` and `tokenizer` then come from the files.
        A call in `setup` returns the same object.

        Returns:
            A folder in Hugging Face's format, a Hugging Face name, a model of transformers, or a
            configuration of transformers (random weights). A model or configuration uses the
            tokenizer that the module's file names, or else the tokenizer of the model's own folder.
        """
        return None

    def generator_provider(self) -> Generator:
        """Return the sampler: the scheduler of the engines, which runs in the pipeline's thread."""
        return self.pipeline.generator

    def load_checkpoint(self, iteration: int | str | Path) -> None:
        """Resume from a pipeline's checkpoint, in `setup` or later; see `Pipeline.load`.

        Args:
            iteration: A folder that `save` wrote, or the number NNNN of the folder
                checkpoints/step-NNNN in the run's folder.
        """
        self.pipeline.load(self._checkpoint(iteration))

    def save_checkpoint(self, iteration: int | str | Path) -> Path:
        """Write a checkpoint for `load_checkpoint`; returns its folder."""
        return self.pipeline.save(self._checkpoint(iteration))

    def _checkpoint(self, iteration: int | str | Path) -> Path:
        if isinstance(iteration, int):
            run = self.config.run_folder
            return checkpoint.folder_of(run, iteration)
        return Path(iteration)

    def build_dataset(
        self, train_prompts: Sequence[Prompt], is_eval: bool = False
    ) -> list[Problem]:
        """Make problems for `forward_step` and `eval_forward`, in the prompts' order.

        Args:
            train_prompts: Rows go through the configured environment, with its tools and reward.
                Texts, messages and token ids, `{"input_ids": [...], "prompt": "text"}`, are
                answered in one turn. The entries of `rollout.rewards` may score such an answer, and
                they see the other fields of the prompt's mapping; without entries, the reward is 0.
                Texts and token ids longer than `longest_prompt` are cut at their end; rows and
                messages longer than `data.max_prompt_tokens` are left out.
            is_eval: Whether the problems are for `eval_forward`.

        Raises:
            InputError: when a prompt is empty or cannot be used; the error names the prompt.
        """
        builder = self._builder(f"{self.name}-eval" if is_eval else self.name, is_eval)
        problems = builder.build(train_prompts)
        rows = [problem for problem in problems if not isinstance(problem, ConversationProblem)]
        kept = {problem.id for problem in self.runner.within_prompt_limit(rows)}
        return [p for p in problems if isinstance(p, ConversationProblem) or p.id in kept]

    def longest_prompt(self, is_eval: bool = False) -> int:
        """Return the maximum number of tokens of a text prompt.

        This is `data.max_prompt_tokens` if it is set, otherwise the number of tokens that
        `max_tokens` leaves in the context. The result is at most the context less one token, which
        is also the result if `max_tokens` leaves no tokens.
        """
        room, own = self.config.model.max_length, self.config.data.max_prompt_tokens
        if own is not None:
            return min(own, room - 1)
        left = room - self._sampling(is_eval).max_tokens
        return left if left > 0 else room - 1

    def begin(self, item: Problem, sampling: SamplingConfig) -> "Future[Group]":
        """Begin `sampling.n` trajectories of one problem; return a future of their group."""
        if not isinstance(item, Problem):
            raise InputError(f"{self.name} got {repr(item)[:80]}, which build_dataset did not make")
        runner = self.conversations if isinstance(item, ConversationProblem) else self.runner
        tag = f"{self.name}{next(self._numbers)}"

        async def run() -> Group:
            group = await runner.run_group(self.generator, item, sampling, tag)
            if isinstance(item, ConversationProblem):
                group.prompt = item.text
            return group

        return self.pipeline.submit(run)

    def _add_request(self, data: Batch, is_eval: bool = False) -> "list[Future[Group]]":
        """Begin the trajectories of all problems; return a future of each group."""
        ids, text, _ = self._fields
        if isinstance(data, Mapping):
            return self._add_request_internal(data[text], data[ids], is_eval=is_eval)
        requests: list[Future[Group]] = []
        sampling = self._sampling(is_eval)
        # Adjacent prompts of one kind are grouped, so that one warning counts all cut prompts.
        for tokens, items in itertools.groupby(data, lambda i: isinstance(i, Mapping) and ids in i):
            given: list[Any] = list(items)
            if tokens:
                texts, token_ids = [i.get(text) for i in given], [i[ids] for i in given]
                requests += self._add_request_internal(texts, token_ids, is_eval)
            else:
                requests += [self.begin(item, sampling) for item in given]
        return requests

    def _add_request_internal(
        self,
        prompt_list: Sequence[str | None],
        prompt_token_id_list: Sequence[Sequence[int]],
        is_eval: bool = False,
    ) -> "list[Future[Group]]":
        """Begin the trajectories of token ids, cut to `longest_prompt`.

        The texts appear only in outputs; where a text is None, the outputs have the decoded ids.
        """
        if len(prompt_list) != len(prompt_token_id_list):
            raise InputError(
                f"{self.name} got {len(prompt_list)} texts for the token ids of "
                f"{len(prompt_token_id_list)} prompts: give one text, or None, for each prompt"
            )
        ids, text, _ = self._fields
        pairs = zip(prompt_token_id_list, prompt_list, strict=True)
        problems = self._builder(self.name, is_eval).build([{ids: i, text: t} for i, t in pairs])
        return [self.begin(problem, self._sampling(is_eval)) for problem in problems]

    def generate_vllm(self, query: Batch, is_eval: bool = False) -> list[RequestOutput]:
        """Answer all problems; return an output for each, in their order.

        Raises:
            DeadlineError: when the answers do not come in time.
            StepError: when more than `rollout.max_failed_fraction` of the trajectories failed.
        """
        groups = self.wait(self._add_request(scheduled(query, is_eval), is_eval=is_eval))
        check_failures(groups, self.config.rollout.max_failed_fraction, self.name)
        return request_outputs(groups, self.template, self._sampling(is_eval).stop)

    def execute_step(self, batch: object, *blocks: object) -> list[RequestOutput]:
        """Run all answers of a batch to their end, in place of one step of vLLM's scheduler.

        vLLM's scheduler runs in the engines' processes, and does not move blocks for a caller.

        Args:
            batch: The `data` of a `forward_step`, or `data["seq_group_metadata_list"]`.
            blocks: Ignored: `data["blocks_to_swap_in"]`, `data["blocks_to_swap_out"]` and
                `data["blocks_to_copy"]`.

        Example:
            def forward_step(self, data, iteration=0):
                return self.execute_step(data["seq_group_metadata_list"], {}, {}, {})
        """
        if not isinstance(batch, PromptList | PromptColumns):
            raise InputError(
                f"{self.name}: execute_step takes what forward_step or eval_forward got, or its "
                f"seq_group_metadata_list, not {repr(batch)[:80]}"
            )
        return self.generate_vllm(batch, batch.is_eval)

    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> Outputs:
        """Return outputs as lists.

        A pipeline trains on the sampled tokens and on `rewards`. An override may change the other
        lists for the program's own use; this does not change the training.

        Args:
            batched_outputs: Objects with the attributes of vLLM's outputs (see `outputs`).

        Returns:
            Lists with one entry for each trajectory, in the outputs' order. The entry of a
            trajectory with branches is the branch that ends with its last turn. The module adds
            `groups`, which a pipeline trains on, to the dictionary that an override returns.

            trajectories          `Trajectory` each
            problem_ids           the problem's name
            str_prompts           text of the prompt, special tokens included
            str_outputs           text of the last assistant message
            all_tokens            T ids: the prompt and everything after it, tool results too
            no_padded_query_ids   ids of only the prompt
            loss_mask             T times 1 (sampled) or 0
            logprobs              T floats of the sampler; 0.0 where the mask is 0
            weight_versions       T versions; -1 where the mask is 0
            prompt_token_length   number of ids before the first sampled id
            response_token_length number of ids from the first sampled id on
            rewards               trained on; may be replaced before training
            truncated             whether a limit of tokens or turns ended the trajectory
        """
        pairs = [(output, done) for output in batched_outputs for done in output.outputs]
        return {
            "trajectories": [done.trajectory for _, done in pairs],
            "problem_ids": [done.trajectory.problem_id for _, done in pairs],
            "str_prompts": [output.prompt for output, _ in pairs],
            "str_outputs": [done.trajectory.final_text for _, done in pairs],
            "all_tokens": [done.branch.token_ids for _, done in pairs],
            "no_padded_query_ids": [output.prompt_token_ids for output, _ in pairs],
            "loss_mask": [done.branch.response_mask for _, done in pairs],
            "logprobs": [done.branch.logprobs for _, done in pairs],
            "weight_versions": [done.branch.weight_versions for _, done in pairs],
            "prompt_token_length": [done.prompt_length for _, done in pairs],
            "response_token_length": [len(done.token_ids) for _, done in pairs],
            "rewards": [done.trajectory.reward for _, done in pairs],
            "truncated": [done.finish_reason != "stop" for _, done in pairs],
        }

    def forward_step(self, data: Batch, iteration: int = 0) -> Outputs:
        """Answer all problems under `sampling`; return the lists of `decode_internal`.

        Args:
            iteration: The caller's step number. Unused here; an override may read it.
        """
        return self.decode_internal(self.generate_vllm(data, False))

    def eval_forward(self, data: Batch, iteration: int = 0) -> Outputs:
        """Answer all problems under `eval.sampling`; otherwise like `forward_step`."""
        return self.decode_internal(self.generate_vllm(data, True))

    def wait(self, requests: "Sequence[Future[Group]]") -> list[Group]:
        """Return the groups of requests; `deadline` limits the wait for all of them."""
        count = len(requests)
        return self.pipeline.wait(requests, self.deadline(count), f"{count} groups of {self.name}")

    def deadline(self, count: int) -> float:
        """Return the maximum time of `count` groups together, in seconds."""
        rollout = self.config.rollout
        trajectories = count * max(self.config.sampling.n, self.config.eval.sampling.n)
        at_once = limits_of(self.config, self.config.serving.max_workers).at_once
        rounds = math.ceil(trajectories / at_once) * (1 + rollout.retries)
        return rounds * rollout.trajectory_timeout + self.config.engine.request_timeout

    def _sampling(self, is_eval: bool) -> SamplingConfig:
        return self.config.eval.sampling if is_eval else self.config.sampling

    @cached_property
    def _fields(self) -> PromptFields:
        args = self.model_args
        return args["vllm_input_ids_key"], args["vllm_prompt_key"], args["prompt_key"]

    def _builder(self, name: str, is_eval: bool) -> ProblemBuilder:
        limit = self.longest_prompt(is_eval)
        longest, room = self.config.data.max_prompt_tokens, self.config.model.max_length
        return ProblemBuilder(name, self.template, self._fields, limit, longest, room)


class _TokenModule(Module):
    """A model in the trainer's processes that scores tokens.

    A training step computes the same values itself, so the outputs are only for the program.
    """

    _model: ClassVar[ModelName]
    _output: ClassVar[str]

    def setup(self) -> None:
        """Check that the trainer has this model."""
        self.pipeline.check_model(self._model)

    def forward_step(self, data: Data, iteration: int = 0) -> Outputs:
        """Score sequences of tokens.

        Args:
            data: `all_tokens`, the T ids of each sequence, and `loss_mask`, which has a 1 for each
                id to score and a 0 for each other id. Without `loss_mask`, all ids of a sequence
                except the first are scored.

        Returns:
            A list with T floats for each sequence, 0.0 where a token is not scored.
        """
        if data.get("all_tokens") is None:
            raise InputError(
                f"{self.name} needs all_tokens, which the forward_step of a policy returns"
            )
        tokens = [list(map(int, ids)) for ids in data["all_tokens"]]
        masks = data.get("loss_mask")
        if masks is None:
            masks = [[int(place > 0) for place in range(len(ids))] for ids in tokens]
        masks = [list(map(int, mask)) for mask in masks]
        if list(map(len, masks)) != list(map(len, tokens)):
            raise InputError(f"{self.name}: loss_mask must have a number for each of all_tokens")
        return {self._output: self.pipeline.score(self._model, tokens, masks)}

    eval_forward = forward_step


class ReferenceModule(_TokenModule):
    """The frozen reference model of the KL penalty and of dpo: `algorithm.kl.model`.

    `forward_step` returns `ref_logprobs`: T log-probs for each sequence, under `sampling`.

    Example:
        reference = ReferenceModule("reference", "reference.yaml")
        with Pipeline("config.yaml", policy, reference) as pipeline:
            logprobs = reference.forward_step(policy.forward_step(problems))["ref_logprobs"]
    """

    role = "reference"
    _model = "reference"
    _output = "ref_logprobs"


class ValueModule(_TokenModule):
    """PPO's value model: `algorithm.advantage.model`.

    `forward_step` returns `old_values`: for each sequence T values, which are the returns that the
    model expects before each token.

    Example:
        value = ValueModule("value", "value.yaml")
        with Pipeline("ppo.yaml", policy, value) as pipeline:
            values = value.forward_step(policy.forward_step(problems))["old_values"]
    """

    role = "value"
    _model = "value"
    _output = "old_values"


class RewardModule(Module):
    """A reward model or function: the entry of `rollout.rewards` with this module's name.

    Example:
        reward = RewardModule("reward", "reward.yaml")
        with Pipeline("config.yaml", policy, reward) as pipeline:
            outputs = policy.forward_step(problems)
            pipeline.train(outputs | reward.forward_step(outputs))
    """

    role = "reward"

    def forward_step(self, data: Data, iteration: int = 0) -> Outputs:
        """Return `rewards`, one float for each trajectory, without the entry's weight.

        Args:
            data: The outputs of a policy's `forward_step` (`trajectories` or `groups`), or
                `messages`, the messages of each trajectory, which only reward models accept.

        Raises:
            TrajectoryError: when the reward fails; the error names the reward and the reason.
        """
        judged: list[Trajectory]
        if "trajectories" in data:
            judged = list(data["trajectories"])
        elif "groups" in data:
            judged = [trajectory for group in data["groups"] for trajectory in group.trajectories]
        elif "messages" in data:
            judged = [
                Trajectory(f"{self.name}:{number}", number, messages=list(messages))
                for number, messages in enumerate(data["messages"])
            ]
        else:
            raise InputError(
                f"{self.name} needs trajectories, which the forward_step of a policy returns"
            )
        return {"rewards": self.pipeline.judge(self.name, judged)}

    eval_forward = forward_step


class TrainerModule(Module):
    """The trainer of the policy, and of PPO's value model.

    Example:
        trainer = TrainerModule("ppo_policy", "ppo_policy.yaml")
        with Pipeline("config.yaml", policy, trainer) as pipeline:
            for iteration in range(100):
                metrics = trainer.train_step(policy.forward_step(problems), iteration)
    """

    role = "ppo_policy"

    def train_step(self, data: Data | Sequence[Data], iteration: int = 0) -> JsonObject:
        """Train on one dictionary of a policy's outputs or several; see `Pipeline.train`."""
        each = [data] if isinstance(data, Mapping) else list(data)
        return self.pipeline.train(*(dict(outputs) for outputs in each))
