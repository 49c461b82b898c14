"""The prompts of chats: exact if the session has the earlier turns' tokens, rendered otherwise.

All conversations of the server are rendered here, with the same template as in agent loops.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pydantic import BaseModel

from turnwise.chat import prompts
from turnwise.chat.images import read_parts
from turnwise.chat.messages import Conversation, in_thread_if_long, plain
from turnwise.chat.session import Session
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.vllm_errors import refusing
from turnwise.trajectory import ChatTemplate, Prompt
from turnwise.trajectory.images import image_parts, images_in
from turnwise.trajectory.left_out import check_tools

logger = logging.getLogger(__name__)

ECHO = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "weight_versions")
"""Keys of an assistant message in which a client may send its token ids back."""
_TEMPLATES = 16  # maximum number of cached templates, one for each set of template variables
_VARIABLES = ("documents", "continue_final_message")
"""Options of a request that the template gets under the same names."""
BILLING = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code writes into system messages; the line differs in each
request."""


class ChatPrompts:
    """Finds or renders the prompt of each conversation.

    Args:
        chat: vLLM's service of chats.
        max_images: Maximum number of images of one prompt.
        shows_tools: Whether a template that leaves tools out is a mistake.
    """

    def __init__(
        self,
        template: ChatTemplate,
        chat: vllm.OpenAIServingChat,
        *,
        max_images: int,
        shows_tools: bool,
    ) -> None:
        self._template, self._chat = template, chat
        self._max_images, self._tools_in_prompt = max_images, shows_tools
        self._with_variables = lru_cache(_TEMPLATES)(
            lambda text: self._template.with_variables(**json.loads(text))
        )
        self._warned = False

    async def read(
        self,
        request: object,
        messages: Sequence[JsonObject],
        tools: list[JsonObject] | None,
    ) -> Conversation:
        """Return a client's conversation with its images read. A request is refused if its images
        cannot be read or are too many."""
        with refusing():
            listed = [_listed(message) for message in messages]
            if vllm.has_non_text_content(listed):
                listed = await self._read_images(request, listed)
            return Conversation(listed, tools)

    async def find(
        self, session: Session | None, asked: Conversation, request: object
    ) -> prompts.NextPrompt:
        """Return a conversation's prompt; its ids are always set.

        A request is refused if the model has no chat template. In a training session, it is also
        refused if the template leaves out its tools or messages.
        """
        with refusing():
            return await self._find(session, asked, request)

    async def _find(
        self, session: Session | None, asked: Conversation, request: object
    ) -> prompts.NextPrompt:
        template = self.template_of(request)
        training = session is not None and session.sampling is not None
        if template.missing:
            raise prompts.RefusedParameter("messages", template.missing)
        if asked.tools and self._tools_in_prompt and not template.shows_tools:
            await self._check_tools(template, asked, asked.tools, training)
        if (required := getattr(request, "required_prefix_token_ids", None)) is not None:
            name = "required_prefix_token_ids"
            ids = prompts.token_ids_of({name: required}, name)
            spliced = await run_in_thread(prompts.spliced_prompt, template, asked, ids)
            return prompts.NextPrompt(spliced)
        found = prompts.NextPrompt(None)
        if session is not None:
            found = await in_thread_if_long(
                asked.messages, lambda: session.next_prompt(asked, template)
            )
            if found.token_ids is None:
                found = prompts.echoed_prompt(template, asked, refuse_dropped=training) or found
        if found.token_ids is not None:
            return found
        return replace(found, token_ids=await self._whole(template, asked, request))

    async def _check_tools(
        self,
        template: ChatTemplate,
        asked: Conversation,
        tools: list[JsonObject],
        training: bool,
    ) -> None:
        shown = [plain(message) for message in asked.messages]
        try:
            await in_thread_if_long(shown, lambda: check_tools(template, shown, tools))
        except InputError as error:
            if training:
                raise prompts.RefusedParameter("tools", str(error)) from error
            if not self._warned:
                logger.warning("a request has tools, and %s", error)
            self._warned = True

    async def _whole(self, template: ChatTemplate, asked: Conversation, request: object) -> Prompt:
        """Return a whole conversation as a prompt."""
        seen = bool(images_in(asked.messages))
        sent = getattr(request, "kv_transfer_params", None) or {}
        if "prompt_token_ids" in sent and not seen and not getattr(request, "echo", False):
            name = "prompt_token_ids"
            ids = prompts.token_ids_of(sent, name)
            self._chat.renderer.validate_token_ids(ids, parameter=f"kv_transfer_params.{name}")
            return Prompt(ids)
        generation = getattr(request, "add_generation_prompt", True)
        special = getattr(request, "add_special_tokens", False)

        def render() -> Prompt:
            return prompts.whole_prompt(template, asked, generation=generation, special=special)

        prompt = await in_thread_if_long(asked.messages, render)
        cut = getattr(request, "truncate_prompt_tokens", None) is not None
        if not cut and getattr(request, "truncation", None) in (None, "disabled"):
            return prompt
        if seen:
            name = "truncate_prompt_tokens" if cut else "truncation"
            raise prompts.RefusedParameter(name, f"{name}: a prompt with images cannot be cut")
        return Prompt(vllm.truncated(self._chat, request, prompt.tolist()))

    async def _read_images(
        self, request: object, messages: Sequence[JsonObject]
    ) -> list[JsonObject]:
        def read() -> list[JsonObject]:
            return [
                read_parts(message, f"messages[{index}]", files=False)
                if vllm.has_non_text_content([message])
                else message
                for index, message in enumerate(messages)
            ]

        for name in ("echo", "continue_final_message", "required_prefix_token_ids"):
            if getattr(request, name, False):
                why = f"{name} is not served where a message has an image"
                raise prompts.RefusedParameter(name, why)
        limit = self._max_images
        if not limit or not self._chat.model_config.supports_multimodal_inputs:
            raise InputError("this server takes text alone: a request has an image or another file")
        if len([*image_parts(messages)]) > limit:  # before any image is decoded
            why = f"more than {limit} images (engine.images_per_prompt)"
            raise InputError(f"the messages have {why}")
        return await run_in_thread(read)

    def template_of(self, request: object) -> ChatTemplate:
        """Return the template with a request's variables; all such templates share one
        tokenizer."""
        own = dict(getattr(request, "chat_template_kwargs", None) or {})
        own |= {name: value for name in _VARIABLES if (value := getattr(request, name, None))}
        if (effort := getattr(request, "reasoning_effort", None)) is not None:
            own = {"enable_thinking": effort != "none", "reasoning_effort": effort, **own}
        if not own:
            return self._template
        return self._with_variables(json.dumps(own, sort_keys=True, default=str))


def _listed(message: JsonObject) -> JsonObject:
    """Return a copy of a message whose parts can be read repeatedly, because the parts of vLLM's
    messages may be an iterator, or vLLM's own objects. Claude Code's billing line is left out."""
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        content = [
            part.model_dump(exclude_none=True) if isinstance(part, BaseModel) else part
            for part in content
        ]
    if message.get("role") == "system" and content:
        if isinstance(content, str):
            content = _without_billing(content)
        else:
            for index, part in enumerate(content):
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    content[index] = {**part, "text": _without_billing(part["text"])}
            content = [part for part in content if part != {"type": "text", "text": ""}]
    return {**message, "content": content} if "content" in message else dict(message)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text
