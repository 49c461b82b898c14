"""The division of a cluster's GPUs among engines and ranks of the trainer."""

from turnwise.config.schema import Config
from turnwise.errors import InputError


def gpu_share(config: Config, gpus: float, training: bool) -> float:
    """Return the share of a GPU for each device of an engine and each rank of the trainer.

    The share is 1, or less if there are fewer GPUs than devices and ranks.
    """
    takers, said, also = config.serving.min_workers * config.engine.devices, "", ""
    for key, teacher in (config.teacher_engines() if training else {}).items():
        takers += teacher.engines * config.engine.devices
        said += f", {teacher.engines * config.engine.devices} of them of {key}"
        also += f" or {key}.engines"
    if training and not config.training.colocated:
        takers += config.training.ranks
    share = min(1.0, gpus / takers)
    together = max(config.engine.devices, config.training.ranks if training else 1)
    if 0 < share < 1 and together > 1:
        raise InputError(
            f"there are {gpus:g} GPUs for {takers} devices of engines and ranks of the trainer"
            f"{said}: ranks that train together, and devices of one engine, need a GPU each (lower "
            f"training.ranks, engine.tensor_parallel_size or serving.workers{also}, or set "
            "training.colocated)"
        )
    return share
