"""`GRPOTrainer` with the arguments, attributes and methods of TRL's class; TRL is not imported."""

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from turnwise.compat.trl import inputs
from turnwise.compat.trl.config import GRPOConfig, lora_settings, settings
from turnwise.compat.trl.environment import TextLoop, TrlEnvironments, methods_of
from turnwise.compat.trl.logs import TrlNames
from turnwise.compat.trl.policy import Policy, lora_of
from turnwise.compat.trl.refusals import as_value_error, refuse_argument
from turnwise.config import Config, make_config
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.run import commands
from turnwise.run.api import run_command
from turnwise.run.commands import ProgramInputs, TrainingResult
from turnwise.tools import ToolFunction

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_WHY = {
    "callbacks": "the run is in processes of its own and calls none; trainer.state, and "
    "metrics.jsonl while it runs, have what they would see",
    "optimizers": "the optimizer is AdamW, with the rates and decays of the configuration",
    "quantization_config": "engines and trainer compute in bfloat16 or float32",
    "rollout_func": "an agent loop of your own, or an agent behind a URL, is the same: see "
    "rollout.loop and rollout.agent",
}
"""Reasons why arguments of TRL's class are refused."""


class TrainOutput(NamedTuple):
    """The result of `GRPOTrainer.train`, as in Transformers."""

    global_step: int
    training_loss: float
    """Mean loss over the training steps that have a loss."""
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainState:
    """The trainer's `state`: its progress, and a record for each training step and evaluation."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[JsonObject] = field(default_factory=list)
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


class GRPOTrainer:
    """Trains a model by GRPO with TRL's arguments; an argument without an equivalent is refused.

    Args:
        model: Folder or Hugging Face name, or a model of Transformers or PEFT, which is saved
            first.
        reward_funcs: A function with TRL's signature, a reward model or its path, or a list of
            these.
        args: Fields of TRL's configuration; None uses the defaults.
        train_dataset: Rows with a column `prompt`. Not needed if the environment has the data.
        eval_dataset: Held-out rows, or several sets by name.
        processing_class: Tokenizer or processor; None uses the model's tokenizer.
        reward_processing_classes: Tokenizers of the reward models, one entry for each reward
            function; None uses a model's own tokenizer.
        peft_config: PEFT's `LoraConfig`; if it is given, adapters are trained instead of the
            weights.
        tools: Functions that the model may call.
        environment_factory: A class or function without arguments, or a dictionary of such
            factories.

    Raises:
        InputError: when an argument cannot be used; the error names the argument, and is also a
            ValueError.

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

    aux_loss_enabled = False
    """False: there is no auxiliary loss that balances a mixture's experts."""
    accelerator = SimpleNamespace(
        is_main_process=True, is_local_main_process=True, is_last_process=True,
        process_index=0, local_process_index=0, num_processes=1, wait_for_everyone=lambda: None,
        print=partial(Console().print, markup=False, highlight=False),
    )  # fmt: skip
    """The part of accelerate's interface that scripts read, for a single process."""

    @as_value_error()
    def __init__(
        self,
        model: object,
        reward_funcs: inputs.RewardSource | Sequence[inputs.RewardSource] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: inputs.Rows | None = None,
        eval_dataset: inputs.HeldoutRows | None = None,
        processing_class: "PreTrainedTokenizerBase | None" = None,
        reward_processing_classes: object = None,
        callbacks: Sequence[object] | None = None,
        optimizers: tuple[object, object] = (None, None),
        quantization_config: object = None,
        peft_config: object = None,
        tools: Sequence[ToolFunction] | None = None,
        rollout_func: object = None,
        environment_factory: object = None,
    ) -> None:
        own_optimizer = any(one is not None for one in optimizers)
        _refuse_unsupported(callbacks, own_optimizer, quantization_config, rollout_func)
        self.args = _with_folder(args, model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        folder = self._folder = Path(str(self.args.output_dir)).resolve()
        self._environments = TrlEnvironments(environment_factory, tools or ())
        lora = lora_of(model, peft_config)
        asked = copy(self.args)  # before check_streams changes self.args, as TRL does
        inputs.check_streams(self.args, train_dataset, eval_dataset)
        rows = inputs.training_rows(train_dataset, environment_factory, self.args)
        self._rewards = rewards = inputs.TrlRewards(
            *(reward_funcs, self.args.reward_weights, reward_processing_classes),
            *(self._environments, folder),
        )
        # The last entries are for environments' classes with a `get_reward`.
        self.reward_funcs: list[Foreign] = rewards.sources
        self.reward_func_names: list[str] = rewards.names
        self.reward_processing_classes: list[Foreign] = rewards.tokenizers
        with_tools = bool(tools) or environment_factory is not None
        values = settings(asked, None if train_dataset is None else len(rows), tools=with_tools)
        values |= {
            "output_dir": str(folder.parent),
            "name": folder.name,
            "environment": inputs.environment_path(environment_factory),
            "rollout.rewards": rewards.parts,
            "rollout.loop": values.get("rollout.loop") or _loop_of(rows, with_tools),
            **inputs.saved_policy(model, processing_class, folder),
        }
        path, trust = str(values["model.path"]), bool(values["model.trust_remote_code"])
        if lora is not None:
            values |= lora_settings(lora, path, trust_remote_code=trust)
        values.setdefault("model.max_length", inputs.context_length(values, self.args))
        self.settings = values | self.args.turnwise
        """The run's configuration: values by Turnwise's dotted keys."""
        self._console = Console(quiet=bool(self.args.disable_tqdm))
        self._inputs = ProgramInputs(self._environments, rows, inputs.heldout_rows(eval_dataset))
        dtype = "float32" if self.args.bf16 else str(values["model.dtype"])
        self._policy = Policy(model, path, lora, dtype, trust)
        self._reference: Policy | None = None
        self._tokenizer = processing_class
        training = self._config.training
        self.state = TrainState(max_steps=training.steps * training.optimizer_steps)
        self._result: TrainingResult | None = None

    @property
    def _config(self) -> Config:
        return make_config({}, settings=self.settings, optional=["data.path"])

    @property
    def _checkpoint(self) -> Path | None:
        return None if self._result is None else self._result.checkpoint

    @property
    @as_value_error()
    def model(self) -> "PreTrainedModel":
        """A copy of the policy in this process, for reading. Before `train` it has the given
        weights, afterwards the trained weights. Sampling uses vLLM's engines and not this model."""
        return self._policy.model

    @property
    @as_value_error()
    def ref_model(self) -> "PreTrainedModel | None":
        """A copy of the reference model, for reading. After `train` it has the weights to which
        `sync_ref_model` moved the reference. None if there is no KL penalty, or if adapters are
        trained, because then the base model is the reference."""
        config = self._config
        if not config.algorithm.kl.coef or config.model.lora.rank:
            return None
        if self._reference is None:
            path = config.algorithm.kl.model.path or config.model.path
            trust = config.model.trust_remote_code
            self._reference = Policy(
                *(path, path, None, "float32"), trust, reference=True, checkpoint=self._checkpoint
            )
        return self._reference.model

    @property
    @as_value_error()
    def processing_class(self) -> "PreTrainedTokenizerBase":
        """The tokenizer."""
        if self._tokenizer is None:
            from turnwise.chat.template import load_tokenizer

            self._tokenizer = load_tokenizer(self._config.model)
        return self._tokenizer

    @property
    def tools(self) -> list[ToolFunction]:
        """The functions that the model may call, methods of environments included."""
        made = self._environments.first_instances()
        return [*self._environments.tools, *(tool for each in made for tool in methods_of(each))]

    @property
    def reward_weights(self) -> "torch.Tensor":
        """The weights of the reward functions in the sum."""
        import torch

        return torch.tensor(self._rewards.weights, dtype=torch.float32)

    @property
    def hub_model_id(self) -> str:
        """The name of the model on the Hugging Face Hub."""
        return self.args.hub_model_id or Path(str(self.args.output_dir)).name

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus; if it adapts, the value of the last step."""
        history = reversed(self.state.log_history)
        known = (entry["entropy_coef"] for entry in history if "entropy_coef" in entry)
        return float(next(known, self.args.entropy_coef))

    @property
    def _logs(self) -> JsonObject:
        """Under `extra`, the columns that reward functions logged with `log_extra` for the last
        batch of completions."""
        file, config = self._folder / "extra.jsonl", self._config
        last = config.rollout.prompts_per_step * config.sampling.n
        lines = file.read_text(encoding="utf-8").splitlines()[-last:] if file.is_file() else []
        columns: dict[str, list[object]] = {}
        for name, value in (each for line in lines for each in json.loads(line).items()):
            columns.setdefault(name, []).append(value)
        return {"extra": columns}

    @as_value_error()
    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, and write all results to the run folder `args.output_dir`.

        Args:
            resume_from_checkpoint: True, or the run folder, continues from its last checkpoint.
        """
        config, started = self._config, time.perf_counter()
        run: Path | None = None
        if resume := resume_from_checkpoint or self.args.resume_from_checkpoint:
            run = config.run_folder
            if resume is not True:
                run = Path(str(resume)).resolve()
                run = run.parent.parent if run.parent.name == "checkpoints" else run
            config = config.model_copy(update={"output_dir": str(run.parent), "name": run.name})
        work = partial(commands.train, config, self._console, run, self._inputs)
        self._result = result = run_command(work, "the training run")
        for kept in (self._policy, self._reference):
            if kept is not None:
                kept.refresh(self._checkpoint)
        trained = [record for record in result.metrics if record["step"]]
        losses = [record["loss"] for record in trained if record.get("loss") is not None]
        loss, seconds = sum(losses) / len(losses) if losses else 0.0, time.perf_counter() - started
        state, rows = self.state, len(self._inputs.rows or [None])
        state.log_history = history = TrlNames(config).log_history(result.metrics, rows)
        last = {name: history[-1][name] if history else 0 for name in ("epoch", "step")}
        state.global_step, state.epoch = last["step"], last["epoch"]
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": sum(r["trajectories"] for r in trained) / seconds,
            "train_steps_per_second": state.global_step / seconds,
            "train_loss": loss,
        }
        every, steps = self.args.logging_steps, [entry for entry in history if "reward" in entry]
        with_last = steps and (every < 1 or state.global_step % every)
        rest = steps[-1] if with_last else {}  # TRL's last record has the steps not logged before
        history.append({**rest, **metrics, **last})
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(state.global_step, loss, metrics)

    @as_value_error()
    def evaluate(
        self,
        eval_dataset: inputs.HeldoutRows | str | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate the trained model; before `train`, evaluate the given model.

        Args:
            eval_dataset: Held-out rows, several sets by name, or the name of a set of the trainer's
                own `eval_dataset`; None uses the whole `eval_dataset`.
            ignore_keys: Ignored.
            metric_key_prefix: First part of the results' names; with several sets, the name of the
                set follows it.

        Returns:
            Results under TRL's names, such as `eval_loss` and `eval_reward`, and under ours, such
            as `eval_accuracy`. The loss has no KL penalty.
        """
        given = self._heldout(eval_dataset)
        inputs.check_streams(self.args, None, given)
        changed = dict(self.settings)
        if self._checkpoint is not None:
            changed["model.path"] = str(self._checkpoint)
        config = make_config({}, settings=changed, optional=["data.path"])
        started, rows = time.perf_counter(), inputs.heldout_rows(given)
        work = partial(
            commands.evaluate, config, self._console, replace(self._inputs, eval_rows=rows)
        )
        evaluation = run_command(work, "the evaluation")
        seconds, trajectories = time.perf_counter() - started, list(evaluation.trajectories)
        results, sets = dict[str, float](), {"": evaluation.summary}
        if isinstance(rows, dict):
            sets = {of: evaluation.sets.get(of, {}) for of in rows}
        for of, summary in sets.items():
            # Problem ids begin with the name of their set: "NAME/eval_data:1".
            found = [t for t in trajectories if t.problem_id.rpartition("/")[0] == of]
            measured = {**TrlNames(config).of_evaluation(found), **summary, "runtime": seconds}
            prefix = f"{metric_key_prefix}_{of}" if of else metric_key_prefix
            results |= {f"{prefix}_{name}": float(value) for name, value in measured.items()}
        place = {"epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append({**results, **place})
        return results

    @as_value_error()
    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model or adapter, and the tokenizer; None means `args.output_dir`. Before
        `train`, the given weights are written, afterwards the trained weights."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = self._checkpoint
        if checkpoint is None:
            self.model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
            return
        for file in checkpoint.iterdir():
            if file.is_file():  # not the state to resume from
                shutil.copy2(file, folder / file.name)

    @as_value_error()
    def push_to_hub(self, commit_message: str = "End of training", **card: object) -> object:
        """Upload model and tokenizer to `hub_model_id` on the Hugging Face Hub with Transformers.

        Args:
            commit_message: The commit's message.
            **card: TRL's arguments for its model card; ignored.

        Returns:
            The commit, as `huggingface_hub` describes it.
        """
        if card:
            logger.warning("push_to_hub: without effect in Turnwise: %s", ", ".join(card))
        args = self.args
        where = {"token": args.hub_token, "private": args.hub_private_repo}
        where |= {"revision": args.hub_revision, "commit_message": commit_message}
        tokenizer: Foreign = self.processing_class
        tokenizer.push_to_hub(self.hub_model_id, **where)
        model: Foreign = self.model
        return model.push_to_hub(self.hub_model_id, **where)

    def _heldout(self, asked: inputs.HeldoutRows | str | None) -> Foreign:
        """Return the held-out rows that were asked for, or sets of them by name."""
        own: Foreign = self.eval_dataset
        if isinstance(asked, str):
            if not isinstance(own, Mapping) or asked not in own:
                raise InputError(f"GRPOTrainer: eval_dataset has no set {asked!r}")
            return {asked: own[asked]}
        if asked is None and own is None:
            raise InputError("GRPOTrainer: there is no eval_dataset")
        return own if asked is None else asked

    def get_train_dataloader(self) -> "DataLoader[object]":
        """Return the rows in batches of `rollout.prompts_per_step`, for scripts that inspect them.
        The run does not use this loader: it reads and repeats its rows itself."""
        return self._loader([] if self.train_dataset is None else self.train_dataset)

    @as_value_error()
    def get_eval_dataloader(
        self, eval_dataset: inputs.HeldoutRows | str | None = None
    ) -> "DataLoader[object]":
        """Return held-out rows in batches, like `get_train_dataloader`."""
        rows = self._heldout(eval_dataset)
        return self._loader(rows[eval_dataset] if isinstance(eval_dataset, str) else rows)

    def _loader(self, rows: Foreign) -> "DataLoader[object]":
        from torch.utils.data import DataLoader

        workers = 0 if inputs.is_stream(rows) else self.args.dataloader_num_workers
        groups = self._config.rollout.prompts_per_step
        return DataLoader(rows, batch_size=groups, num_workers=workers, collate_fn=list)

    def get_high_entropy_mask(
        self, entropies: "torch.Tensor", mask: "torch.Tensor", threshold: float
    ) -> "torch.Tensor":
        """Return which tokens of `mask` have an entropy of at least their quantile `threshold`:
        booleans, [B, T]. The run does not use this method: see `algorithm.entropy.top_quantile`."""
        from turnwise.training.algorithms.entropy import entropy_floor  # imports torch

        real_BT = mask.bool()
        return (entropies >= entropy_floor(entropies[real_BT], 1 - threshold)) & real_BT

    @staticmethod
    def get_off_policy_mask(
        advantages: "torch.Tensor",
        per_token_logps: "torch.Tensor",
        sampling_per_token_logps: "torch.Tensor",
        mask: "torch.Tensor",
        off_policy_threshold: float,
    ) -> "torch.Tensor":
        """Return 1 for sequences to train, and 0 for sequences that are too far off-policy: [B, 1].
        The run does not use this method: see `algorithm.off_policy_mask_threshold`."""
        drift_BT = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0)
        counts_B1 = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        drift_B1 = (drift_BT * mask).sum(dim=1, keepdim=True) / counts_B1
        kept = (advantages >= 0) | (drift_B1 <= off_policy_threshold)
        return kept.to(mask.dtype)

    def is_world_process_zero(self) -> bool:
        """Return True: a script is one process."""
        return True

    @as_value_error()
    def add_callback(self, callback: object) -> None:
        """Raise an `InputError`: callbacks are not supported."""
        refuse_argument("callbacks", _WHY["callbacks"])

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write results to the terminal, as Transformers does."""
        lines = [f"  {name} = {value}" for name, value in sorted(metrics.items())]
        self.accelerator.print("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write results to `{split}_results.json` in `args.output_dir`, as Transformers does."""
        self._write(f"{split}_results.json", dict(metrics))

    def save_state(self) -> None:
        """Write `state` to `trainer_state.json` in `args.output_dir`, as Transformers does."""
        self._write("trainer_state.json", asdict(self.state))

    def _write(self, name: str, values: JsonObject) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=2, sort_keys=True, default=str)
        (self._folder / name).write_text(text + "\n")


def _refuse_unsupported(*given: object) -> None:
    """Raise an error if an argument is set that `_WHY` contains, or if a launcher such as torchrun
    started several processes. `given` has the values of the arguments, in the order of `_WHY`."""
    for (name, why), value in zip(_WHY.items(), given, strict=True):
        if value:
            refuse_argument(name, why)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "start the script with python, not with torchrun or accelerate launch: the run starts "
            'its own processes, GRPOConfig(turnwise={"training.ranks": N}) of them'
        )


def _loop_of(rows: Sequence[JsonObject], with_tools: bool) -> str:
    """Return the agent loop.

    Without tools, an answer that looks like a tool call is a final answer. Prompts that are texts
    use a loop that does not apply the chat template.
    """
    if not isinstance(rows[0].get("prompt"), str):
        return "tool_calling" if with_tools else "single_turn"
    if with_tools:
        raise InputError("prompt must be a list of messages where there are tools")
    return f"{TextLoop.__module__}:{TextLoop.__name__}"


def _with_folder(args: GRPOConfig | None, model: object) -> GRPOConfig:
    """Return the configuration; a missing `output_dir` becomes TRL's default folder."""
    if args is not None and not isinstance(args, GRPOConfig):
        raise InputError(f"args must be turnwise.trl.GRPOConfig, not {type(args).__name__}")
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "model")
    if args is None:
        return GRPOConfig(output_dir=f"{Path(str(name)).name}-GRPO")
    args.output_dir = args.output_dir or "trainer_output"
    return args
