"""What is made once, at the sizes that exist: `python -m benchmarks.sizes [--quick]`.

A run makes some things once for each tokenizer, data set, toolbox, model, trajectory or fleet. Each
is made here at three sizes, the largest of which exist (300k ids, 7,000 added tokens, 200 tools of
20 KB, a million rows, 100 layers, 512 experts, a history of 128k tokens, 4,096 engines), in a
process of its own. The table has the seconds, the rise of the resident memory at its peak, and the
exponent: the log of the ratio of the seconds at the largest size and at the smallest that takes 50
ms, by the log of the ratio of these sizes.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from benchmarks.loading import peak_of, resident
from benchmarks.report import Claim, parser, report
from tests.simulated import SimulatedEngine
from turnwise.chat.template import load_template, read_tokenizer
from turnwise.config import Config, RolloutConfig, ServingConfig, load_config
from turnwise.engine.protocol import Request, Route, generate
from turnwise.observe.plan import Machine, make_plan
from turnwise.rollouts.data import load_training
from turnwise.rollouts.problems import make_stream
from turnwise.serving.scheduler import Scheduler
from turnwise.tools import Tool
from turnwise.tools.toolbox import make_toolbox
from turnwise.trajectory import ChatTemplate, Prompt, Trajectory, audit
from turnwise.weights.manifest import Manifest, lay_out, split

Work = Callable[[], object]
EXPONENT, SECONDS = 1.2, 5.0
"""Goals: the largest exponent, and the most seconds at the largest size."""
START = 0.05
"""Seconds from which a size counts for the exponent: below them, constant costs hide the growth."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GIB = 2**30
HISTORIES = 12_800, 40_448, 128_000
TURNS = 64


class Subject(NamedTuple):
    """One thing that is made once; `prepare` returns the work that is measured."""

    name: str
    sizes: tuple[int, int, int]
    prepare: Callable[[int, Path], Work]


def configuration(path: Path, **sections: Any) -> Config:
    tree = {"environment": "examples.calculator.environment:Calculator", "data": {"path": "d"}}
    return load_config({**tree, "model": {"path": str(path)}, **sections})


def save_tokenizer(ids: int, added: int, folder: Path) -> Path:
    words = {f"w{number}": number for number in range(ids - added)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = ["<|im_start|>", "<|im_end|>", *(f"<unused{number}>" for number in range(added - 2))]
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


def tokenizer_of(added: int, folder: Path) -> Work:
    config = configuration(save_tokenizer(300_000 * added // 7_000, added, folder))

    def work() -> None:
        tokenizer = read_tokenizer(config.model)
        template = load_template(config.model, config.sampling, config.engine, tokenizer)
        first = template.render_first([{"role": "user", "content": "w1 w2"}], None)
        assert template.decode(first.tolist())

    return work


def template_of(added: int, folder: Path) -> Work:
    """The template alone, without Transformers' reading of the tokenizer."""
    tokenizer = read_tokenizer(
        configuration(save_tokenizer(300_000 * added // 7_000, added, folder)).model
    )
    messages = [{"role": "user", "content": "w1 w2"}]
    return lambda: ChatTemplate(tokenizer).render_first(messages, None)


def tools_of(count: int, folder: Path) -> Work:
    template = ChatTemplate(read_tokenizer(configuration(save_tokenizer(3_000, 100, folder)).model))
    fields = {f"f{number}": {"type": "string", "description": "w1 " * 60} for number in range(95)}
    schema = {"type": "object", "properties": fields, "required": ["f0"]}
    assert 18_000 < len(json.dumps(schema)) < 22_000

    def work() -> None:
        tools = [
            Tool(f"tool{number}", "w1 w2", schema, lambda arguments: "") for number in range(count)
        ]
        box = make_toolbox(tools, RolloutConfig())
        template.render_first([{"role": "user", "content": "w1"}], box.schemas)
        asyncio.run(box.call("tool0", json.dumps({"f0": "w1"})))

    return work


def rows_of(count: int, folder: Path) -> Work:
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"question": f"{number} " + "w" * 170, "answer": "1"}) + "\n")
    config = configuration(folder, data={"path": str(path)})

    def work() -> None:
        problems = load_training(config)
        stream = make_stream(problems, config.data, 0, {})
        assert len(stream.take(16)) == 16
        stream.state()

    return work


def layers_of(layers: int, folder: Path) -> Work:
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=2_560, intermediate_size=9_728, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return planned(shape, folder)


def experts_of(experts: int, folder: Path) -> Work:
    shape = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2_048, moe_intermediate_size=768, num_hidden_layers=48,
        num_experts=experts, num_experts_per_tok=min(8, experts),
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return planned(shape, folder)


def planned(shape: Qwen3Config | Qwen3MoeConfig, folder: Path) -> Work:
    shape.save_pretrained(folder)
    save_tokenizer(3_000, 100, folder)
    config = configuration(folder)
    return lambda: make_plan(config, Machine(8, 80 * GIB))


def tensors_of(count: int, folder: Path) -> Work:
    """The manifest of a model whose experts are tensors of their own."""
    tensor = torch.empty(768, 2_048, device="meta")

    def work() -> None:
        named = ((f"model.layers.{n // 1536}.mlp.experts.{n}.weight", tensor) for n in range(count))
        entries, nbytes = lay_out(named, torch.bfloat16)
        split(entries, 2**30)
        manifest = Manifest(1, "shm", "address", nbytes, entries)
        sent = Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())))
        assert sent.mismatch(manifest.info) == ""

    return work


def history_of(tokens: int, folder: Path) -> Work:
    """Every turn's prompt has the whole history, so the number of turns is the same everywhere."""
    each = tokens // TURNS // 2

    def work() -> None:
        trajectory, path = Trajectory("rows:1", 0), Prompt()
        for _ in range(TURNS):
            path, answer = Prompt.joined(path, [7] * each), [11] * each
            trajectory.add_turn(path, answer, [-1.0] * each, [0] * each, "stop")
            path = Prompt.joined(path, answer)
        trajectory.status = "completed"
        audit(trajectory, trajectory.samples())
        assert Trajectory.from_json(trajectory.to_json()) == trajectory

    return work


def fleet_of(count: int, folder: Path) -> Work:
    async def route() -> None:
        scheduler = Scheduler(ServingConfig(), 3600.0)
        for number in range(count):
            scheduler.add(f"worker-{number}", SimulatedEngine(name=f"worker-{number}"))
        request = Request(Prompt([5, 6]), config.sampling, "r", route=Route("s", "g"))
        await generate(scheduler, request)

    config = configuration(folder, sampling={"max_tokens": 1})
    return lambda: asyncio.run(route())


SUBJECTS = (
    Subject("tokenizer, by its added tokens (of 300k ids)", (700, 2_300, 7_000), tokenizer_of),
    Subject("its template alone", (700, 2_300, 7_000), template_of),
    Subject("toolbox and first prompt, by tools of 20 KB", (20, 63, 200), tools_of),
    Subject("data set, by rows", (100_000, 316_000, 1_000_000), rows_of),
    Subject("plan, by layers", (10, 32, 100), layers_of),
    Subject("plan of 48 layers, by experts", (51, 162, 512), experts_of),
    Subject("manifest of an update, by tensors", (15_000, 48_000, 150_000), tensors_of),
    Subject("record, audit and file of a trajectory, by tokens", HISTORIES, history_of),
    Subject("scheduler, by engines", (410, 1_295, 4_096), fleet_of),
)


def measure(subject: Subject, size: int, reply: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = subject.prepare(size, Path(folder))
        started = time.perf_counter()
        peak = peak_of(work, resident("VmRSS"))
        reply.send((time.perf_counter() - started, peak))


def figures(subject: Subject, size: int) -> tuple[float, int]:
    """Return the seconds and the bytes of one size, measured in a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=measure, args=(subject, size, theirs))
    process.start()
    theirs.close()
    try:
        seconds, peak = ours.recv()
    finally:
        process.join()
    return seconds, peak


def claims_of(subject: Subject, shrink: int) -> list[Claim]:
    seconds, notes = [], []
    sizes = [max(2 + place, size // shrink) for place, size in enumerate(subject.sizes)]
    for size in sizes:
        took, peak = figures(subject, size)
        seconds.append(took)
        notes.append(f"{size:,}: {took:.3g} s, {peak / 2**20:.0f} MiB")
    first = next((place for place in (0, 1) if seconds[place] >= START), 1)
    grown = max(seconds[2], START) / max(seconds[first], START)
    exponent = math.log(grown) / math.log(sizes[2] / sizes[first])
    note = "; ".join(notes)
    return [
        Claim(f"{subject.name}: exponent", "", [exponent], at_most=EXPONENT, note=note),
        Claim(f"{subject.name}: largest", "s", [seconds[-1]], at_most=SECONDS),
    ]


def main() -> None:
    """Run the benchmark and print the table."""
    made = parser("sizes", __doc__)
    made.add_argument("--only", default="", help="subjects with this text")
    options: argparse.Namespace = made.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in SUBJECTS if options.only in each.name]
    report([c for each in chosen for c in claims_of(each, 50 if options.quick else 1)], options)


if __name__ == "__main__":
    main()
