"""The sizes in a pipeline's file: `runtime` counts samples, and `num_gpu` devices."""

from pathlib import Path

from turnwise.compat.chatlearn.pipeline_keys import SIZES
from turnwise.compat.chatlearn.yaml_file import Settings
from turnwise.config import Config
from turnwise.config.base import Tree
from turnwise.errors import InputError


def batch_sizes(path: Path, runtime: Tree, config: Config) -> Settings:
    """Return the settings for the sizes of an episode and of batches, which count samples.

    Args:
        path: The pipeline's file, for errors.
        config: The configuration without them.

    Raises:
        InputError: when a size is no positive number, or no multiple of what it has to contain.
    """
    sizes = {name: runtime[name] for name in SIZES if runtime.get(name) is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"{path}: runtime.{name} must be a whole number of 1 or more, not {value!r}"
            )
    made: Settings = {}
    group, total = config.sampling.n, sizes.get("sample_per_episode")
    where = f"{path}: runtime.sample_per_episode"
    if total is not None:
        what = f"sampling.n {group}, the samples of a prompt"
        made["rollout.prompts_per_step"] = _quotient(where, total, group, what)
    batch = sizes.get("train_global_batch_size")
    if batch is not None:
        total = total or config.rollout.prompts_per_step * group
        what = f"train_global_batch_size {batch}"
        updates = 1 if batch >= total else _quotient(where, total, batch, what)
        made["training.updates_per_step"] = updates
    if "train_micro_batch_size" in sizes:
        made["training.micro_batch_tokens"] = (
            sizes["train_micro_batch_size"] * config.model.max_length
        )
    return made


def worker_count(path: Path, devices: int, engine: Tree) -> int:
    """Return the number of engines on the policy's `num_gpu` devices.

    Args:
        path: The pipeline's file, for errors.
        engine: The section `engine`, of which the sizes of parallel groups are read.

    Raises:
        InputError: when an engine's devices do not divide them.
    """
    each = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = engine.get(name, 1)
        each *= size if isinstance(size, int) and size > 0 else 1  # others are an error elsewhere
    what = f"the {each} devices of an engine (engine.tensor_parallel_size * pipeline_parallel_size)"
    return _quotient(f"{path}: models.policy.num_gpu", devices, each, what)


def _quotient(where: str, total: int, part: int, what: str) -> int:
    if not isinstance(total, int):
        raise InputError(f"{where} must be a whole number, not {total!r}")
    if total % part:
        raise InputError(f"{where} {total} is no multiple of {what}")
    return total // part
