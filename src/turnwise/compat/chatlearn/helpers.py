"""ChatLearn's prompt datasets and its helpers for modules, under ChatLearn's names."""

from collections.abc import Callable, Mapping, Sequence

from turnwise.compat.chatlearn.model_file import Args
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError


class PromptPipeline(Sequence[JsonObject]):
    """The base class of a dataset, which a subclass fills.

    Example:
        class Own(PromptPipeline):
            def __init__(self, texts, tokenizer):
                self.prompts_ids = [{"input_ids": tokenizer.encode(t), "prompt": t} for t in texts]
    """

    prompts_ids: list[JsonObject]
    """The items: `input_ids`, `prompt`, and any other fields."""

    def __len__(self) -> int:
        return len(self.prompts_ids)

    def __getitem__(self, index: Foreign) -> Foreign:
        return self.prompts_ids[index]

    def collate_fn(self, samples: Sequence[JsonObject]) -> dict[str, list[Foreign]]:
        """Return items as a batch: one list for each field."""
        return {name: [sample[name] for sample in samples] for name in (samples or [{}])[0]}


class VLLMPromptPipeline(PromptPipeline):
    """Prompts for a policy's `forward_step`, cut at their end.

    Args:
        prompts: Texts, tuples that begin with a text, or rows. The text of a row is its field
            `prompt_key` ("prompt" if `prompt_key` is None); the other fields are kept.
        max_prompt_length: Maximum number of tokens.
        tokenizer: A Hugging Face tokenizer. Its `encode` also adds special tokens, such as BOS.

    Raises:
        InputError: when a prompt is empty or has no text; the error names the prompt.

    Example:
        def build_dataset(self, train_prompts, is_eval=False):
            longest = self.model_args["seq_length"] - self.model_args["max_new_tokens"]
            return VLLMPromptPipeline(train_prompts, longest, self.tokenizer.tokenizer)
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[Foreign] | JsonObject],
        max_prompt_length: int,
        tokenizer: Foreign = None,
        prompt_key: str | None = None,
    ) -> None:
        if max_prompt_length < 1:
            raise InputError(f"max_prompt_length must be 1 or more, not {max_prompt_length}")
        if tokenizer is None:
            raise InputError("VLLMPromptPipeline needs a tokenizer: self.tokenizer.tokenizer")
        self.tokenizer = tokenizer
        self.prompts: list[tuple[str, list[int]]] = []
        """Text and token ids of each prompt."""
        self.prompts_ids = []
        for number, given in enumerate(prompts, start=1):
            row = given if isinstance(given, Mapping) else {}
            text = row.get(prompt_key or "prompt") if row else given
            text = text[0] if isinstance(text, tuple) and text else text
            if not isinstance(text, str) or not text:
                raise InputError(f"prompt {number} is empty, or no text: {repr(given)[:80]}")
            ids = list(tokenizer.encode(text))[:max_prompt_length]
            self.prompts.append((text, ids))
            self.prompts_ids.append({**row, "input_ids": ids, "prompt": text})


def get_model(
    model_provider: Callable[[], Foreign], args: Args | None = None, wrap_with_ddp: bool = False
) -> Foreign:
    """Return the model of a `model_provider`, for evaluation; engines and trainer load their own
    copies.

    Args:
        args: The module's `model_args`. If the provider returns None, the files name the model, and
            `args["load"]` is returned.
        wrap_with_ddp: Ignored: the trainer shards its own model.

    Example:
        class Policy(VLLMModule):
            def setup(self):
                self.model = get_model(self.model_provider, self.model_args)
    """
    model = model_provider()
    if model is None:
        return (args or {}).get("load")
    return model.eval() if hasattr(model, "eval") else model


def print_rank_0(message: object) -> None:
    """Print a line and flush it; a module is one process, so there is no rank to check."""
    print(message, flush=True)  # noqa: T201
