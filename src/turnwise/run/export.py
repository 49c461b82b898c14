"""Export of a run's model, or of its adapter, as files that other programs load."""

import shutil
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from turnwise.config.data import ADAPTER_CONFIG
from turnwise.errors import InputError
from turnwise.run.commands import config_of_run
from turnwise.training import checkpoint
from turnwise.training.export import merge_adapter


def export_run(run: Path, output: Path | None = None, *, merged: bool = False) -> Path:
    """Write what a run has trained to a folder: the model, or with LoRA the adapter.

    Args:
        run: A run's folder, for its last whole checkpoint; or the folder of a checkpoint.
        output: Folder to write, which must not exist; None is `export`, or `merged`, in the run's.
        merged: Add the adapter to the model that it belongs to; changes nothing without LoRA.

    Returns:
        The folder written.

    Raises:
        InputError: when there is no checkpoint, or the output exists.
    """
    chosen = run
    if (run / "state").is_dir():
        run = run.resolve().parents[1]
        if why := checkpoint.incomplete_reason(chosen):
            raise InputError(f"{chosen} is no whole checkpoint: {why}")
    config = config_of_run(run)
    if chosen == run:
        chosen, _ = checkpoint.newest_whole(checkpoint.checkpoints_of(run))
    output = output or run / ("merged" if merged else "export")
    if output.exists():
        raise InputError(f"{output} exists: name another folder with --output")
    disable_progress_bar()
    if merged and (chosen / ADAPTER_CONFIG).exists():
        merge_adapter(chosen, output, config)
        return output
    with checkpoint.translate_disk_full(output):
        shutil.copytree(chosen, output, ignore=shutil.ignore_patterns("state"))
    return output
