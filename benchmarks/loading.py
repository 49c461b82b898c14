"""Host memory of sharded ranks: `python -m benchmarks.loading [--quick]`.

Four ranks, each a process, share a random model of 430 MB in float32 over gloo. Each reads its
shard from the model's files, publishes the weights (transport `disk`, which gathers whole tensors
one by one), and exports the model. The figure of each phase is the rise of a process's resident
set, at its peak, above its size before the model was loaded, divided by the size of a shard; the
highest rank counts. The counterpart is Transformers' `from_pretrained` in one process, which each
rank would otherwise need before it keeps only its shard.
"""

import multiprocessing
import re
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not export it
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import Claim, parser, report
from examples.calculator.tokenizer import build_tokenizer
from turnwise.config import Config, parse_config

RANKS = 4
LAYERS, QUICK_LAYERS = 20, 2
GOALS = {"load": 1.5, "publish": 1.5, "export": 1.5}
"""Maximum peak of each phase, in shards: at most one whole tensor is gathered at a time."""
SECONDS = 300.0


def make_model(layers: int, folder: Path) -> Path:
    """Save a random Qwen3 whose largest tensor is a small part of the model."""
    tokenizer = build_tokenizer(0)
    shape = Qwen3Config(
        vocab_size=8192,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=layers,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(path: Path, folder: Path) -> Config:
    return parse_config(
        {
            "environment": "examples.calculator.environment:Calculator",
            "model": {"path": str(path)},
            "data": {"path": "unused.jsonl"},
            "training": {"ranks": RANKS, "threads": 1},
            "output_dir": str(folder),
        }
    )


def peak_of(step: Callable[[], object], base: int) -> int:
    """Return the bytes by which this process's peak memory exceeds `base` during a step."""
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return resident("VmHWM") - base


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def rank(number: int, path: Path, folder: Path, reply: Connection) -> None:
    """Run one rank; send the peak of each phase, and the bytes of the shard."""
    from turnwise.training.export import export_model
    from turnwise.training.loading import distribute, load_model, path_of
    from turnwise.training.model import Scorer
    from turnwise.training.shards import full_tensors, tensor_shapes
    from turnwise.weights.transport import make_sender

    torch.set_num_threads(1)
    store = FileStore(str(folder / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    dist.barrier()  # gloo's own buffers
    config = configuration(path, folder)
    base = resident("VmRSS")
    held: list[Any] = []

    def load() -> None:
        scorer = Scorer(load_model(config.model, config.training), config.sampling, torch.float32)
        held.append(distribute(scorer, torch.device("cpu"), path_of(config.model)).model)

    def publish() -> None:
        sender = make_sender("disk", tensor_shapes(held[0]), rank=number, folder=folder / "weights")
        sender.publish(1, full_tensors(held[0]))

    def write() -> None:
        export_model(folder / "export", number, config.model, held[0])

    peaks = {}
    for name, step in zip(GOALS, (load, publish, write), strict=True):
        peaks[name] = peak_of(step, base)
        dist.barrier()
    shard = sum(p.to_local().nbytes for p in held[0].parameters())
    reply.send((peaks, shard))
    dist.destroy_process_group()


def whole(path: Path, reply: Connection) -> None:
    """Load the whole model, as each rank would without shards."""
    base = resident("VmRSS")

    def load() -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        reply.send(sum(float(p.detach().sum()) for p in model.parameters()))  # read every page

    reply.send(peak_of(load, base))


def in_processes(tasks: list[Any]) -> list[list[Any]]:
    """Run functions, each in a process of its own; return the list of objects that each sent."""
    context = multiprocessing.get_context("spawn")
    started = []
    for function, *arguments in tasks:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(*arguments, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    replies: list[list[Any]] = []
    for process, ours in started:
        sent = []
        while ours.poll(SECONDS):
            try:
                sent.append(ours.recv())
            except EOFError:
                break
        process.join(SECONDS)
        if process.exitcode != 0:
            raise RuntimeError(f"{process.name} ended with {process.exitcode}")
        replies.append(sent)
    return replies


def main() -> None:
    options = parser("loading", __doc__).parse_args()
    claims = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = make_model(QUICK_LAYERS if options.quick else LAYERS, folder / "model")
        ranks = [
            reply[-1] for reply in in_processes([(rank, n, path, folder) for n in range(RANKS)])
        ]
        [[_, alone]] = in_processes([(whole, path)])
        shard = max(shard for _, shard in ranks)
        print(f"shard of a rank: {shard / 1e6:.0f} MB; whole model: {RANKS * shard / 1e6:.0f} MB")
        for phase in GOALS:
            ratios = [max(peaks[phase] for peaks, _ in ranks) / shard]
            claims.append(
                Claim(
                    f"peak memory of a rank: {phase}",
                    "shards",
                    ratios,
                    "from_pretrained" if phase == "load" else "",
                    [alone / shard] if phase == "load" else [],
                    at_most=None if options.quick else GOALS[phase],
                )
            )
    report(claims, options)


if __name__ == "__main__":
    main()
