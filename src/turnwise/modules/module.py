"""A module: what the prompts of one model are, how it is asked, and what its outputs look like.

Each method can be overridden alone; the defaults call each other as follows, and an override
that keeps a method's contract leaves the others as they are. Names, arguments and their order are
those of ChatLearn's VLLMModule.

    model_provider  which model it is; called once, before the engines start
    setup           once, when the pipeline runs; may call load_checkpoint
    build_dataset   prompts to items
    forward_step    items to outputs: generate_vllm, then decode_internal
    eval_forward    the same under eval.sampling
    generate_vllm   items to vLLM's outputs: _add_request, and a wait with a deadline
    _add_request    begins the trajectories; _add_request_internal, those of token ids

Knows nothing of training: a pipeline trains on what forward_step returned.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError, describe_error
from turnwise.modules.base import Module
from turnwise.modules.conversation import (
    Conversation,
    ConversationProblem,
    PromptLoop,
    TokenProblem,
)
from turnwise.modules.model_file import Settings, read_model_args, read_model_file
from turnwise.modules.outputs import RequestOutput, request_outputs
from turnwise.rollout import Group, Problem, Runner, check_failures
from turnwise.trajectory import ChatTemplate

if TYPE_CHECKING:
    from turnwise.modules.pipeline import Pipeline

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, messages, token ids with their text, or a row of the environment."""
Batch = Sequence[Problem | Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Items of `build_dataset`, mappings with token ids, or one mapping of lists of both."""
Outputs = dict[str, Any]
_Decode = Callable[[Sequence[RequestOutput]], Outputs]


class VLLMModule(Module):
    """A model that generates through the pipeline's engines; see the module's docstring.

    Args:
        name: For errors and in the names of requests; different in each module of a pipeline.
        model_file: The model's YAML file (see `model_file`). It becomes a part of the pipeline's
            configuration: over the pipeline's own file, under its overrides.

    Raises:
        InputError: when the file cannot be read or has an unknown key.

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
        self._given: Settings = {} if model_file is None else read_model_file(model_file)
        self._args = {} if model_file is None else read_model_args(model_file)
        self._numbers = itertools.count(1)
        self._cut = 0
        """Prompts that were cut since it was last told."""

    @cached_property
    def settings(self) -> Settings:
        """Settings that the module needs: its file's keys, and its own model."""
        return self._given | self._own_model()

    def join(self, pipeline: "Pipeline") -> None:
        super().join(pipeline)
        # Whoever calls it, an override of forward_step too, gets what a pipeline trains on.
        decode = _keeping_groups(self.decode_internal, self.name)
        self.decode_internal = decode  # type: ignore[assignment, method-assign]

    @property
    def model_args(self) -> dict[str, Any]:
        """The configuration under ChatLearn's names, and its file's other flat keys.

        `num_inference_per_prompt` is 1: `n` holds it.
        """
        own, held_out = self.config.sampling, self.config.eval.sampling
        both = {"temperature", "top_k", "top_p"}
        return {
            "prompt_key": None,
            "vllm_prompt_key": "prompt",
            "vllm_input_ids_key": "input_ids",
            "init_shuffle_prompts": 0,
            **self._args,
            "num_inference_per_prompt": 1,
            "seq_length": self.config.model.max_length,
            "max_new_tokens": own.max_tokens,
            "n": own.n,
            "ignore_eos": own.ignore_eos,
            "prompt_logprobs": 1 if own.prompt_logprobs else None,
            "stop_token_list": list(own.stop),
            **own.model_dump(include=both),
            **{f"eval_{key}": value for key, value in held_out.model_dump(include=both).items()},
        }

    @property
    def runner(self) -> Runner:
        """Makes the trajectories of rows, with the configured environment and loop."""
        return self.pipeline.runner

    @cached_property
    def conversations(self) -> Runner:
        """Makes the trajectories of texts, messages and token ids: one turn, no tools, no
        environment."""
        environment, loop = (f"{o.__module__}:{o.__name__}" for o in (Conversation, PromptLoop))
        rollout = self.config.rollout.model_copy(update={"loop": loop})
        config = self.config.model_copy(update={"environment": environment, "rollout": rollout})
        runner = Runner(config, self.template.tokenizer)
        runner.tool_parser = self.runner.tool_parser
        runner.rewards = self.runner.rewards
        return runner

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self.runner.template

    @cached_property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer; its `tokenizer`, as in ChatLearn, is itself."""
        tokenizer = self.template.tokenizer
        tokenizer.tokenizer = tokenizer
        return tokenizer

    @cached_property
    def generator(self) -> Generator:
        """What `generator_provider` returned."""
        return self.generator_provider()

    def is_last_rank(self) -> bool:
        """True: a module is one process, whatever its engines' sizes."""
        return True

    def setup(self) -> None:
        """Get ready to generate; called once, inside the running pipeline.

        What an override leaves out is loaded at its first use.
        """
        _ = self.generator, self.tokenizer, self.runner.tool_parser

    def model_provider(self) -> Any:
        """Define the model; called once, before anything starts.

        Returns:
            A folder in Hugging Face's format or a Hugging Face name; a model of transformers, or
            its configuration, whose weights are random then; or None, as here: the model of
            `model.path`. Engines and trainer both load it, with the tokenizer that it was saved
            with, or that of the module's file.
        """
        return None

    def generator_provider(self) -> Generator:
        """Return what samples: the pipeline's engines, which run in the pipeline's thread."""
        return self.pipeline.generator

    def load_checkpoint(self, iteration: int | str | Path) -> None:
        """Go on from a checkpoint of a pipeline: weights, optimizer and version; the engines get
        the weights. For `setup`, and at any time.

        Args:
            iteration: A folder that `save` wrote, or a number, for the run folder's
                checkpoints/step-NNNN.

        Raises:
            InputError: when it is no whole checkpoint, or one of another model.
        """
        self.pipeline.load(self._checkpoint(iteration))

    def save_checkpoint(self, iteration: int | str | Path) -> Path:
        """Write a checkpoint to where `load_checkpoint` finds it; returns its folder."""
        return self.pipeline.save(self._checkpoint(iteration))

    def _checkpoint(self, iteration: int | str | Path) -> Path:
        run = Path(self.config.output_dir, self.config.name)
        if isinstance(iteration, int):
            return run / "checkpoints" / f"step-{iteration:04d}"
        return Path(iteration)

    def build_dataset(
        self, train_prompts: Sequence[Prompt], is_eval: bool = False
    ) -> list[Problem]:
        """Items for `forward_step` and `eval_forward`, in the prompts' order.

        Args:
            train_prompts: Rows go through the configured environment, with its tools and reward.
                Texts, messages and token ids, `{"input_ids": [...], "prompt": "text"}`, are
                answered in one turn, and the reward is 0 (or what `rollout.rewards` makes it,
                which see what else stands beside the ids). Texts and token ids that are longer
                than `longest_prompt` are cut at their end; rows and messages longer than
                `data.max_prompt_tokens` are left out.
            is_eval: Whether they are for `eval_forward`.

        Raises:
            InputError: naming the prompt that is empty or cannot be used.
        """
        name = f"{self.name}-eval" if is_eval else self.name
        limit, left_out = self.longest_prompt(is_eval), 0
        items: list[Problem] = []
        for number, prompt in enumerate(train_prompts, 1):
            item = self._item(f"{name}:{number}", prompt, limit)
            if item is None:
                left_out += 1
            else:
                items.append(item)
        rows = [item for item in items if not isinstance(item, ConversationProblem)]
        fitting = {item.id for item in self.runner.fitting(rows)}
        self._tell_cut(len(train_prompts), name, limit)
        if left_out:
            logger.warning(
                "%d of %d prompts of %s are longer than data.max_prompt_tokens and left out",
                *(left_out, len(train_prompts), name),
            )
        return [i for i in items if isinstance(i, ConversationProblem) or i.id in fitting]

    def longest_prompt(self, is_eval: bool = False) -> int:
        """The most tokens of a prompt: `data.max_prompt_tokens`, or what `max_tokens` of sampling
        leaves of the context (all but one token where it takes all)."""
        room, own = self.config.model.max_length, self.config.data.max_prompt_tokens
        if own is not None:
            return min(own, room - 1)
        left = room - self._sampling(is_eval).max_tokens
        return left if left > 0 else room - 1

    def begin(self, item: Problem, sampling: SamplingConfig) -> "Future[Group]":
        """Begin `sampling.n` trajectories of one item."""
        if not isinstance(item, Problem):
            raise InputError(
                f"{self.name} was asked with {repr(item)[:80]}, which build_dataset did not make"
            )
        runner = self.conversations if isinstance(item, ConversationProblem) else self.runner
        tag = f"{self.name}{next(self._numbers)}"

        async def run() -> Group:
            group = await runner.run_group(self.generator, item, sampling, tag)
            if isinstance(item, TokenProblem):
                group.prompt = item.row["prompt"]
            return group

        return self.pipeline.submit(run)

    def _add_request(self, data: Batch, is_eval: bool = False) -> "list[Future[Group]]":
        """Begin the trajectories of all items; returns a future of each item's group.

        Mappings with token ids and their text go through `_add_request_internal`.
        """
        ids, text, _ = self._fields
        if isinstance(data, Mapping):
            return self._add_request_internal(data[text], data[ids], is_eval=is_eval)
        requests: list[Future[Group]] = []
        sampling = self._sampling(is_eval)
        # All that stand together go together: each has a number, and what is cut is told once.
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
        """Begin the trajectories of prompts that are token ids already.

        Args:
            prompt_list: Their texts, for outputs alone; None is the text of the ids.
            prompt_token_id_list: What the engine is asked with, cut to `longest_prompt`.

        Raises:
            InputError: naming the prompt that is empty, or when there are not as many texts.
        """
        if len(prompt_list) != len(prompt_token_id_list):
            raise InputError(
                f"{self.name} was asked with {len(prompt_list)} texts and token ids of "
                f"{len(prompt_token_id_list)} prompts"
            )
        limit, sampling = self.longest_prompt(is_eval), self._sampling(is_eval)
        items = [
            self._tokens(f"{self.name}:{number}", {}, text, ids, limit)
            for number, (text, ids) in enumerate(
                zip(prompt_list, prompt_token_id_list, strict=True), 1
            )
        ]
        self._tell_cut(len(items), self.name, limit)
        return [self.begin(item, sampling) for item in items]

    def generate_vllm(self, query: Batch, is_eval: bool = False) -> list[RequestOutput]:
        """Answer all items; returns an output for each, in their order.

        Raises:
            DeadlineError: when the answers did not come in time.
            StepError: when more than `rollout.max_failed_fraction` of the trajectories failed.
        """
        groups = self.wait(self._add_request(query, is_eval=is_eval))
        check_failures(groups, self.config.rollout.max_failed_fraction, self.name)
        return request_outputs(groups, self.template, self._sampling(is_eval).stop)

    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> Outputs:
        """Outputs as lists.

        A pipeline trains on the tokens as they were sampled and on `rewards`; whatever else an
        override changes in the lists is for the program.

        Args:
            batched_outputs: With the attributes of vLLM's (see `outputs`).

        Returns:
            Lists with an entry for each trajectory, in the outputs' order (of one with branches:
            the branch that ends with its last turn). What an override returns, a dictionary too,
            gets `groups` beside it, which a pipeline trains on.

            trajectories          `Trajectory` each
            problem_ids           the item's name
            str_prompts           text of the prompt, special tokens and all
            str_outputs           text of the last assistant message
            all_tokens            T ids: the prompt and all that follows it, tools' answers too
            no_padded_query_ids   ids of the prompt alone
            loss_mask             T times 1 (sampled) or 0
            logprobs              T floats, as sampled; 0.0 where the mask is 0
            weight_versions       T versions; -1 where the mask is 0
            prompt_token_length   ids before the first sampled one
            response_token_length ids from there on
            rewards               may be replaced before training: that is what is trained on
            truncated             whether a limit of tokens or turns ended it
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
        """Answer all items under `sampling`; returns what `decode_internal` makes of it, and its
        `groups`, which a pipeline trains on.

        Args:
            iteration: The caller's count; for overrides.

        Raises:
            DeadlineError, StepError: as `generate_vllm` does.
        """
        return self._forward(data, is_eval=False)

    def eval_forward(self, data: Batch, iteration: int = 0) -> Outputs:
        """The same under `eval.sampling`."""
        return self._forward(data, is_eval=True)

    def _forward(self, data: Batch, is_eval: bool) -> Outputs:
        return self.decode_internal(self.generate_vllm(data, is_eval))

    def wait(self, requests: "Sequence[Future[Group]]") -> list[Group]:
        """The groups of requests, each trajectory given `rollout.trajectory_timeout` seconds.

        Raises:
            DeadlineError: when they are not done in time; all are cancelled then.
        """
        rollout = self.config.rollout
        trajectories = len(requests) * max(self.config.sampling.n, self.config.eval.sampling.n)
        rounds = math.ceil(trajectories / rollout.concurrency) * (1 + rollout.retries)
        seconds = rounds * rollout.trajectory_timeout + self.config.engine.request_timeout
        return self.pipeline.wait(requests, seconds, f"{len(requests)} groups of {self.name}")

    def _sampling(self, is_eval: bool) -> SamplingConfig:
        return self.config.eval.sampling if is_eval else self.config.sampling

    @cached_property
    def _fields(self) -> tuple[str, str, str | None]:
        """Where a prompt has its token ids, their text, and a text without ids."""
        names = "vllm_input_ids_key", "vllm_prompt_key", "prompt_key"
        ids, text, said = (self.model_args[name] for name in names)
        return ids, text, said

    def _tell_cut(self, count: int, name: str, limit: int) -> None:
        if self._cut:
            logger.warning(
                "%d of %d prompts of %s are cut to %d tokens", self._cut, count, name, limit
            )
        self._cut = 0

    def _item(self, name: str, prompt: Any, limit: int) -> Problem | None:
        """The item of one prompt; None where it is left out."""
        ids, text, said_key = self._fields
        if isinstance(prompt, str | Sequence | Mapping) and not prompt:
            raise InputError(f"{name}: the prompt is empty")
        row = prompt if isinstance(prompt, Mapping) else {}
        if ids in row:
            return self._tokens(name, row, row.get(text), row[ids], limit)
        if row and said_key not in row:
            return Problem(name, dict(row))
        said = row[said_key] if row else prompt
        if isinstance(said, str):
            return self._text(name, row, said, limit)
        if (
            not isinstance(said, Sequence)
            or not said
            or not all(isinstance(m, Mapping) and "role" in m for m in said)
        ):
            raise InputError(
                f"{name}: a prompt is a text, a list of messages, token ids under {ids}, or a row, "
                f"not {repr(said)[:80]}"
            )
        messages = [dict(message) for message in said]
        token_ids = self._render(name, messages)
        longest, room = self.config.data.max_prompt_tokens, self.config.model.max_length
        if longest is not None and len(token_ids) > longest:
            return None
        if len(token_ids) >= room:
            raise InputError(
                f"{name}: its prompt of {len(token_ids)} tokens does not fit the context of "
                f"{room}; raise model.max_length, or leave such prompts out with "
                "data.max_prompt_tokens"
            )
        return ConversationProblem(name, {**row, "messages": messages, "input_ids": token_ids})

    def _text(self, name: str, row: Mapping[str, Any], text: str, limit: int) -> Problem:
        """A text as a user's message, cut until the conversation is within the limit."""
        if not text.strip():
            raise InputError(f"{name}: the prompt is empty")
        messages = [{"role": "user", "content": text}]
        token_ids = self._render(name, messages)
        own, kept = [], 0
        if len(token_ids) > limit:
            self._cut += 1
            own = self.template.encode(text)
            kept = len(own)
        while (over := len(token_ids) - limit) > 0:
            kept -= over
            if kept <= 0:
                raise InputError(
                    f"{name}: the chat template alone leaves no room for a text in {limit} tokens; "
                    "raise data.max_prompt_tokens or model.max_length"
                )
            messages = [{"role": "user", "content": self.template.decode_all(own[:kept])}]
            token_ids = self._render(name, messages)
        return ConversationProblem(name, {**row, "messages": messages, "input_ids": token_ids})

    def _tokens(
        self, name: str, row: Mapping[str, Any], text: str | None, given: Any, limit: int
    ) -> Problem:
        """Token ids as they are, but cut at the limit."""
        token_ids = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(token_ids, Sequence) or not all(
            isinstance(token, int) and token >= 0 for token in token_ids
        ):
            raise InputError(f"{name}: token ids are whole numbers, not {repr(given)[:80]}")
        if not token_ids:
            raise InputError(f"{name}: the prompt is empty")
        self._cut += len(token_ids) > limit
        token_ids = list(token_ids[:limit])
        text = self.template.decode_all(token_ids) if text is None else text
        messages = [{"role": "user", "content": text}]
        own = {"prompt": text, "messages": messages, "input_ids": token_ids}
        return TokenProblem(name, {**row, **own})

    def _render(self, name: str, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return self.template.render(messages)
        except Exception as error:  # a template may raise anything
            raise InputError(
                f"{name}: the chat template refuses the prompt: {describe_error(error)}"
            ) from error

    def _own_model(self) -> Settings:
        """Settings that `model_provider` implies."""
        model = self.model_provider()
        if model is None:
            return {}
        if isinstance(model, str | Path):
            return {"model.path": str(model)}
        if not hasattr(model, "save_pretrained"):
            raise InputError(
                f"{self.name}: model_provider returns a model's folder or name, a model of "
                f"transformers or its configuration, not {repr(model)[:80]}; what samples is "
                "generator_provider's"
            )
        tokenizer = self._given.get("model.tokenizer") or getattr(model, "name_or_path", "")
        if not tokenizer:
            raise InputError(
                f"{self.name}: the model of model_provider has no tokenizer; name one in the "
                "module's file (tokenizer)"
            )
        self._folder = TemporaryDirectory(prefix="turnwise-model-")
        _with_weights(model).save_pretrained(self._folder.name)
        return {"model.path": self._folder.name, "model.tokenizer": tokenizer}


def _groups(outputs: Sequence[RequestOutput]) -> list[Group]:
    """Each group once, in the outputs' order."""
    return list({id(output.group): output.group for output in outputs}.values())


def _keeping_groups(decode: _Decode, name: str) -> _Decode:
    """A `decode_internal` whose outputs have `groups`, however it decodes."""

    @wraps(decode)
    def decode_and_keep(batched_outputs: Sequence[RequestOutput]) -> Outputs:
        decoded = decode(batched_outputs)
        if not isinstance(decoded, dict):
            raise InputError(f"{name}: decode_internal must return a dictionary")
        return {"groups": _groups(batched_outputs), **decoded}

    return decode_and_keep


def _with_weights(model: Any) -> Any:
    """A model, where only its configuration is given."""
    if hasattr(model, "state_dict"):
        return model
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(model)
