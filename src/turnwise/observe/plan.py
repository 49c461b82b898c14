"""`turnwise plan`: memory of each device of a run, computed without loading weights.

A rank's memory is estimated by `training.memory`; the other figures are sums of sizes. The figures
leave out the context of a GPU's driver (about half a GiB) and fragmentation.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from turnwise.config import Config, apply_override, parse_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.gpus import gpu_share
from turnwise.config.serving import CPU_KV_CACHE_GIB
from turnwise.core.actor import CPU_SHARE
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import JsonObject
from turnwise.core.precision import precision
from turnwise.core.sources import check_model
from turnwise.errors import InputError
from turnwise.serving.engine_host import GPU_MEMORY
from turnwise.training.batching import micro_batch_tokens
from turnwise.training.loading import additional_models, dtype_of, learning_dtype, shared_roles
from turnwise.training.memory import GIB, activation_bytes, held_bytes, model_size
from turnwise.training.optimizer import PART, PART_BYTES
from turnwise.weights.transport import BUFFER_BYTES, CPU_BUFFER_BYTES

_PASSING = "activations and gathered layers"


class Machine(NamedTuple):
    """The devices of a run."""

    gpus: int  # number of GPUs in the cluster; 0: all processes share the memory of one machine
    device_bytes: int  # memory of a GPU, or of the machine

    @classmethod
    def here(cls) -> "Machine":
        if torch.cuda.is_available():
            return cls(torch.cuda.device_count(), torch.cuda.mem_get_info(0)[1])
        return cls(0, psutil.virtual_memory().total)


class Holding(NamedTuple):
    """Largest number of bytes that one process holds, by part."""

    parts: dict[str, int]
    lasting: frozenset[str]  # parts that stay between steps; other parts exist one at a time
    expected: dict[str, int]  # expected bytes of parts, where smaller than the maximum

    @property
    def between(self) -> int:
        return sum(self.parts[part] for part in self.lasting)

    @property
    def peak(self) -> int:
        return self._peak(self.parts)

    @property
    def expected_peak(self) -> int:
        return self._peak(self.parts | self.expected)

    def _peak(self, parts: dict[str, int]) -> int:
        return self.between + max((parts[part] for part in parts.keys() - self.lasting), default=0)


class Load(NamedTuple):
    """Bytes that one device holds at the same time."""

    device: str
    minimum: int  # bytes with micro-batches of a few tokens
    expected: int  # bytes with trajectories of `expected_length`
    bytes: int  # maximum: with full micro-batches of the longest sequences
    limit: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Resources that an actor asks Ray for."""

    who: str
    count: int
    cpus: float
    gpus: float
    resources: dict[str, float]


class Plan(NamedTuple):
    rank: Holding
    engine: Holding  # one device of an engine
    teachers: dict[str, Holding]  # one engine device of each teacher with engines
    cache_tokens: int  # tokens that an engine's KV cache holds
    contexts: float  # full contexts of model.max_length that the cache holds
    loads: list[Load]
    asks: list[Ask]

    def fits(self, figure: Literal["minimum", "expected", "bytes"] = "bytes") -> bool:
        """Return whether a figure of each device fits, and whether a full context fits in the KV
        cache."""
        each = ((getattr(load, figure), load.limit) for load in self.loads)
        return self.contexts >= 1 and all(size <= limit for size, limit in each)

    def to_json(self) -> JsonObject:
        """Return the plan as plain values; all sizes are in bytes."""
        holdings = {"rank": self.rank, "engine": self.engine, **self.teachers}
        return {
            "fits": self.fits(),
            "cache_tokens": self.cache_tokens,
            "contexts": self.contexts,
            "holdings": {
                name: {"parts": held.parts, "peak": held.peak, "expected_peak": held.expected_peak}
                for name, held in holdings.items()
            },
            "loads": [load._asdict() for load in self.loads],
            "actors": [asdict(ask) for ask in self.asks],
        }

    @property
    def excess(self) -> float:
        """Bytes that do not fit, plus the missing share of one full context in the KV cache."""
        over = sum(max(0, load.bytes - load.limit) for load in self.loads)
        return over + max(0.0, 1 - self.contexts)


def expected_length(config: Config, prompt_tokens: int | None = None) -> int:
    """Return the expected number of tokens of a trajectory: a prompt (None: a quarter of
    `model.max_length`) and one whole answer."""
    longest = config.model.max_length
    prompt = longest // 4 if prompt_tokens is None else prompt_tokens
    return min(longest, prompt + config.sampling.max_tokens)


def make_plan(config: Config, machine: Machine, prompt_tokens: int | None = None) -> Plan:
    config = config.changed({"model": {"dtype": precision(config.model, machine.gpus > 0)}})
    share = gpu_share(config, machine.gpus, training=True)
    engine, token_bytes = _engine(config, machine, share)
    rank = _rank(config, machine.gpus > 0, expected_length(config, prompt_tokens))
    taught = config.teacher_engines().items()
    teachers = {key: _engine(config.for_teacher(one), machine, share)[0] for key, one in taught}
    apart = sum(one.engines * config.engine.devices * teachers[key].peak for key, one in taught)
    training, limit = config.training, machine.device_bytes

    def load(device: str, ranks: int, beside: int) -> Load:
        figures = (rank.between, rank.expected_peak, rank.peak)
        minimum, expected, worst = (ranks * each + beside for each in figures)
        return Load(device, minimum, expected, worst, limit)

    if not machine.gpus:
        workers = config.serving.max_workers * config.engine.devices
        copies = 0
        if config.weights.delta:  # of trainer and workers; deltas in shared memory
            copies = 1 + workers + 2 * (config.weights.transport == "shm")
        beside = workers * engine.peak
        beside += copies * model_size(config.model).parameters * dtype_of(config.model).itemsize
        loads = [load("memory of the machine", training.ranks, beside + apart)]
    elif training.colocated:
        kept = {"params": ("weights", "other models"), "optimizer": ("optimizer",)}
        away = {p for kind in training.offload for p in kept[kind]} | {"gradients"}
        shared = apart if share < 1 else 0  # then only teachers share a GPU with a rank
        held = sum(rank.parts[p] for p in rank.lasting - away) + engine.peak + shared
        loads = [
            Load("GPU while engines run", held, held, held, limit),
            load("GPU while ranks train", 1, shared),
        ]
    elif share < 1:
        largest = max(engine.peak, *(each.peak for each in teachers.values()), 0)
        loads = [load("GPU of a rank and engines", 1, (round(1 / share) - 1) * largest)]
    else:
        loads = [load("GPU of an engine", 0, engine.peak), load("GPU of a rank", 1, 0)]
    if share == 1:
        loads += [load(f"GPU of {key}", 0, each.peak) for key, each in teachers.items()]
    tokens = engine.parts["KV cache"] // token_bytes
    asks = list(actors(config, share))
    return Plan(rank, engine, teachers, tokens, tokens / config.model.max_length, loads, asks)


def changes_that_fit(config: Config, machine: Machine) -> list[str] | None:
    """Return changes of the configuration with which a run fits; None if none were found."""
    tokens = micro_batch_tokens(config.training, machine.gpus > 0)
    shorter = [tokens >> halvings for halvings in range(1, tokens.bit_length() - 8)]
    wider = [size for size in (2, 4, 8) if size > config.engine.tensor_parallel_size]
    tried = (  # the mildest values first
        ("training.activation_checkpointing", ["2"]),
        ("training.activation_checkpointing", ["true"]),
        ("training.offload", ["[params, optimizer]"]),
        ("training.micro_batch_tokens", [str(each) for each in shorter]),
        ("model.lora.rank", ["16"]),
        ("engine.tensor_parallel_size", [str(each) for each in wider]),
    )
    changes: dict[str, str] = {}
    for key, values in tried:
        for text in values:
            tree = config.model_dump()
            apply_override(tree, f"{key}={text}")
            if key == "engine.tensor_parallel_size" and config.training.colocated:
                tree["serving"]["workers"] = max(1, config.training.ranks // int(text))
            try:  # a value may not be allowed, and such a layout may need more GPUs
                changed = parse_config(tree, optional=NEEDED_KEYS)
                plan, before = make_plan(changed, machine), make_plan(config, machine)
            except InputError:
                break
            if plan.excess >= before.excess:
                break  # the change does not help
            changes.pop(key, None)  # a milder value
            config, changes[key] = changed, text
            if plan.fits():
                return [f"{key}={text}" for key, text in changes.items()]
    return None


def _rank(config: Config, on_gpu: bool, length: int) -> Holding:
    training, model = config.training, config.model
    ranks, width = training.ranks, dtype_of(config.model).itemsize
    beside = additional_models(config.algorithm, config.teachers())
    roles = shared_roles(config.model, config.policies, beside)
    size = model_size(config.model, roles=roles)
    kept = learning_dtype(config.model, config.training).itemsize
    held = {
        part: all_ // ranks
        for part, all_ in held_bytes(config.model, training, config.policies, beside).items()
    }
    apart = not training.colocated or ranks > 1
    if config.weights.transport == "shm" and apart and not on_gpu:  # the first rank holds it
        held["shared memory"] = 2 * size.parameters * width // ranks
    fullest = max(micro_batch_tokens(training, on_gpu), model.max_length)
    sequences = config.rollout.prompts_per_step * config.sampling.n
    usual = math.ceil(sequences * length / training.updates_per_step / ranks)

    def activations(tokens: int, length: int) -> int:
        return activation_bytes(
            resolve_model(model.path),
            model.trust_remote_code,
            precision(model, on_gpu),
            ranks > 1 or kept < 4,
            math.ceil(tokens / training.context_parallel),
            math.ceil(length / training.context_parallel),
            training.activation_checkpointing,
            config.algorithm.entropy.has_bonus,
        )

    gathered = 0
    if ranks > 1:  # FSDP: two layers and the weights outside of layers, and their gradients
        gathered = (size.outside + 2 * size.largest_layer) * width
        if not roles:
            gathered += size.outside * width + size.largest_layer * (width + 4)
    # On a GPU, torch's AdamW computes on all parameters at once.
    step = held["gradients"] if on_gpu else 8 * size.largest_tensor // ranks
    if kept < 4:
        step = PART_BYTES * min(PART, size.largest_tensor // ranks)
    streamed = config.weights.transport in ("ipc", "collective")
    buffers = 2 * (BUFFER_BYTES if on_gpu else CPU_BUFFER_BYTES) if streamed else 0
    parts = {
        **held,
        _PASSING: activations(fullest, model.max_length) + gathered,
        "optimizer step": step,
        "weight update": size.largest_tensor * kept + buffers,
    }
    expected = activations(min(fullest, max(usual, length)), length) + gathered
    return Holding(parts, frozenset(held), {_PASSING: min(expected, parts[_PASSING])})


def _engine(config: Config, machine: Machine, share: float) -> tuple[Holding, int]:
    """Return the memory that each device of an engine needs, and the number of bytes of a token in
    the KV cache of that device."""
    check_model(config.model.path)
    shape: PretrainedConfig = AutoConfig.from_pretrained(
        resolve_model(config.model.path), trust_remote_code=config.model.trust_remote_code
    )
    text, engine, width = shape.get_text_config(), config.engine, dtype_of(config.model).itemsize
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    working = (
        engine.max_num_batched_tokens
        * width
        * (2 * inner // engine.tensor_parallel_size + 4 * text.hidden_size)
    )
    working = max(working, engine.max_num_seqs * text.vocab_size * 4 * 2)
    weights = model_size(config.model).parameters * width // engine.devices
    if engine.kv_cache_gib or not machine.gpus:
        cache = (engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    else:  # what vLLM would take
        part = float(engine.vllm_args.get("gpu_memory_utilization", GPU_MEMORY))
        allowed = part * machine.device_bytes * (1.0 if config.training.colocated else share)
        cache = max(0, allowed - weights - working)
    parts = {"weights": weights, "computation": working, "KV cache": int(cache)}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    layers = math.ceil(layers / engine.pipeline_parallel_size)
    if rank := getattr(text, "kv_lora_rank", None):  # multi-head latent attention
        numbers = rank + text.qk_rope_head_dim
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        heads = math.ceil(heads / engine.tensor_parallel_size)
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers = 2 * heads * size
    return Holding(parts, frozenset(parts), {}), int(layers * numbers * width)


def actors(config: Config, share: float) -> Iterator[Ask]:
    """Yield the resources that a run's actors request from Ray; each device gets a `share` of a
    GPU."""
    training, size = config.training, config.engine.devices
    yield Ask("trainer rank", training.ranks, CPU_SHARE, share, training.resources)
    fleets = {"": config}
    for key, teacher in config.teacher_engines().items():
        fleets[f" of {key}"] = config.for_teacher(teacher)
    for of, fleet in fleets.items():
        workers, resources = fleet.serving.min_workers, fleet.serving.resources
        if fleet.training.colocated:
            yield Ask("worker, its model in the ranks", workers, CPU_SHARE, 0, resources)
        elif fleet.serving.spread:
            yield Ask(f"device of a worker{of}", workers * size, CPU_SHARE, share, resources)
        else:
            yield Ask(f"worker{of}", workers, CPU_SHARE, share * size, resources)


def machine_of(gpus: int | None, gpu_memory: float | None) -> Machine:
    """Return the devices for a plan: this machine's, or as many GPUs of as much memory (in GiB).

    Raises:
        InputError: when one of the two is needed too.
    """
    here = Machine.here()
    count = here.gpus if gpus is None else gpus
    if gpu_memory is None and count and not here.gpus:
        raise InputError("this machine has no GPU: give the memory of one with --gpu-memory")
    if gpu_memory is not None and not count:
        raise InputError("--gpu-memory needs --gpus, the number of GPUs")
    size = here.device_bytes if gpu_memory is None else int(gpu_memory * GIB)
    return Machine(count, size)


def print_plan(config: Config, machine: Machine) -> None:
    """Print the plan of a run; if the run does not fit, also print changes with which it would
    fit."""
    plan = make_plan(config, machine)
    console = Console(highlight=False, width=None if Console().is_terminal else 100)
    console.print(_holding(f"one of {config.training.ranks} ranks of the trainer", plan.rank))
    what = "an engine" if config.engine.devices == 1 else "one device of an engine"
    console.print(_holding(f"{what} (serving.workers: {config.serving.workers})", plan.engine))
    for key, held in plan.teachers.items():
        console.print(_holding(f"{what} of {key}", held))
    console.print(
        f"The KV cache of an engine holds {plan.cache_tokens:,} tokens: {plan.contexts:.1f} times "
        f"model.max_length."
    )
    loads = Table("device", "expected (GiB)", "at the worst", "of", "")
    for load in plan.loads:
        likely = "likely fits" if load.expected <= load.limit else "too much"
        said = "fits" if load.bytes <= load.limit else likely
        loads.add_row(load.device, *map(_gib, (load.expected, load.bytes, load.limit)), said)
    asks = Table("Ray actors", "number", "each asks for")
    for ask in plan.asks:
        wanted = {"CPU": ask.cpus, **({"GPU": ask.gpus} if ask.gpus else {}), **ask.resources}
        text = ", ".join(f"{amount:.4g} {name}" for name, amount in wanted.items())
        asks.add_row(ask.who, str(ask.count), text)
    console.print(loads)
    console.print(asks)
    if plan.fits():
        console.print("It fits.", markup=False)
        return
    if plan.contexts < 1:
        said = "The KV cache does not hold one full context: lower model.max_length, or make room."
        console.print(said, markup=False)
    said = "It does not fit"
    if plan.fits("expected"):
        said = (
            "It fits as long as trajectories are about as long as expected "
            f"({expected_length(config):,} tokens: a prompt of a quarter of model.max_length and "
            "one whole answer); with full micro-batches it does not"
        )
    if (changes := changes_that_fit(config, machine)) is None:
        said += ", nor with any of the usual changes; use more or larger devices."
    else:
        quoted = [f'"{change}"' if " " in change else change for change in changes]
        said += f". It would with: {' '.join(quoted)}"
    console.print(said, markup=False)


def _holding(title: str, holding: Holding) -> Table:
    table = Table(title, "expected (GiB)", "at the worst", "")
    for part, size in holding.parts.items():
        if size:
            usual = holding.expected.get(part, size)
            often = "" if part in holding.lasting else "at times"
            table.add_row(part, _gib(usual), _gib(size), often)
    table.add_row("at the peak", _gib(holding.expected_peak), _gib(holding.peak), "")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
