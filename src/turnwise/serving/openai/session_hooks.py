"""The hooks of sessions in vLLM's application: exact prompts in, sampled turns out.

vLLM renders a conversation in `preprocess_chat`. The hook around it substitutes exact ids if the
conversation continues a turn or contains its own ids, and sets the request's sampling parameters.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError
from starlette.datastructures import State
from starlette.requests import Request

from turnwise.chat.messages import Answer, Conversation, answer, plain
from turnwise.chat.prompts import (
    NextPrompt,
    RefusedParameter,
    echoed_prompt,
    must_escape,
    render,
    spliced_prompt,
    token_ids_of,
)
from turnwise.chat.session import Session
from turnwise.chat.template import in_thread_if_long, load_template
from turnwise.chat.tool_formats import format_of, is_object
from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Chunk, TurnTimes
from turnwise.errors import InputError, TrajectoryError
from turnwise.serving.openai.on_policy import (
    bound_choices,
    choose_processors,
    give_defaults,
    keep_on_policy,
)
from turnwise.serving.openai.request_context import CURRENT, ChoiceKey, RequestContext
from turnwise.serving.openai.streamed import watched
from turnwise.serving.openai.validation import UNKNOWN, explain
from turnwise.serving.openai.vllm_api import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    CompletionRequest,
    SamplingRequest,
    VLLMError,
    VLLMValidationError,
)
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory.left_out import check_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)

_TEMPLATES = 16
"""Maximum number of cached ChatTemplates, one per set of template variables."""


class SessionHooks:
    """Connects sessions to vLLM's application.

    Args:
        config: Model, sampling and template settings.
        remember: Called with each chat completion's id and session.

    Example:
        >>> hooks = SessionHooks(config, store.remember_completion)
        >>> hooks.attach(app.state, tokenizer)
    """

    def __init__(self, config: Config, remember: Callable[[str, Session], None]) -> None:
        self._config = config
        self._format = format_of(config.rollout.tool_parser)
        self._warned = False
        """Whether it was logged that the template leaves out tools."""
        self.remember = remember

    def attach(self, state: State, tokenizer: "Tokenizer") -> None:
        """Wrap the methods of vLLM's application that render chats and answer them."""
        self._tokenizer = tokenizer
        self.template = load_template(self._config, tokenizer)
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._chat = state.openai_serving_chat
        renderer = state.online_renderer
        renderer.preprocess_chat = self._around_rendering(renderer.preprocess_chat)
        renderer.render_completion = self._around_completion(renderer.render_completion)
        self._chat.create_chat_completion = self._around_answer(self._chat.create_chat_completion)
        messages = state.anthropic_serving_messages
        if messages is not None:  # Anthropic's messages are streamed from chunks of a chat
            messages.create_chat_completion = _watching(messages.create_chat_completion, True)

    def _around_rendering(
        self, preprocess_chat: Callable[..., Awaitable[object]]
    ) -> Callable[..., Awaitable[object]]:
        async def preprocess(
            request: SamplingRequest,
            messages: list[JsonObject],
            *args: object,
            tool_dicts: list[JsonObject] | None = None,
            **options: object,
        ) -> object:
            context = CURRENT.get()
            if context is not None:
                messages = [dict(message) for message in messages]
                context.request, context.asked = request, Conversation(messages, tool_dicts)
                self._settle_sampling(context, request)
                if not getattr(request, "tools", None) and request.tool_choice is None:
                    request.tool_choice = "none"  # or vLLM removes calls from the text
                ids = await self._checked_prompt(context, request)
                if ids is not None:
                    kept = getattr(request, "kv_transfer_params", None) or {}
                    request.kv_transfer_params = {**kept, "prompt_token_ids": ids}
            return await preprocess_chat(request, messages, *args, tool_dicts=tool_dicts, **options)

        return preprocess

    def _around_completion(
        self, render_completion: Callable[..., Awaitable[object]]
    ) -> Callable[..., Awaitable[object]]:
        async def render(request: CompletionRequest, **options: object) -> object:
            context = CURRENT.get()
            if context is not None:
                context.request = request
                self._settle_sampling(context, request)
            return await render_completion(request, **options)

        return render

    def _around_answer(
        self, create_chat_completion: Callable[..., Awaitable[object]]
    ) -> Callable[..., Awaitable[object]]:
        async def create(
            request: ChatCompletionRequest, raw_request: Request | None = None
        ) -> object:
            response = await _watching(create_chat_completion, False)(request, raw_request)
            context = CURRENT.get()
            if context is None or raw_request is None:
                return response
            metadata = getattr(raw_request.state, "request_metadata", None)
            if metadata is not None:
                self.remember(metadata.request_id, context.session)
            if isinstance(response, ChatCompletionResponse):
                for choice in response.choices:
                    message = choice.message
                    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls]
                    context.answers[choice.index] = answer(message.content, calls)
                    if request.return_token_ids:
                        key = response.id, choice.index
                        _add_tokens(context, key, choice, response.prompt_token_ids)
            return response

        return create

    def _settle_sampling(self, context: RequestContext, request: SamplingRequest) -> None:
        """Set a request's sampling parameters.

        Raises:
            VLLMValidationError: naming the parameter that cannot be served.
        """
        own, config = context.session.sampling, self._config
        sampling = own or config.sampling
        try:
            bound_choices(request)
            if own is not None:
                keep_on_policy(request, own)
            choose_processors(request, sampling, config.engine.logits_processors_allowed)
        except RefusedParameter as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from error
        give_defaults(request, sampling, config.model.max_length)

    async def _checked_prompt(
        self, context: RequestContext, request: SamplingRequest
    ) -> list[int] | None:
        """Return `exact_prompt`, with errors in the form that vLLM sends to the client.

        Raises:
            VLLMValidationError: when the messages, or the ids in them, cannot be used.
        """
        try:
            return await self.exact_prompt(context, request)
        except VLLMError:
            raise
        except RefusedParameter as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from error
        except TrajectoryError as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        except Exception as error:  # a client's messages may be anything
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                why, _ = explain(list(map(dict, error.errors())), UNKNOWN)
            raise VLLMValidationError(
                f"messages cannot be read: {why}", parameter="messages"
            ) from error

    async def exact_prompt(
        self, context: RequestContext, request: SamplingRequest
    ) -> list[int] | None:
        """Return a prompt's ids, or None if vLLM has to render it; see `chat.prompts`.

        Raises:
            RefusedParameter: when there is no chat template, or it leaves out the tools of a
                training session.
        """
        session, asked, template = context.session, context.asked, self._template(request)
        await self._check_shown(template, asked, strict=session.sampling is not None)
        if (required := getattr(request, "required_prefix_token_ids", None)) is not None:
            name = "required_prefix_token_ids"
            ids = token_ids_of({name: required}, name)
            return await in_thread_if_long(
                asked.messages, lambda: spliced_prompt(template, asked, ids)
            )
        prompt: NextPrompt | None = await in_thread_if_long(
            asked.messages, lambda: session.next_prompt(asked, template)
        )
        assert prompt is not None
        context.prompt = prompt
        if prompt.token_ids is not None:
            return prompt.token_ids
        training = session.sampling is not None
        if (echoed := echoed_prompt(template, asked, refuse_dropped=training)) is not None:
            if echoed.token_ids is not None:
                return echoed.token_ids
            context.prompt = echoed
        if must_escape(template, asked):
            return await in_thread_if_long(asked.messages, lambda: render(template, asked))
        return None

    async def _check_shown(
        self, template: ChatTemplate, asked: Conversation, *, strict: bool
    ) -> None:
        """Refuse a conversation if there is no template, and tools that the template leaves out.

        Args:
            strict: Whether the turn is trained; if not, such tools are logged once.
        """
        if template.missing:
            raise RefusedParameter("messages", template.missing)
        if template.shows_tools or not (asked.tools and self._config.rollout.tools_in_prompt):
            return
        tools, messages = asked.tools, [plain(message) for message in asked.messages]
        try:
            await in_thread_if_long(messages, lambda: check_tools(template, messages, tools))
        except InputError as error:
            if strict:
                raise RefusedParameter("tools", str(error)) from error
            if not self._warned:
                logger.warning("a request has tools, and %s", error)
            self._warned = True

    def _template(self, request: SamplingRequest) -> ChatTemplate:
        """Return the template with a request's variables; all share the tokenizer."""
        own = getattr(request, "chat_template_kwargs", None)
        if not own:
            return self.template
        key = json.dumps(own, sort_keys=True, default=str)
        if key not in self._templates:
            self._templates[key] = self.template.with_variables(**own)
            if len(self._templates) > _TEMPLATES:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key]

    def record(
        self, context: RequestContext, key: ChoiceKey, prompt: list[int], chunks: Sequence[Chunk]
    ) -> None:
        """Keep a finished completion, to be recorded as a turn once the client gets it."""
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        versions = [version for chunk in chunks for version in chunk.weight_versions]
        context.finished[key] = logprobs, versions
        now, last = time.time(), chunks[-1]
        first = None if last.first_token_age is None else now - last.first_token_age
        times = TurnTimes(0, context.began, first, now, last.worker, last.queued)
        record = partial(
            context.session.record,
            prompt,
            token_ids,
            logprobs,
            versions,
            str(last.finish_reason),
            asked=context.asked,
            answer=lambda: self._counted(context, self._parse(context, key, token_ids)),
            prompt=context.prompt,
            adapter=context.adapter,
            times=times,
            experts=last.experts,
        )
        context.undelivered.append(record)

    def _counted(self, context: RequestContext, said: Answer) -> Answer:
        """Count an answer's tool calls as a loop does: the client may not notice a broken one."""
        tools = context.asked.tools
        if tools and self._chat.parser_cls is not None:
            text, calls = said
            names = [str((tool.get("function") or tool).get("name")) for tool in tools]
            readable = sum(is_object(arguments) for _, arguments in calls)
            broken = len(calls) - readable
            broken += not calls and self._format.unreadable(text, names, [])
            events = context.session.trajectory.events
            events.update({"tool_call": readable} if readable else {})
            events.update({"tool_malformed": broken} if broken else {})
        return said

    def _parse(self, context: RequestContext, key: ChoiceKey, token_ids: list[int]) -> Answer:
        """Return an answer as the client got it, or parse it as vLLM parses it for the client."""
        request, chat = context.request, self._chat
        said = context.answers.get(key[1])
        if said is not None:
            return said
        text = context.texts.get(key)
        if text is None:  # the client disconnected before the end
            text = self._template(request).decode(token_ids)
        if chat.parser_cls is None or not hasattr(request, "tool_choice"):
            return answer(text, ())
        try:
            parser = chat._make_parser(request, self._tokenizer, {})
            _, content, calls = parser.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=token_ids
            )
        except Exception:  # the client gets the error; the session keeps the text
            logger.debug("an answer cannot be parsed", exc_info=True)
            return answer(text, ())
        return answer(content, [(call.name, call.arguments) for call in calls or ()])


def _watching(
    create: Callable[..., Awaitable[object]], objects: bool
) -> Callable[..., Awaitable[object]]:
    """Wrap a method that answers chats, to note the answers that are streamed with calls.

    Args:
        objects: Whether clients hold arguments as objects, as those of Anthropic's Messages do.
    """

    async def watching(
        request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> object:
        response = await create(request, raw_request)
        context = CURRENT.get()
        if context is None or not request.tools or not isinstance(response, AsyncGenerator):
            return response
        return watched(response, context.answers, objects)

    return watching


def _add_tokens(
    context: RequestContext,
    key: ChoiceKey,
    choice: ChatCompletionResponseChoice,
    prompt_token_ids: list[int],
) -> None:
    """Add the ids that a client may echo to its message."""
    logprobs, versions = context.finished[key]
    choice.message.prompt_token_ids = prompt_token_ids
    choice.message.generation_token_ids = choice.token_ids
    choice.message.generation_log_probs = logprobs
    choice.message.weight_versions = versions
