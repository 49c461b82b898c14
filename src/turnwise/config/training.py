"""The sections `training`, `trajectories`, `metrics` and `alarms`."""

from collections.abc import Iterator
from typing import Literal

from turnwise.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)


class TrainingConfig(Section):
    """Training steps, ranks, optimizer and checkpoints."""

    steps: PositiveInt = 100
    """Number of training steps; each consumes rollout.prompts_per_step groups."""
    max_staleness: NonNegativeInt = 0
    """Largest number of steps that rollouts may run ahead of the trainer; 0 is synchronous."""
    stale_policy: Literal["mask", "drop"] = "mask"
    """Treatment of tokens older than max_staleness: exclude them from the loss (mask), or drop
    their whole group (drop)."""
    ranks: PositiveInt = 1
    """Number of training processes, over which the model is sharded."""
    context_parallel: PositiveInt = 1
    """Number of ranks that share each sequence, for sequences longer than one device holds. It must
    divide training.ranks and the model's number of attention heads."""
    colocated: bool = False
    """Run the engines in the trainer's processes, where engines and trainer take turns.
    serving.workers * engine.tensor_parallel_size must equal training.ranks."""
    offload: list[Literal["params", "optimizer"]] = []
    """Parts of a colocated trainer to offload while the engines run: params (including those of the
    reference and value models) and optimizer (its moments). They move to host memory, or to
    disk on a CPU."""
    resources: dict[str, float] = {}
    """Ray resources of each rank in addition to its GPU, such as {trainers: 1}."""
    activation_checkpointing: bool | PositiveInt = False
    """Decoder layers that recompute their activations in the backward pass instead of storing them:
    all (true), none (false), or every N-th (a number N)."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trained weights: float32 (master weights); or bfloat16, which takes half the
    memory and rounds updates stochastically, so that small steps count on average. bfloat16 needs
    model.dtype bfloat16."""
    packing: Literal["auto", "packed", "padded", "shared"] = "auto"
    """Layout of micro-batches: one row of concatenated sequences (packed); one such row in which
    sequences with a common prefix, such as the sequences of a group, compute this prefix once
    (shared); or rows of similar length with padding (padded). For each optimizer step, auto takes
    the layout with the lowest cost of tokens and attention among the layouts that do not change the
    model's log-probs. The other values are refused if they would change the log-probs."""
    attention: str = "auto"
    """Attention of the trainer's models: torch's own, for each sequence of a packed row (auto); or
    a Transformers `attn_implementation` that computes a packed row at once on a GPU:
    flash_attention_2 (with the package flash-attn) or flex_attention."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer steps in one pass over a training step's samples, each on an equal share
    of them."""
    epochs_per_step: PositiveInt = 1
    """Number of passes over a training step's samples (PPO's epochs, GRPO's mu), each with
    updates_per_step optimizer steps on the same shares. Each update computes new importance ratios;
    the log-probs in their denominators, and the advantages, stay as they were before the step."""
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """Optimizer of all trained weights: AdamW (adamw); Muon for the matrices of the layers and
    AdamW for embeddings, heads and vectors, at AdamW's rates (muon); or torchao's AdamW with
    moments of 8 bits (adamw_8bit, extra torchao)."""
    learning_rate: PositiveFloat | None = None
    """The optimizer's learning rate after warm-up. null is 1e-6 for all weights and 1e-5 for
    adapters (model.lora.rank); in `turnwise sft`, ten times as much. The run prints the value."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps over which the learning rate rises linearly."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decay that reaches 0 after the last step, along a
    line (linear) or half a cosine wave (cosine). Only updates of the policy count: warm-up steps of
    the value model and steps that train nothing do not. If a program's own loop continues after
    training.steps, it keeps the rate of the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases do not decay, as in Transformers."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest number of tokens, padding included, in one forward and backward pass of a rank, or of
    the ranks that share sequences, unless one sequence is longer. A sequence that reads a shared
    prefix also counts with a twelfth of its length. null is 16384 on a GPU, and 2048 on a CPU."""
    threads: NonNegativeInt = 0
    """Number of CPU threads of each rank; 0 uses one per core."""
    step_timeout: Seconds = 1800.0
    """Deadline in seconds for one call to the trainer, such as a training step."""
    checkpoint_every: NonNegativeInt = 0
    """Number of steps between checkpoints, in addition to checkpoint_minutes and the last step; 0
    adds no checkpoints."""
    checkpoint_minutes: NonNegativeFloat = 30.0
    """Once this many minutes have passed since the last checkpoint, the next step that finishes is
    saved; 0 saves no checkpoint for this reason. Ctrl-C and SIGTERM also save the last step, if it
    can be written in 60 seconds."""
    keep_last: PositiveInt = 2
    """Number of latest checkpoints to keep, in addition to the best on held-out rows."""
    restarts: NonNegativeInt = 3
    """Number of automatic restarts from the last checkpoint after the trainer dies."""
    max_skipped: PositiveInt = 3
    """Number of consecutive updates with a non-finite loss or gradient after which the run ends;
    each such update is skipped."""

    @property
    def steps_of_group(self) -> int:
        """Number of steps that may train a group: the first step after the group begins, and
        `max_staleness` further steps."""
        return 1 + self.max_staleness

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of a policy per training step, in all passes."""
        return self.updates_per_step * self.epochs_per_step

    def mistakes(self) -> Iterator[str]:
        if self.optimizer != "adamw" and self.weights_dtype == "bfloat16":
            yield (
                f"optimizer {self.optimizer} rounds to the nearest value, which loses small steps "
                "of weights in bfloat16: set weights_dtype to float32, or optimizer to adamw"
            )


class TrajectoriesConfig(Section):
    """Files of what was sampled and trained: `trajectories/` and `training/` of the run folder."""

    keep: PositiveInt | None = None
    """Number of latest steps, and of latest evaluations, whose files and images are kept; null
    keeps all."""


class MetricsConfig(Section):
    """Prometheus metrics of a training run."""

    port: NonNegativeInt | None = None
    """Port on serving.host at which a training run serves /metrics for Prometheus, with vLLM's
    metrics (engine.metrics); 0 picks a free port, which the log names. Null serves no metrics."""


class AlarmsConfig(Section):
    """Thresholds of a run's alarms. null disables an alarm; 0 disables `flat_steps`."""

    steps: PositiveInt = 3
    """Number of consecutive steps that must all pass a threshold before its alarm."""
    no_signal: Fraction | None = 0.5
    """Largest share of groups whose advantages are all 0."""
    truncated: Fraction | None = 0.25
    """Largest share of trajectories that end at their maximum length."""
    tool_errors: Fraction | None = 0.33
    """Largest share of tool calls that fail."""
    dropped: Fraction | None = 0.1
    """Largest share of trajectories that are dropped after a failure."""
    logprob_growth: PositiveFloat | None = 5.0
    """Largest growth of logprob_diff_mean, as a multiple of its mean over the first steps."""
    entropy_left: Fraction | None = 0.1
    """Minimum entropy, as a share of its mean over the first steps."""
    reward_left: Fraction | None = 0.5
    """Minimum mean reward of a step, as a share of the highest mean reward over alarms.steps
    steps."""
    flat_steps: NonNegativeInt = 100
    """Number of steps over which the mean reward must rise."""
    idle: Fraction | None = 0.8
    """Largest share of a step in which the trainer waits for rollouts."""
    slow_worker: Fraction | None = 0.5
    """Minimum speed of a worker (worker_tokens_per_s), as a share of the median speed of the other
    workers."""
    stale: Fraction | None = 0.5
    """Largest share of trained tokens whose staleness is training.max_staleness."""
