"""Tiny models of random weights that read images, of several families, and what is exact for each.

python -m tests.training.vision_models             print the table, each family in its own process
python -m tests.training.vision_models NAME        print one family's line
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    Idefics3Config,
    InternVLConfig,
    LlavaOnevisionConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from examples.calculator.tokenizer import build_tokenizer
from tests.vision import PATCH, TEMPLATE, asked, make_qwen_vl, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config
from turnwise.errors import first_line
from turnwise.training.batching import Columns, Layout, plan_micro_batches
from turnwise.training.layout_check import ModelCheck
from turnwise.training.rank import TrainerRank
from turnwise.training.sample import Sample
from turnwise.trajectory import Prompt

SECONDS = 900
"""Deadline of one family, its engine included."""
CPU = torch.device("cpu")
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")


def _text(vocabulary: int, tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Return a small language model's keys; heads of 32, as vLLM's attention wants on a CPU."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | more


def _vision(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    } | more


def _tokenizer(folder: Path, mark: str, named: dict[str, str], *more: str) -> Any:
    """Save a tokenizer with these special tokens, which processors know by name."""
    tokenizer = build_tokenizer(0, 100)
    tokenizer.add_special_tokens({"additional_special_tokens": [*named.values(), *more]})
    tokenizer.chat_template = TEMPLATE.replace(_QWEN, mark)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "extra_special_tokens": named}))
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _save(folder: Path, shape: Any, processor: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(shape)
    for parameter in model.parameters():  # so large that each patch counts
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _publish(folder: Path) -> None:
    """Name the tensors of SigLIP's tower as in published models; vLLM knows no other names."""
    path = folder / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def _size(tokenizer: Any) -> int:
    return int(-(-len(tokenizer) // 64) * 64)


def make_qwen3_vl(folder: Path) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    ends = ("<|vision_start|>", "<|vision_end|>")
    tokenizer = _tokenizer(folder, _QWEN, named, *ends)
    image, video, start, end = map(tokenizer.convert_tokens_to_ids, (*named.values(), *ends))
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    rope["mrope_interleaved"] = True
    shape = Qwen3VLConfig(
        text_config=_text(_size(tokenizer), tokenizer, head_dim=32, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": PATCH // 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": PATCH**2, "longest_edge": 64 * PATCH**2}
    options = {"patch_size": PATCH // 2, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    images, videos = Qwen2VLImageProcessor(**options), Qwen3VLVideoProcessor(**options)
    _save(folder, shape, Qwen3VLProcessor(images, tokenizer, videos))


def make_gemma3(folder: Path) -> None:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    names = ("image_token", "boi_token", "eoi_token")
    named = dict(
        zip(names, ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), strict=True)
    )
    lines = ("\n" * count for count in range(1, 5))  # vLLM joins them beside an image
    tokenizer = _tokenizer(folder, "<start_of_image>", named, *lines)
    image, boi, eoi = map(tokenizer.convert_tokens_to_ids, named.values())
    text = _text(_size(tokenizer), tokenizer, head_dim=32, sliding_window=16)
    text |= {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}
    shape = Gemma3Config(
        text_config=text,
        vision_config=_vision(),
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=boi,
        eoi_token_index=eoi,
    )
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    _save(folder, shape, Gemma3Processor(images, tokenizer, image_seq_length=4))
    _publish(folder)


def make_idefics3(folder: Path) -> None:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    tokenizer, parts = _idefics(folder)
    shape = Idefics3Config(**parts)
    images = Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    _save(folder, shape, Idefics3Processor(images, tokenizer, image_seq_len=4))


def make_smolvlm(folder: Path) -> None:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    tokenizer, parts = _idefics(folder)
    shape = SmolVLMConfig(**parts)
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    images, videos = SmolVLMImageProcessor(**sizes), SmolVLMVideoProcessor(**sizes)
    _save(folder, shape, SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4))


def _idefics(folder: Path) -> tuple[Any, dict[str, Any]]:
    named = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    named |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(folder, "<image>", named, *rows)
    text = _text(_size(tokenizer), tokenizer, model_type="llama", head_dim=32)
    parts = {
        "text_config": text,
        "vision_config": _vision(),
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return tokenizer, parts


def make_internvl(folder: Path) -> None:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    named = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>"}
    named |= {"end_image_token": "</img>", "video_token": "<video>"}
    tokenizer = _tokenizer(folder, "<IMG_CONTEXT>", named)
    text = _text(_size(tokenizer), tokenizer, model_type="qwen2")
    shape = InternVLConfig(
        text_config=text,
        vision_config=_vision(image_size=(56, 56), patch_size=(14, 14)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": 56, "width": 56}
    images = GotOcr2ImageProcessor(size=size, max_patches=4, crop_to_patches=True)
    videos = InternVLVideoProcessor(size=size)
    _save(folder, shape, InternVLProcessor(images, tokenizer, videos, image_seq_length=4))


def make_llava_onevision(folder: Path) -> None:
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    named = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = _tokenizer(folder, "<image>", named)
    image, video = map(tokenizer.convert_tokens_to_ids, named.values())
    points = [[56, 56], [56, 112], [112, 56], [112, 112]]
    shape = LlavaOnevisionConfig(
        text_config=_text(_size(tokenizer), tokenizer, model_type="qwen2"),
        vision_config=_vision(model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=points,
    )
    size = {"height": 56, "width": 56}
    images = LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=points)
    videos = LlavaOnevisionVideoProcessor(size=size)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    _save(folder, shape, LlavaOnevisionProcessor(images, tokenizer, videos, **options))
    _publish(folder)


FAMILIES: dict[str, Callable[[Path], object]] = {
    "Qwen2.5-VL": make_qwen_vl,
    "Qwen3-VL": make_qwen3_vl,
    "Gemma 3": make_gemma3,
    "SmolVLM": make_smolvlm,
    "Idefics3": make_idefics3,
    "InternVL": make_internvl,
    "Llava-OneVision": make_llava_onevision,
}
"""Functions that save a family's tiny model, its tokenizer and its processor in a folder."""


def samples_of(config: Config, answers: Sequence[list[int]]) -> list[Sample]:
    """Return samples of two images, one of them the same in all, to train with an advantage."""
    template = load_template(
        config.model, config.sampling, config.engine, load_tokenizer(config.model)
    )
    made = []
    for number, answer in enumerate(answers):
        parts = ("Look: ", picture(), " and ", picture(84, 56, number), "?")
        prompt = template.render([read_parts(asked(*parts), "a message")])
        ids = Prompt.joined(prompt, answer)
        mask, zeros = [0] * len(prompt) + [1] * len(answer), [0] * len(ids)
        sample = Sample.of(ids, mask, zeros, zeros, 1.0, number)
        made.append(sample)
    return made


def trained_row(name: str, folder: Path) -> tuple[dict[str, object], TrainerRank]:
    """Return what the trainer does with a family: differences of log-probs in nats, by layout, of a
    model that has taken a step, and of the exported one; and a rank with the first weights."""
    FAMILIES[name](folder / "model")
    config = vision_config(
        str(folder / "model"), model={"path": str(folder / "model"), "max_length": 1024}
    )
    rank = TrainerRank(config, folder / "run")
    row: dict[str, object] = {"model": name}
    if rank._no_images:
        return row | {"why": rank._no_images}, rank
    check = ModelCheck(rank._models, rank._models.policy, 1024, images=True)
    row["own"] = check.own.nats
    row |= {layout: check.compare_and_choose_attention(layout).nats for layout in LAYOUTS}
    samples = samples_of(config, [[5, 6, 7], [5, 6, 8, 9]])
    row["tokens"] = samples[0].images[0].length
    shares = plan_micro_batches(samples, 1, 1, 4096, rank.layouts)[0]
    learner = TrainerRank(config, folder / "run")
    report = learner.train(shares)
    row["gradient"] = report.updates[0].grad_norm
    learner.save(folder / "saved")
    again = TrainerRank(vision_config(str(folder / "saved"), model={"path": str(folder / "saved")}))
    columns = Columns.of(samples, "padded", CPU)
    with torch.no_grad():
        before, after, loaded = (
            each._models.score("policy", columns)[0] for each in (rank, learner, again)
        )
    row["moved"] = float((after - before).abs().max())
    row["export"] = float((after - loaded).abs().max())
    return row, rank


async def engine_row(rank: TrainerRank, folder: Path) -> dict[str, object]:
    """Return how far vLLM's log-probs are from the trainer's, before and after an update of all
    weights, of a canary with an image, and of an answer to two images."""
    from tests.weights.links import state_dict_info
    from turnwise.config import SamplingConfig
    from turnwise.engine.protocol import Request, generate
    from turnwise.serving.worker_handle import WorkerHandle
    from turnwise.weights.sync import check_canary

    config = rank._config
    engine = await WorkerHandle.start(config)
    try:
        published = rank.publish()
        canary = published.prompt
        if not canary.images:
            raise ValueError("the canary has no image: it is too long for model.max_length")
        row: dict[str, object] = {}
        row["engine"] = (await check_canary(engine, canary, published.logprobs, 1e9, 0))[1]
        (first,) = samples_of(config, [[]])
        ids = Prompt.of(first.ids)
        sampling = SamplingConfig(n=1, max_tokens=8, ignore_eos=True)
        said = await generate(engine, Request(ids, sampling, "two"))
        both = ids + said.token_ids
        mask = [0] * len(ids) + [1] * len(said.token_ids)
        columns = Columns.of([Sample.to_score(both, mask)], "padded", CPU)
        with torch.no_grad():
            found, _ = rank._models.score("policy", columns)
        row["answer"] = float((found - torch.tensor(said.logprobs)).abs().max())
        await engine._call("prepare_refit_info", state_dict_info(rank._tensors()))
        with torch.no_grad():
            for parameter in rank._models.policy.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        rank.version += 1
        published = rank.publish()
        row["stale"] = (await check_canary(engine, canary, published.logprobs, 1e9, 0))[1]
        await engine.update_weights(published)
        row["update"] = (await check_canary(engine, canary, published.logprobs, 1e9, 1))[1]
        return row
    finally:
        await engine.shutdown()


def print_row(name: str) -> None:
    """Print a family's line as JSON, first without an engine, then with one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            row, rank = trained_row(name, Path(folder))
        except Exception as error:
            row = {"model": name, "why": f"trainer: {type(error).__name__}: {first_line(error)}"}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if "why" in row:
            return
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            row |= asyncio.run(engine_row(rank, Path(folder)))
        except Exception as error:
            row["why"] = f"engine: {type(error).__name__}: {first_line(error)}"
        finally:
            ray.shutdown()
        sys.stdout.write(json.dumps(row) + "\n")


COLUMNS = ("tokens", "own", *LAYOUTS, "gradient", "moved", "export")
OF_ENGINES = ("engine", "answer", "stale", "update")


def main(names: Sequence[str]) -> None:
    """Print the table: each row's numbers, or why some are missing."""
    if names:
        for name in names:
            print_row(name)
        return
    head = ("model", *COLUMNS, *OF_ENGINES, "missing")
    sys.stdout.write(f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n")
    for name in FAMILIES:
        command = [sys.executable, "-m", "tests.training.vision_models", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            out, why = (
                done.stdout,
                f"its process ended with {done.returncode}: {done.stderr[-200:]}",
            )
        except subprocess.TimeoutExpired as late:
            out, why = (late.stdout or b"").decode(), f"not done after {SECONDS} s"
        rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"model"')]
        row = rows[-1] if rows else {"model": name}
        if "update" not in row:
            row.setdefault("why", why)
        cells = [_cell(row.get(key, "")) for key in ("model", *COLUMNS, *OF_ENGINES, "why")]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


def _cell(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else " ".join(str(value).split())


if __name__ == "__main__":
    main(sys.argv[1:])
