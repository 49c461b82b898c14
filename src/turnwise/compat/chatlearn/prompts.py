"""Turn a program's prompts into problems: texts, messages, token ids, and rows of the environment.

Texts, messages and token ids are answered in one turn, by `ConversationPrompt` and `PromptLoop`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, describe_error
from turnwise.rollouts import Problem, RolloutContext
from turnwise.rollouts.loops import SingleTurnLoop
from turnwise.trajectory import ChatTemplate, Message, PromptLike, Trajectory

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, object]] | Mapping[str, object]
"""A text, messages, token ids with their text, or a row of the environment."""
PromptFields = tuple[str, str, str | None]
"""Field names of a prompt that is a mapping: for token ids, for the text of the ids, and for a text
or messages without ids. If the third name is None, every mapping without ids is a row."""
_STEP = ("seq_group_metadata_list", "blocks_to_swap_in", "blocks_to_swap_out", "blocks_to_copy")
"""Keys of a scheduler's batch in the vLLM version that ChatLearn uses."""


class PromptList(list[Foreign]):
    """The prompts that a `forward_step` gets as a list.

    A key of a scheduler's batch returns the prompts; any other text key returns that field of each
    prompt, as a list.
    """

    is_eval = False

    def __getitem__(self, key: Foreign) -> Foreign:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key in _STEP:
            return self
        return [(item.row if isinstance(item, Problem) else item)[key] for item in self]


class PromptColumns(dict[str, Foreign]):
    """The prompts that a `forward_step` gets as a mapping of lists, otherwise like `PromptList`."""

    is_eval = False

    def __missing__(self, key: str) -> Foreign:
        if key in _STEP:
            return self
        raise KeyError(key)


def scheduled(data: Foreign, is_eval: bool) -> PromptList | PromptColumns:
    """Return a batch of prompts that can also be read as a scheduler's batch."""
    if isinstance(data, PromptList | PromptColumns):
        return data
    columns = isinstance(data, Mapping)
    made: PromptList | PromptColumns = PromptColumns(data) if columns else PromptList(data)
    made.is_eval = is_eval
    return made


class ConversationPrompt:
    """The default environment, for plain prompts: messages, no tools, and 0 as reward.

    Args:
        row: Either `messages`, or `prompt`, the text of a user message.
    """

    problem: Sequence[Message]
    tools: Sequence[Callable[..., object]] = ()

    def __init__(self, row: JsonObject) -> None:
        if "messages" in row:
            self.problem = row["messages"]
        elif isinstance(row.get("prompt"), str):
            self.problem = [{"role": "user", "content": row["prompt"]}]
        else:
            raise InputError(
                "without an environment a row needs prompt, a text, or messages; set environment "
                "to read rows of another kind"
            )

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class ConversationProblem(Problem):
    """A problem whose row holds `messages`, to be read by people, and `input_ids`, the prompt."""

    text: str | None = None
    """Text of the ids, if the program gave ids."""


class PromptLoop(SingleTurnLoop):
    """A loop that answers exactly the row's `input_ids`."""

    async def prompt(self, context: RolloutContext) -> PromptLike:
        return list(context.row["input_ids"])


class ProblemBuilder:
    """Makes problems, whose names begin with `name`, from the prompts of a batch.

    Texts and token ids of more than `limit` tokens are cut at the end, and the number of cut
    prompts is logged. Conversations of more than `longest` tokens (`data.max_prompt_tokens`) are
    left out. If a prompt is empty, cannot be used, or does not fit the context of `room` tokens, an
    `InputError` that names the prompt is raised.
    """

    def __init__(
        self,
        name: str,
        template: ChatTemplate,
        fields: PromptFields,
        limit: int,
        longest: int | None,
        room: int,
    ) -> None:
        self._name = name
        self._longest, self._room = longest, room
        self._template = template
        self._fields = fields
        self._limit = limit
        self._cut = 0

    def build(self, prompts: Sequence[Prompt]) -> list[Problem]:
        """Make problems from prompts of any kind; leave out messages that are too long."""
        made = [self._problem(f"{self._name}:{n}", prompt) for n, prompt in enumerate(prompts, 1)]
        kept = [problem for problem in made if problem is not None]
        for count, what in (
            (self._cut, f"cut to {self._limit} tokens"),
            (len(made) - len(kept), "longer than data.max_prompt_tokens and left out"),
        ):
            if count:
                logger.warning("%d of %d prompts of %s are %s", count, len(made), self._name, what)
        return kept

    def _problem(self, name: str, prompt: object) -> Problem | None:
        """Return the problem of one prompt; None if the prompt is left out."""
        ids_field, text_field, message_field = self._fields
        if isinstance(prompt, str | Sequence | Mapping) and not prompt:
            raise InputError(f"{name}: the prompt is empty")
        row = prompt if isinstance(prompt, Mapping) else {}
        if ids_field in row:
            given, text = row[ids_field], row.get(text_field)
            token_ids = given.tolist() if hasattr(given, "tolist") else given  # a tensor, too
            if not isinstance(token_ids, Sequence) or not all(
                isinstance(token, int) and token >= 0 for token in token_ids
            ):
                raise InputError(f"{name}: token ids must be whole numbers, not {repr(given)[:80]}")
            if not token_ids:
                raise InputError(f"{name}: the prompt is empty")
            self._cut += len(token_ids) > self._limit
            token_ids = list(token_ids[: self._limit])
            text = self._template.decode_all(token_ids) if text is None else text
            messages = [{"role": "user", "content": text}]
            own = {"prompt": text, "messages": messages, "input_ids": token_ids}
            return ConversationProblem(name, {**row, **own}, text=text)
        if row and message_field not in row:
            return Problem(name, dict(row))
        said = row[message_field] if row else prompt
        if isinstance(said, str):
            return self._text(name, row, said)
        given = said if isinstance(said, Sequence) else ()
        if not given or not all(isinstance(m, Mapping) and "role" in m for m in given):
            raise InputError(
                f"{name}: a prompt must be a text, a list of messages, token ids under "
                f"{ids_field}, or a row, not {repr(said)[:80]}"
            )
        messages = [dict(message) for message in given]
        token_ids = self._render(name, messages)
        longest, room = self._longest, self._room
        if longest is not None and len(token_ids) > longest:
            return None
        if len(token_ids) >= room:
            raise InputError(
                f"{name}: its prompt of {len(token_ids)} tokens does not fit the context of "
                f"{room}; raise model.max_length, or leave such prompts out with "
                "data.max_prompt_tokens"
            )
        return ConversationProblem(name, {**row, "messages": messages, "input_ids": token_ids})

    def _text(self, name: str, row: Mapping[str, object], text: str) -> Problem:
        """Return the problem of a user message, cut until the rendered chat fits the limit."""
        if not text.strip():
            raise InputError(f"{name}: the prompt is empty")
        messages: list[Message] = [{"role": "user", "content": text}]
        token_ids = self._render(name, messages)
        own, kept = list[int](), 0
        if len(token_ids) > self._limit:
            self._cut += 1
            own = self._template.encode(text)
            kept = len(own)
        while (over := len(token_ids) - self._limit) > 0:
            kept -= over
            if kept <= 0:
                raise InputError(
                    f"{name}: the chat template alone leaves no room for a text in {self._limit} "
                    "tokens; raise data.max_prompt_tokens or model.max_length"
                )
            messages = [{"role": "user", "content": self._template.decode_all(own[:kept])}]
            token_ids = self._render(name, messages)
        filled = {"prompt": text, **row, "messages": messages, "input_ids": token_ids}
        return ConversationProblem(name, filled)

    def _render(self, name: str, messages: list[Message]) -> list[int]:
        try:
            return self._template.render(messages).tolist()
        except InputError as error:  # there is no template
            raise InputError(f"{name}: {error}") from error
        except Exception as error:  # a template may raise anything
            raise InputError(
                f"{name}: the chat template refuses the prompt: {describe_error(error)}"
            ) from error
