"""The sections `metrics` and `alarms`: what a run shows to Prometheus, and when it says that
something is going wrong."""

from turnwise.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class MetricsConfig(Section):
    """Prometheus metrics of a training run.

    Example:
        MetricsConfig(port=9400)
    """

    port: NonNegativeInt | None = None
    """Port on serving.host at which a training run serves /metrics for Prometheus, with vLLM's
    metrics (engine.metrics); 0 picks a free one, which the log names. Null serves none."""


class AlarmsConfig(Section):
    """Thresholds of the alarms of a training run; null, or 0 for a number of steps, disables one.

    Example:
        AlarmsConfig(truncated=0.5, flat_steps=0)
    """

    steps: PositiveInt = 3
    """Number of consecutive steps that must all pass a threshold."""
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
    """Smallest entropy, as a share of its mean over the first steps."""
    reward_left: Fraction | None = 0.5
    """Smallest mean reward, as a share of its highest mean over as many steps."""
    flat_steps: NonNegativeInt = 100
    """Number of steps over which the mean reward must rise."""
    idle: Fraction | None = 0.8
    """Largest share of a step in which the trainer waits for rollouts."""
    slow_worker: Fraction | None = 0.5
    """Smallest speed of a worker (worker_tokens_per_s), as a share of the others' median."""
    stale: Fraction | None = 0.5
    """Largest share of trained tokens whose staleness is training.max_staleness."""
