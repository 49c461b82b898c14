"""A module: what the prompts of one model are, how it is asked, and what its outputs look like.

Each method can be overridden alone; the defaults call each other as follows, and an override
that keeps a method's contract leaves the others as they are.

    setup          once, when the pipeline runs; calls model_provider
    build_dataset  prompts to items
    forward_step   items to outputs: _add_request, a wait with a deadline, decode_internal
    eval_forward   the same under eval.sampling

Knows nothing of training: a pipeline trains on what forward_step returned.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.modules.conversation import Conversation, ConversationProblem
from turnwise.modules.model_file import Settings, read_model_file
from turnwise.rollout import Group, Problem, Runner, check_failures
from turnwise.trajectory import Branch, ChatTemplate

if TYPE_CHECKING:
    from turnwise.modules.pipeline import Pipeline

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, messages, or a row of the environment."""
Outputs = dict[str, Any]
_NO_TURNS = Branch(leaf=-1, token_ids=[], response_mask=[], logprobs=[], weight_versions=[])


class VLLMModule:
    """A model that generates through the pipeline's engines; see the module's docstring.

    Args:
        name: For errors and in the names of requests; different in each module of a pipeline.
        model_file: The model's YAML file (see `model_file`). It becomes a part of the pipeline's
            configuration: over the pipeline's own file, under its overrides.

    Raises:
        InputError: when the file cannot be read or has an unknown key.
    """

    def __init__(self, name: str, model_file: str | Path | None = None) -> None:
        self.name = name
        self.settings: Settings = {} if model_file is None else read_model_file(model_file)
        self._pipeline: Pipeline | None = None
        self._numbers = itertools.count(1)

    def join(self, pipeline: "Pipeline") -> None:
        """Called by the pipeline, before `setup`."""
        self._pipeline = pipeline

    @property
    def pipeline(self) -> "Pipeline":
        if self._pipeline is None:
            raise InputError(
                f"the module {self.name} is in no running pipeline: give it to Pipeline(...) and "
                "use it inside its with block"
            )
        return self._pipeline

    @property
    def config(self) -> Config:
        """The pipeline's configuration, this module's file included."""
        return self.pipeline.config

    @property
    def runner(self) -> Runner:
        """Makes the trajectories of rows, with the configured environment and loop."""
        return self.pipeline.runner

    @cached_property
    def conversations(self) -> Runner:
        """Makes the trajectories of texts and messages: one turn, no tools, no environment."""
        path = f"{Conversation.__module__}:{Conversation.__name__}"
        rollout = self.config.rollout.model_copy(update={"loop": "single_turn"})
        config = self.config.model_copy(update={"environment": path, "rollout": rollout})
        runner = Runner(config, self.tokenizer)
        runner.tool_parser = self.runner.tool_parser
        runner.rewards = self.runner.rewards
        return runner

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self.runner.template

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.template.tokenizer

    @cached_property
    def model(self) -> Generator:
        """What `model_provider` returned."""
        return self.model_provider()

    def setup(self) -> None:
        """Get ready to generate; called once, inside the running pipeline.

        What an override leaves out is loaded at its first use.
        """
        _ = self.model, self.tokenizer, self.runner.tool_parser

    def model_provider(self) -> Generator:
        """What generates: the pipeline's engines. Its methods run in the pipeline's thread."""
        return self.pipeline.generator

    def build_dataset(self, prompts: Sequence[Prompt], is_eval: bool = False) -> list[Problem]:
        """Items for `forward_step` and `eval_forward`, in the prompts' order.

        Prompts longer than `data.max_prompt_tokens` are left out.

        Args:
            prompts: Rows go through the configured environment, with its tools and reward. Texts
                and messages are answered in one turn, and the reward is 0 (or what
                `rollout.rewards` makes it).

        Raises:
            InputError: naming the prompt that cannot be used.
        """
        name = f"{self.name}-eval" if is_eval else self.name
        items = [_item(f"{name}:{number}", prompt) for number, prompt in enumerate(prompts, 1)]
        talks = [item for item in items if isinstance(item, ConversationProblem)]
        rows = [item for item in items if not isinstance(item, ConversationProblem)]
        kept = {item.id for item in self.runner.fitting(rows)}
        if talks:
            kept |= {item.id for item in self.conversations.fitting(talks)}
        return [item for item in items if item.id in kept]

    def begin(self, item: Problem, sampling: SamplingConfig) -> "Future[Group]":
        """Begin `sampling.n` trajectories of one item."""
        if not isinstance(item, Problem):
            raise InputError(
                f"{self.name} was asked with {repr(item)[:80]}, which build_dataset did not make"
            )
        runner = self.conversations if isinstance(item, ConversationProblem) else self.runner
        tag = f"{self.name}{next(self._numbers)}"
        return self.pipeline.submit(lambda: runner.run_group(self.model, item, sampling, tag))

    def _add_request(self, data: Sequence[Problem], is_eval: bool = False) -> "list[Future[Group]]":
        """Begin the trajectories of all items; returns a future of each item's group."""
        sampling = self.config.eval.sampling if is_eval else self.config.sampling
        return [self.begin(item, sampling) for item in data]

    def decode_internal(self, outputs: Sequence[Group]) -> Outputs:
        """Finished groups as lists.

        Returns:
            `groups`, as they came; and lists with an entry for each trajectory, in the groups'
            order (of one with branches: the branch that ends with its last turn):

            trajectories          `Trajectory` each
            problem_ids           the item's name
            str_prompts           text of the prompt, special tokens and all
            str_outputs           text of the last assistant message
            all_tokens            T ids: the prompt and all that follows it, tools' answers too
            loss_mask             T times 1 (sampled) or 0
            logprobs              T floats, as sampled; 0.0 where the mask is 0
            weight_versions       T versions; -1 where the mask is 0
            prompt_token_length   ids before the first sampled one
            response_token_length ids from there on
            rewards               may be replaced before training: that is what is trained on
            truncated             whether a limit of tokens or turns ended it
        """
        trajectories = [t for group in outputs for t in group.trajectories]
        branches = [(t.branches() or [_NO_TURNS])[-1] for t in trajectories]
        prompts = [_prompt_length(branch) for branch in branches]
        decode = self.template.decode_all
        return {
            "groups": list(outputs),
            "trajectories": trajectories,
            "problem_ids": [t.problem_id for t in trajectories],
            "str_prompts": [
                decode(b.token_ids[:n]) for b, n in zip(branches, prompts, strict=True)
            ],
            "str_outputs": [t.final_text for t in trajectories],
            "all_tokens": [b.token_ids for b in branches],
            "loss_mask": [b.response_mask for b in branches],
            "logprobs": [b.logprobs for b in branches],
            "weight_versions": [b.weight_versions for b in branches],
            "prompt_token_length": prompts,
            "response_token_length": [
                len(b.token_ids) - n for b, n in zip(branches, prompts, strict=True)
            ],
            "rewards": [t.reward for t in trajectories],
            "truncated": [t.status != "completed" for t in trajectories],
        }

    def forward_step(self, data: Sequence[Problem], iteration: int = 0) -> Outputs:
        """Answer all items under `sampling`; returns what `decode_internal` makes of it.

        Args:
            iteration: The caller's count; for overrides.

        Raises:
            DeadlineError: when the answers did not come in time.
            StepError: when more than `rollout.max_failed_fraction` of the trajectories failed.
        """
        return self._forward(data, is_eval=False)

    def eval_forward(self, data: Sequence[Problem], iteration: int = 0) -> Outputs:
        """The same under `eval.sampling`."""
        return self._forward(data, is_eval=True)

    def _forward(self, data: Sequence[Problem], is_eval: bool) -> Outputs:
        groups = self.wait(self._add_request(data, is_eval=is_eval))
        check_failures(groups, self.config.rollout.max_failed_fraction, self.name)
        outputs = self.decode_internal(groups)
        if not isinstance(outputs, dict):
            raise InputError(f"{self.name}: decode_internal must return a dictionary")
        outputs.setdefault("groups", groups)  # what a pipeline trains on, however it was decoded
        return outputs

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


def _item(name: str, prompt: Any) -> Problem:
    if isinstance(prompt, Mapping):
        return Problem(name, dict(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(m, Mapping) and "role" in m for m in messages)
    ):
        raise InputError(
            f"{name}: a prompt is a text, a list of messages or a row, not {repr(prompt)[:80]}"
        )
    return ConversationProblem(name, {"messages": [dict(message) for message in messages]})


def _prompt_length(branch: Branch) -> int:
    return branch.response_mask.index(1) if 1 in branch.response_mask else len(branch.token_ids)
