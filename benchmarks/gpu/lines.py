"""The lines of the table: what each shows, which packages it needs, and its deadline.

This module imports neither torch nor Turnwise, so that the table can be printed without them.
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal

TRAINING = ("torch", "transformers", "safetensors", "psutil", "pydantic", "yaml")
"""Packages that the training plane needs."""
WEIGHTS = ("torch",)
"""Packages that every transport needs."""
VLLM = (*TRAINING, "zmq", "vllm", "fastapi")
RUN = (*VLLM, "ray", "cloudpickle", "jsonschema_rs")

Status = Literal["pass", "fail", "not run", "never run"]


@dataclass(frozen=True)
class Line:
    """A check in a process of its own. It yields one figure for each of its rows, in order."""

    name: str
    rows: tuple[str, ...]
    check: str
    """The function, as `module:function`; a module without a package is one of this folder."""
    needs: tuple[str, ...]
    seconds: float = 90.0
    """Deadline, from the start of its process."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that are set before torch is imported."""
    light: bool = False
    """Whether a CPU runs it within a second, imports not counted."""

    def missing(self) -> str:
        """Return the first package that is not installed, or ""."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), "")


@dataclass
class Row:
    """One line of the table."""

    line: str
    shows: str
    status: Status
    figure: str
    """The measured values; the reason where it failed or was not run."""
    seconds: float


FACTS = Line("facts", ("the device, as JSON",), "device:facts", ("torch",))
LINES = (
    Line("device", ("matrix product in bf16, memory of the device",), "device:device", ("torch",)),
    Line("step", ("training step, bf16, packed",), "training:step", TRAINING),
    Line("bare", ("the same against a bare PyTorch loop",), "training:bare", TRAINING),
    Line("fsdp2", ("the same with FSDP2, in a group of one",), "training:fsdp2", TRAINING),
    Line(
        "packing",
        ("log-probs, packed and shared against padded, float32",),
        "training:packing",
        TRAINING,
    ),
    Line("precision", ("log-probs, bf16 against float32",), "training:precision", TRAINING),
    Line("rounding", ("weights kept in bf16, stochastic rounding",), "training:rounding", TRAINING),
    Line(
        "attention",
        ("FlexAttention, FlashAttention if installed, against torch's",),
        "training:attention",
        TRAINING,
        150.0,
    ),
    Line("lora", ("LoRA of rank 16, bf16",), "training:lora", (*TRAINING, "peft")),
    Line(
        "routing",
        ("routing replay of a mixture of experts, float32",),
        "larger:routing",
        TRAINING,
        150.0,
    ),
    Line("context", ("sequences shared by two ranks",), "larger:context", TRAINING, 150.0),
    Line(
        "checkpointing",
        ("activation checkpointing: same gradient, less memory",),
        "training:checkpointing",
        TRAINING,
    ),
    Line("chunks", ("loss in chunks of the vocabulary's logits",), "training:chunks", TRAINING),
    Line("offload", ("offload gives memory back",), "training:offload", TRAINING),
    Line(
        "deterministic",
        ("two deterministic runs, bit for bit", "and one that resumes from a checkpoint"),
        "training:deterministic",
        TRAINING,
        150.0,
        environment=(("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),),  # as in the trainer's processes
    ),
    Line(
        "algorithms",
        ("gradients of each algorithm, against the CPU's",),
        "training:algorithms",
        TRAINING,
    ),
    Line("shm", ("weights by shm, two processes",), "transfer:shm", WEIGHTS, light=True),
    Line(
        "disk",
        ("weights by disk, two processes",),
        "transfer:disk",
        (*WEIGHTS, "safetensors"),
        light=True,
    ),
    Line(
        "ipc",
        ("weights by CUDA IPC, two processes",),
        "transfer:ipc",
        (*WEIGHTS, "zmq"),
        light=True,
    ),
    Line(
        "expandable",
        ("the same with expandable_segments",),
        "transfer:ipc",
        (*WEIGHTS, "zmq"),
        environment=(
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
            ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ),
        light=True,
    ),
    Line(
        "collective",
        ("weights by NCCL, a group of one", "weights by NCCL, two processes"),
        "transfer:collective",
        WEIGHTS,
        light=True,
    ),
    Line("in_process", ("weights in one process",), "transfer:in_process", WEIGHTS, light=True),
    Line(
        "engine",
        (
            "vLLM engine, bf16",
            "its log-probs against the trainer's, bf16",
            "weight update of the engine by CUDA IPC",
            "weight update of the engine by disk",
            "sleep gives memory back",
            "OpenAI-compatible server",
        ),
        "engines:engine",
        VLLM,
        240.0,
    ),
    Line("apart", ("run of two steps, engine apart",), "engines:apart", RUN, 180.0),
    Line("colocated", ("run of two steps, colocated",), "engines:colocated", RUN, 180.0),
)
"""All lines, in the order of the table."""
