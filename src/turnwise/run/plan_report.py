"""The tables of `turnwise plan`."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.observe.plan import (
    GIB,
    Holding,
    Machine,
    Plan,
    changes_that_fit,
    expected_length,
    make_plan,
)


def print_plan(config: Config, gpus: int | None, gpu_memory: float | None) -> None:
    """Print the plan of a run, and the changes with which it would fit if it does not.

    Args:
        gpus: Number of GPUs; None takes this machine's.
        gpu_memory: Memory of a GPU in GiB; None takes that of this machine's.

    Raises:
        InputError: when there are GPUs of an unknown size.
    """
    here = Machine.here()
    count = here.gpus if gpus is None else gpus
    if gpu_memory is None and count and not here.gpus:
        raise InputError("this machine has no GPU: give the memory of one with --gpu-memory")
    if gpu_memory is not None and not count:
        raise InputError("--gpu-memory needs --gpus, the number of GPUs")
    size = here.device_bytes if gpu_memory is None else int(gpu_memory * GIB)
    machine = Machine(count, size)
    plan = make_plan(config, machine)
    console = Console(highlight=False, width=None if Console().is_terminal else 100)
    console.print(_holding(f"one of {config.training.ranks} ranks of the trainer", plan.rank))
    what = "an engine" if config.engine.devices == 1 else "one device of an engine"
    console.print(_holding(f"{what} (serving.workers: {config.serving.workers})", plan.engine))
    console.print(
        f"The KV cache of an engine holds {plan.cache_tokens:,} tokens: {plan.contexts:.1f} times "
        f"model.max_length."
    )
    console.print(_loads(plan))
    console.print(_asks(plan))
    for line in _verdict(config, machine, plan):
        console.print(line, markup=False)


def _holding(title: str, holding: Holding) -> Table:
    table = Table(title, "expected (GiB)", "at the worst", "")
    for part, size in holding.parts.items():
        if size:
            usual = holding.expected.get(part, size)
            often = "" if part in holding.lasting else "at times"
            table.add_row(part, _gib(usual), _gib(size), often)
    table.add_row("at the peak", _gib(holding.expected_peak), _gib(holding.peak), "")
    return table


def _loads(plan: Plan) -> Table:
    table = Table("device", "expected (GiB)", "at the worst", "of", "")
    for load in plan.loads:
        likely = "likely fits" if load.expected <= load.limit else "too much"
        said = "fits" if load.fits else likely
        table.add_row(load.device, *map(_gib, (load.expected, load.bytes, load.limit)), said)
    return table


def _asks(plan: Plan) -> Table:
    table = Table("Ray actors", "number", "each asks for")
    for ask in plan.asks:
        wanted = {"CPU": ask.cpus, **({"GPU": ask.gpus} if ask.gpus else {}), **ask.resources}
        text = ", ".join(f"{amount:.4g} {name}" for name, amount in wanted.items())
        table.add_row(ask.who, str(ask.count), text)
    return table


def _verdict(config: Config, machine: Machine, plan: Plan) -> Iterable[str]:
    if plan.fits:
        yield "It fits."
        return
    if plan.contexts < 1:
        yield "The KV cache does not hold one full context: lower model.max_length, or make room."
    said = "It does not fit"
    if plan.likely_fits:
        said = (
            "It fits as long as trajectories are about as long as expected "
            f"({expected_length(config):,} tokens: a prompt of a quarter of model.max_length and "
            "one whole answer); with full micro-batches it does not"
        )
    changes = changes_that_fit(config, machine)
    if changes is None:
        yield f"{said}, nor with any of the usual changes; use more or larger devices."
        return
    yield f"{said}. It would with: {' '.join(_quoted(change) for change in changes)}"


def _quoted(change: str) -> str:
    return f'"{change}"' if " " in change else change


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
