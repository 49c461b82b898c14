"""The sections `engine`, `serving` and `weights`."""

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from turnwise.config.aliases import has_no_effect
from turnwise.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Tree,
    built_in_or_path,
    satisfies,
)

TRANSPORT_NAMES = ("shm", "ipc", "collective", "disk")
"""Values of the key `weights.transport`; `TRANSPORTS` of weights/transport.py also has
`in_process`, which cannot be configured."""
CPU_KV_CACHE_GIB = 0.5  # default of `engine.kv_cache_gib` on a CPU


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
    return pattern


def _range(text: str) -> tuple[int, int] | None:
    """Return the numbers of FIRST-LAST; None if the text is not such a range of positive
    numbers."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        return None
    return int(match[1]), int(match[2])


def _is_port_range(ports: str) -> bool:
    ends = _range(ports or "1-1")
    return ends is not None and ends[1] < 65_536


def _number_or_range(workers: int | str) -> int | str:
    text = str(workers)
    if _range(f"{text}-{text}" if text.isdecimal() else text) is None:
        raise ValueError(f"{workers!r} is neither a number of workers nor a range such as 1-8")
    return int(text) if text.isdigit() else text


def _checked_vllm_args(own: Tree) -> Tree:
    """Leave out arguments without effect; check the one whose mistakes vLLM notices late."""
    memory = own.get("gpu_memory_utilization", 1.0)
    if not isinstance(memory, int | float) or not 0 < memory <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {memory!r}")
    return {key: value for key, value in own.items() if not has_no_effect(key, value)}


class EngineConfig(Section):
    """One engine: devices, memory, batches."""

    tensor_parallel_size: PositiveInt = 1
    """Number of devices that share each layer of an engine's model. On a CPU, each device is a
    process."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of groups of tensor_parallel_size devices, each with some of the layers; GPUs only,
    and untested."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for the KV cache in GiB; null uses 0.5 on a CPU and vLLM's default on a GPU."""
    max_num_seqs: PositiveInt = 256
    """Largest number of requests in one step of the engine."""
    max_num_batched_tokens: PositiveInt = 8192
    """Largest number of tokens in one step of the engine; longer prompts are computed in chunks."""
    prefix_caching: bool = True
    """Reuse the KV cache of shared prefixes."""
    images_per_prompt: NonNegativeInt = 16
    """Largest number of images in a prompt, for models that take images; 0 serves and trains such a
    model as a text-only model, without the memory that images need."""
    routing_replay: bool = False
    """Record the experts that computed each token of a mixture of experts, and train with the same
    choice (R3)."""
    threads: PositiveInt = 1
    """Number of CPU threads of the engine; more than one per core is slower."""
    logits_processors: list[str] = []
    """Logits processors for every request, each as package.module:name. A name refers to a callable
    (token_ids, logits) -> logits; to a class or function that makes such a callable, and gets the
    engine's tokenizer if it has a parameter `tokenizer`; or to a vLLM logits processor class, which
    runs before the callables. The engine's log-probs are computed after all processors, while the
    trainer's log-probs are computed without them. A token that a callable forces (attribute
    `forced`) is not trained."""
    logits_processors_allowed: Annotated[str, AfterValidator(_pattern)] | None = None
    """Regular expression for the names (package.module:function) that requests and `sampling` may
    list in `logits_processors`; it must match the whole name. Clients can call anything in a
    matched module with arguments of their choice: match only modules that contain nothing but
    processors. Null allows no processors."""
    metrics: bool | None = None
    """Collect vLLM's statistics, which /metrics reports as vllm:* with a worker label, and the time
    of each turn in the engine's queue, for a run's timeline; costs about 0.2 ms of processor time
    per request (`python -m benchmarks.serving --statistics`). Null collects them in
    `turnwise serve`, and with serving.worker_servers or metrics.port."""
    start_timeout: Seconds = 300.0
    """Deadline in seconds for starting an engine."""
    request_timeout: Seconds = 120.0
    """Deadline in seconds for a busy engine to sample the next token of any of its requests, and to
    answer a call. A single request may wait in the queue and take longer."""
    vllm_args: Annotated[Tree, AfterValidator(_checked_vllm_args)] = {}
    """Further arguments of vLLM's AsyncEngineArgs, such as {gpu_memory_utilization: 0.4}, or
    {worker_extension_cls: package.module.Class} for methods of your own in vLLM's workers, which
    collective_rpc calls."""

    @property
    def devices(self) -> int:
        """Number of devices of one engine, which equals its number of compute processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ServingConfig(Section):
    """The workers and the server in front of them."""

    workers: Annotated[int | str, AfterValidator(_number_or_range)] = 1
    """Number of engines, each in its own process; or a range such as 1-8. With a range, a run
    begins with the first number and adds engines, up to the second number, while the cluster has
    room, even on nodes that join during the run."""
    overload: Annotated[float, Field(ge=1)] = 1.5
    """Load of a worker, relative to the mean, at which sessions are moved away immediately; a
    lasting overload of 5 % moves them too."""
    known_sessions: PositiveInt = 65_536
    """Largest number of sessions and groups whose worker is remembered. Beyond it, the least
    recently used session is forgotten, and its next turn goes to the least loaded worker."""
    max_continuations: NonNegativeInt = 3
    """Largest number of times that a turn continues on another worker after its worker failed. A
    request that crashes two workers on its own is refused for ten minutes."""
    max_restarts: NonNegativeInt = 3
    """Number of consecutive times that a dead worker is restarted immediately; later attempts
    follow after one minute, then at growing intervals of up to ten minutes."""
    health_every: PositiveFloat = 2.0
    """Seconds between health checks of a worker."""
    health_timeout: Seconds = 20.0
    """Deadline in seconds for a health check; a worker that misses it is replaced."""
    host: str = "127.0.0.1"
    """Address that the OpenAI server listens on; with 0.0.0.0, base URLs use the node's
    address."""
    allowed_hosts: list[str] = []
    """Further host names by which clients may address the server, such as the name of a proxy in
    front of it. A request with any other `Host`, except the server's address and loopback names,
    gets status 421, because a web page could have pointed its own name at the server. "*" allows
    every name."""
    cors_origins: list[str] = []
    """Web sites, as scheme://host:port, whose pages may use the server and read its answers (CORS);
    "*" means all web sites. If the list is empty, browsers hide the answers from every page."""
    port: NonNegativeInt = 8000
    """Port of `turnwise serve`; 0 picks a free one. Servers for agents and workers always use a
    free port."""
    ports: (
        Annotated[str, satisfies(_is_port_range, "{!r} is no range of ports such as 40000-40999")]
        | None
    ) = None
    """Range of ports FIRST-LAST, such as 40000-40999, for everything else that listens: workers,
    their servers, agents' servers and session processes. Set it in networks that close other ports;
    null takes any free ports."""
    adapters: dict[str, str] = {}
    """LoRA adapters in PEFT's format to serve in addition to the model: for each name that requests
    may give as `model`, a folder or Hugging Face name. With adapters, a request for an unknown
    model is refused."""
    resources: dict[str, float] = {}
    """Ray resources of each worker in addition to its GPU, such as {engines: 1}."""
    spread: bool = False
    """Run each device of an engine in its own actor, so that one engine can span nodes."""
    worker_servers: bool = False
    """Serve each worker's engine separately too, on a free port of `host`."""
    session_processes: NonNegativeInt = 0
    """Number of processes that serve the sessions opened by `POST /sessions`, each on a free port
    of `host`. One process answers only a few hundred requests a second, however many engines there
    are. 0 serves the sessions in the process of `turnwise serve`. session_memory_mb applies to each
    process."""
    api_key: str | None = None
    """Key that clients must send as a bearer token; null uses the environment variable
    TURNWISE_API_KEY, if set. It is not written to the run folder."""
    served_model_name: str | None = None
    """Name that /v1/models lists; null lists both model.path and its last part. Requests
    may name any model."""
    max_body_mb: PositiveInt = 16
    """Largest body of a request in MB; a larger body is refused before it is read. For each MB a
    body may have 65,536 values, 4,096 keys, and 1,024 objects and lists."""
    session_idle: Seconds = 14_400.0
    """Seconds without a request after which a client's session is deleted."""
    session_memory_mb: PositiveInt = 512
    """Memory of all clients' sessions in MB; beyond it, the session that has been idle longest is
    deleted."""
    reasoning_parser: str | None = None
    """Reasoning format of the model: the name of a vLLM reasoning parser; null parses no
    reasoning."""

    @property
    def key(self) -> str | None:
        """Key that clients must send: `api_key`, or else TURNWISE_API_KEY; None without a key."""
        return self.api_key or os.environ.get("TURNWISE_API_KEY") or None  # it may be empty

    @property
    def min_workers(self) -> int:
        """Number of workers that a run begins with."""
        return int(str(self.workers).partition("-")[0])

    @property
    def max_workers(self) -> int:
        """Largest number of workers, if the cluster has room for them."""
        return int(str(self.workers).rpartition("-")[2])


class WeightsConfig(Section):
    """Weight updates from the trainer to the engines."""

    update_timeout: Seconds = 120.0
    """Deadline in seconds for one update, including the wait of in_flight drain and the check of
    the new weights, which gets at least a quarter of this time."""
    transport: Annotated[str, built_in_or_path("transport", TRANSPORT_NAMES)] = "shm"
    """Transport of the weights: shared memory on one host (shm); chunks on one host, or in the
    memory of one GPU (ipc); broadcasts between hosts, over gloo or NCCL (collective); safetensors
    files in a folder that all hosts can read (disk); or package.module:Class, your own
    Transport."""
    lora: Literal["merged", "adapter"] = "merged"
    """Form in which weights trained with model.lora reach the engines: added to the model's own
    weights, so that engines compute at full speed (merged); or as an adapter, which engines hold
    next to the adapters of earlier versions, so that updates pause no turn (adapter)."""
    folder: str | None = None
    """Folder for transport disk, in which each run has a subfolder of its own until it ends; null
    uses `weights` in the run folder."""
    delta: bool = False
    """Send only the values that changed since the last update (transport shm, collective or disk);
    trainer and engines each keep a copy of the weights in the host's memory. Use it with
    model.dtype bfloat16 and slow networks: in float32 all values change, and on one host it saves
    no time."""
    in_flight: Literal["drain", "abort", "keep", "keep_cache"] = "keep"
    """Treatment of turns in flight during an update: finish them first (drain); abort them and
    continue them under the new weights (abort); or pause them, and then recompute their cache
    (keep) or continue with the cache of the old weights (keep_cache). With weights.lora adapter,
    all values except abort let turns continue with the adapter that they began with."""
    canary_tolerance: PositiveFloat | None = None
    """Largest log-prob difference between engine and trainer on the canary, a fixed prompt that
    engines score after each update; null uses 0.001 in float32 and 0.5 in bfloat16."""
