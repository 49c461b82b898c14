"""The section `metrics`: Prometheus metrics of a training run."""

from turnwise.config.base import NonNegativeInt, Section


class MetricsConfig(Section):
    """Prometheus metrics of a training run.

    Example:
        MetricsConfig(port=9400)
    """

    port: NonNegativeInt | None = None
    """Port on serving.host at which a training run serves /metrics for Prometheus, with vLLM's
    metrics (engine.metrics); 0 picks a free one, which the log names. Null serves none."""
