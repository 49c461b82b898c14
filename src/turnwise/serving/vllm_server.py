"""vLLM's own OpenAI application around a `Generator` of ours: one worker's engine, or the fleet.

Chat Completions, Completions, Responses and Anthropic Messages, streaming, tools, reasoning and
structured outputs come from vLLM. Ours are the two places where tokens pass: where a conversation
becomes ids (`_render`), which a session makes exact, and where ids are sampled (`_Core`), which
records them. Everything here that touches vLLM's insides was checked against 0.32; the tests of
the server fail when they move.
"""

import asyncio
import contextlib
import contextvars
import copy
import itertools
import json
import logging
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from turnwise.config import Config
from turnwise.engine.protocol import STREAM_INTERVAL, Chunk, Generator, Route
from turnwise.engine.vllm_engine import engine_arguments
from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError
from turnwise.serving.on_policy import (
    RefusedParameter,
    bound_choices,
    choose_processors,
    give_defaults,
    keep_on_policy,
)
from turnwise.serving.sessions import Answer, Prompt, Session, answer, plain
from turnwise.serving.template import load_template, off_loop
from turnwise.serving.tool_parser import silence
from turnwise.trajectory import ChatTemplate, bridge, replace_prefix_tokens

logger = logging.getLogger(__name__)

_TEMPLATES = 16
"""Most cached ChatTemplates, one for each set of template variables."""
_FINISH = {str(reason): reason for reason in FinishReason}

ROUTES = {
    "/health",
    "/metrics",
    "/version",
    "/openapi.json",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
}
"""What is served; vLLM's control routes are not."""


@dataclass(slots=True)
class Call:
    """One HTTP request on its way through vLLM."""

    session: Session
    request: Any = None
    messages: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt(None))
    finished: dict[tuple[int, ...], tuple[list[float], list[int]]] = field(default_factory=dict)
    """The log-probs and weight versions of each completion, by its ids."""
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    """The text that vLLM made of each completion, by its ids."""


CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)
"""Set around each request by `openai_server`."""


async def build(
    config: Config,
    generator: Generator,
    healthy: Callable[[], bool],
    remember: Callable[[str, Session], None],
    names: Sequence[str],
) -> FastAPI:
    """vLLM's application around `generator`, with the routes in `ROUTES` alone.

    Args:
        healthy: Whether anything can be served now.
        remember: Called with each chat completion's id and session.
        names: The model's, for clients, the first of which answers carry; requests may name any.

    Raises:
        InputError: when vLLM refuses the model, or has no such parser.
    """
    arguments = [
        *("--model", config.model.path),
        *("--tokenizer", config.model.tokenizer or config.model.path),
        *("--served-model-name", *names),
        *("--tool-call-parser", config.rollout.tool_parser, "--enable-auto-tool-choice"),
    ]
    if config.model.template_args:
        arguments += ["--default-chat-template-kwargs", json.dumps(config.model.template_args)]
    if config.serving.reasoning_parser:
        arguments += ["--reasoning-parser", config.serving.reasoning_parser]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    silence(config.rollout.tool_parser)
    # vLLM writes its default, 16, into requests: none can be told from a client's own.
    CompletionRequest.model_fields["max_tokens"].default = None
    gate = _Gate(config, remember)
    try:
        front = FrontEnd(config, generator, gate, healthy)
        with _root_logger_kept():
            app: FastAPI = build_app(args, FrontEnd.tasks, front.model_config)
        await init_app_state(front, app.state, args, FrontEnd.tasks)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"vLLM cannot serve {config.model.path}: {error}") from error
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in ROUTES]
    app.state.openai_serving_models.is_base_model = lambda name: True
    gate.attach(app.state, front.renderer.tokenizer)
    return app


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Undo what a package for SageMaker, which vLLM's application imports, does to the root logger:
    it would show nothing below ERROR, warnings of turnwise included."""
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, own in handlers:
            handler.setLevel(own)


class FrontEnd(AsyncLLM):  # type: ignore[misc]
    """vLLM's front half: it renders, checks and detokenises, and asks a `Generator` for tokens."""

    tasks = ("generate",)

    def __init__(
        self,
        config: Config,
        generator: Generator,
        gate: "_Gate",
        healthy: Callable[[], bool],
    ) -> None:
        arguments = engine_arguments(config.model, config.engine, config.deterministic)
        arguments["generation_config"] = "vllm"  # no defaults but ours
        self.vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.scheduler_config = self.vllm_config.scheduler_config
        self.observability_config = self.vllm_config.observability_config
        self.log_requests = self.log_stats = False
        self.admission_stats = self.logger_manager = self.output_handler = None
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self.engine_core = _Core(generator, self.output_processor, gate)
        self._supported_tasks = self.tasks
        self._sampling = config.sampling
        self._healthy = healthy
        self._run_output_handler()

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        if params.prompt_logprobs is not None:
            raise VLLMValidationError("log-probs of the prompt (prompt_logprobs) are not served")
        if (call := CALL.get()) is not None:
            sampling = call.session.sampling or self._sampling
            said = () if call.request is None else call.request.model_fields_set
            if "min_tokens" not in said:
                params.min_tokens = min(sampling.min_tokens, params.max_tokens)
            if "ignore_eos" not in said:
                params.ignore_eos = sampling.ignore_eos
        return await super().add_request(request_id, prompt, params, **options)

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        call = CALL.get()
        ids: dict[int, list[int]] = defaultdict(list)
        texts: dict[int, list[str]] = defaultdict(list)
        async with contextlib.aclosing(super().generate(*args, **options)) as outputs:
            async for output in outputs:
                for piece in output.outputs:
                    ids[piece.index].extend(piece.token_ids)
                    texts[piece.index].append(piece.text)
                if output.finished and call is not None:
                    call.texts |= {tuple(ids[i]): "".join(texts[i]) for i in ids}
                yield output

    @property
    def errored(self) -> bool:
        return not self.is_running

    async def check_health(self) -> None:
        if not self._healthy():
            raise EngineDeadError

    async def is_tracing_enabled(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End its tasks; the generator is its owner's."""
        if hasattr(self, "engine_core"):
            self.engine_core.shutdown()
        if (handler := getattr(self, "output_handler", None)) is not None:
            handler.cancel()


class _Core:
    """Stands where vLLM's front half expects its engine's process."""

    def __init__(self, generator: Generator, outputs: OutputProcessor, gate: "_Gate") -> None:
        self._generator = generator
        self._outputs = outputs
        self._gate = gate
        self._queue: asyncio.Queue[tuple[int, EngineCoreOutput]] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: tuple[int, EngineCoreOutput] | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._tasks[request.request_id] = asyncio.create_task(self._run(request, CALL.get()))

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """What has come in since the last call, as far as it has one weight version."""
        version, first = self._held or await self._queue.get()
        outputs, self._held = [first], None
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item[0] != version:
                self._held = item
                break
            outputs.append(item[1])
        return EngineCoreOutputs(outputs=outputs, weight_version=str(version))

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, request: EngineCoreRequest, call: Call | None) -> None:
        params, request_id = request.sampling_params, request.request_id
        sampling = copy.copy(params)
        streamed = params.output_kind == RequestOutputKind.DELTA
        sampling.stream_interval = 1 if streamed else STREAM_INTERVAL
        prompt = list(request.prompt_token_ids)
        chunks: list[Chunk] = []
        if call is not None and call.session.sampling is not None and params.structured_outputs:
            why = (
                "a grammar (a strict tool, or parallel_tool_calls=false) would make the tokens of "
            )
            why += "this training session off-policy: leave it out"
            self._fail(request_id, VLLMValidationError(why))
            self._tasks.pop(request_id, None)
            return
        route = Route(call.session.id, call.session.group) if call is not None else None
        stream = self._generator.stream(prompt, sampling, request_id, params.seed, route)
        try:
            async with contextlib.aclosing(stream) as pieces:
                async for chunk in pieces:
                    chunks.append(chunk)
                    if chunk.finish_reason is not None and call is not None:
                        self._gate.record(call, prompt, chunks)
                    self._pass_on(request_id, params, chunk)
        except (EngineError, DeadlineError) as error:
            self._fail(request_id, GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE))
        except InputError as error:
            self._fail(request_id, VLLMValidationError(str(error)))
        except TrajectoryError as error:  # its own logits processor failed: no try again helps
            self._fail(request_id, GracefulHTTPError(str(error), HTTPStatus.UNPROCESSABLE_ENTITY))
        except asyncio.CancelledError:
            if call is not None and (not chunks or chunks[-1].finish_reason is None):
                call.session.lost_turns += 1
            raise
        except Exception as error:  # told to the one who asked; the others go on
            self._fail(request_id, error)
        finally:
            self._tasks.pop(request_id, None)

    def _pass_on(self, request_id: str, params: Any, chunk: Chunk) -> None:
        """Hand a chunk to vLLM's half, a piece for each weight version in it."""
        count, versions = len(chunk.token_ids), chunk.weight_versions
        edges = [0, *(i for i in range(1, count) if versions[i] != versions[i - 1]), count]
        # A stop string is found again by vLLM's half, which cuts the text before it.
        by_string = isinstance(chunk.stop_reason, str)
        finish = None if chunk.finish_reason is None else _FINISH[chunk.finish_reason]
        for start, end in itertools.pairwise(edges):
            last = end == count
            output = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=chunk.token_ids[start:end],
                new_logprobs=_logprobs(chunk, start, end) if params.logprobs is not None else None,
                finish_reason=finish if last and not by_string else None,
                stop_reason=chunk.stop_reason if last and not by_string else None,
                prefill_stats=PrefillStats(num_cached_tokens=chunk.cached_tokens),
            )
            self._queue.put_nowait((versions[start] if start < end else 0, output))
        if by_string:
            output = EngineCoreOutput(
                request_id, [], finish_reason=finish, stop_reason=chunk.stop_reason
            )
            self._queue.put_nowait((0, output))

    def _fail(self, request_id: str, error: Exception) -> None:
        """Raise the error to the one who asked, and end the request and its siblings (n > 1)."""
        if (state := self._outputs.request_states.get(request_id)) is None:
            return
        state.queue.put(error)
        name = state.parent_req.request_id if state.parent_req is not None else request_id
        for ended in self._outputs.abort_requests([name], internal=True):
            if ended != request_id and (task := self._tasks.get(ended)) is not None:
                task.cancel()


def _logprobs(chunk: Chunk, start: int, end: int) -> LogprobsLists | None:
    if start == end:
        return None
    rows = chunk.alternatives[start:end] or [
        [(token, logprob, 1)]
        for token, logprob in zip(
            chunk.token_ids[start:end], chunk.logprobs[start:end], strict=True
        )
    ]
    # A token that is among the likeliest itself has one entry less: it gets a second one.
    widest = max(map(len, rows))
    rows = [[*row, *row[:1] * (widest - len(row))] for row in rows]
    return LogprobsLists(
        np.array([[token for token, _, _ in row] for row in rows]),
        np.array([[logprob for _, logprob, _ in row] for row in rows]),
        np.array([row[0][2] for row in rows]),
    )


class _Gate:
    """What our two places do: exact prompts in, sampled turns out."""

    def __init__(self, config: Config, remember: Callable[[str, Session], None]) -> None:
        self._config = config
        self.remember = remember

    def attach(self, state: Any, tokenizer: Any) -> None:
        """Put them into vLLM's application."""
        self._tokenizer = tokenizer
        self._base_template = load_template(self._config, tokenizer)
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._chat = state.openai_serving_chat
        renderer = state.online_renderer
        renderer.preprocess_chat = self._rendering(renderer.preprocess_chat)
        renderer.render_completion = self._completing(renderer.render_completion)
        self._chat.create_chat_completion = self._responding(self._chat.create_chat_completion)

    def _rendering(self, preprocess_chat: Any) -> Any:
        async def preprocess(request: Any, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
            call, tools = CALL.get(), kwargs.get("tool_dicts")
            if call is not None:
                messages = [dict(message) for message in messages]
                call.request, call.messages, call.tools = request, messages, tools
                self._settle_sampling(call)
                if not getattr(request, "tools", None) and request.tool_choice is None:
                    request.tool_choice = "none"  # or vLLM takes calls out of the answer's text
                try:
                    ids = await self._exact_prompt(call)
                except VLLMError:
                    raise
                except Exception as error:  # messages are the client's, and may be anything
                    raise VLLMValidationError(
                        f"messages cannot be read: {type(error).__name__}: {error}",
                        parameter="messages",
                    ) from error
                if ids is not None:
                    kept = getattr(request, "kv_transfer_params", None) or {}
                    request.kv_transfer_params = {**kept, "prompt_token_ids": ids}
            return await preprocess_chat(request, messages, *args, **kwargs)

        return preprocess

    def _completing(self, render_completion: Any) -> Any:
        async def render(request: Any, **kwargs: Any) -> Any:
            call = CALL.get()
            if call is not None:
                call.request = request
                self._settle_sampling(call)
            return await render_completion(request, **kwargs)

        return render

    def _settle_sampling(self, call: Call) -> None:
        """Decide how a request samples.

        Raises:
            VLLMValidationError: naming the parameter that cannot be served.
        """
        own, request, config = call.session.sampling, call.request, self._config
        sampling = own or config.sampling
        try:
            bound_choices(request)
            if own is not None:
                keep_on_policy(request, own)
            choose_processors(request, sampling, config.engine.logits_processors_allowed)
        except RefusedParameter as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from error
        give_defaults(request, sampling, config.model.max_length)

    async def _exact_prompt(self, call: Call) -> list[int] | None:
        """The ids of a conversation that continues what was sampled; None if vLLM may render it.

        Raises:
            VLLMValidationError: when ids that came with the request do not fit its messages.
        """
        template = self._template(call.request)
        required = getattr(call.request, "required_prefix_token_ids", None)
        if required is not None:
            ids = _token_ids(required, "required_prefix_token_ids")
            return await off_loop(call.messages, lambda: self._spliced(call, template, ids))
        prompt = call.prompt = await off_loop(
            call.messages, lambda: call.session.next_prompt(call.messages, call.tools, template)
        )
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.fork_reason == "message_dropped" and call.session.sampling is not None:
            raise VLLMValidationError("the model's chat template leaves out one of these messages")
        return self._echoed(call, template) or await self._escaped(call, template)

    async def _escaped(self, call: Call, template: ChatTemplate) -> list[int] | None:
        """The prompt of a conversation in which special tokens have to be escaped."""
        messages = [plain(message) for message in call.messages]
        others = [message for message in messages if message["role"] != "assistant"]
        if all(template.escape(m["content"]) == m["content"] for m in others):
            return None
        return await off_loop(messages, lambda: template.render(messages, tools=call.tools))

    def _spliced(self, call: Call, template: ChatTemplate, required: list[int]) -> list[int]:
        messages = [plain(message) for message in call.messages]
        ends = [i for i, m in enumerate(messages, start=1) if m["role"] == "assistant"]
        before = messages[: ends[-1]] if ends else []
        try:
            return replace_prefix_tokens(
                self._tokenizer,
                required,
                template.render(before, tools=call.tools, add_generation_prompt=False)
                if before
                else [],
                template.render(messages, tools=call.tools),
            )
        except TrajectoryError as error:
            raise VLLMValidationError(
                f"required_prefix_token_ids: {error}", parameter="required_prefix_token_ids"
            ) from error

    def _echoed(self, call: Call, template: ChatTemplate) -> list[int] | None:
        """The prompt that follows the last assistant message which carries its own ids."""
        for index in range(len(call.messages) - 2, -1, -1):
            message = call.messages[index]
            if message["role"] == "assistant" and message.get("generation_token_ids"):
                bridged = bridge(
                    template,
                    prompt_token_ids=_token_ids(
                        message.get("prompt_token_ids"), "prompt_token_ids"
                    ),
                    completion_token_ids=_token_ids(
                        message["generation_token_ids"], "generation_token_ids"
                    ),
                    new_messages=[plain(m) for m in call.messages[index + 1 :]],
                    tools=call.tools,
                )
                if bridged.fork_reason:
                    call.prompt = Prompt(None, bridged.fork_reason)
                return bridged.token_ids
        return None

    def _template(self, request: Any) -> ChatTemplate:
        """The template with the variables of a request; it shares all else with the others."""
        own = getattr(request, "chat_template_kwargs", None)
        if not own:
            return self._base_template
        key = json.dumps(own, sort_keys=True, default=str)
        if key not in self._templates:
            self._templates[key] = self._base_template.with_variables(**own)
            if len(self._templates) > _TEMPLATES:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key]

    def record(self, call: Call, prompt: list[int], chunks: Sequence[Chunk]) -> None:
        """Add a finished completion to its session."""
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        versions = [version for chunk in chunks for version in chunk.weight_versions]
        call.finished[tuple(token_ids)] = logprobs, versions
        call.session.record(
            prompt,
            token_ids,
            logprobs,
            versions,
            str(chunks[-1].finish_reason),
            messages=call.messages,
            tools=call.tools,
            answer=lambda: self._parse(call, token_ids),
            prompt=call.prompt,
        )

    def _parse(self, call: Call, token_ids: list[int]) -> Answer:
        """What an answer says, read as vLLM reads it for the client."""
        text = call.texts.get(tuple(token_ids))
        if text is None:  # the client did not wait for it
            text = self._template(call.request).decode(token_ids)
        chat = self._chat
        if chat.parser_cls is None or not hasattr(call.request, "tool_choice"):
            return answer(text, ())
        try:
            parser = chat._make_parser(call.request, self._tokenizer, {})
            _, content, calls = parser.parse(
                text, call.request, enable_auto_tools=True, model_output_token_ids=token_ids
            )
        except Exception:  # the client was told; to the session it is text
            logger.debug("an answer cannot be read", exc_info=True)
            return answer(text, ())
        return answer(content, [(call.name, call.arguments) for call in calls or ()])

    def _responding(self, create_chat_completion: Any) -> Any:
        async def create(request: Any, raw_request: Any = None) -> Any:
            response = await create_chat_completion(request, raw_request)
            call = CALL.get()
            if call is None or raw_request is None:
                return response
            metadata = getattr(raw_request.state, "request_metadata", None)
            if metadata is not None:
                self.remember(metadata.request_id, call.session)
            if isinstance(response, ChatCompletionResponse) and request.return_token_ids:
                for choice in response.choices:
                    self._show_tokens(call, choice, response.prompt_token_ids)
            return response

        return create

    def _show_tokens(self, call: Call, choice: Any, prompt_token_ids: list[int]) -> None:
        """Put what a client may echo into its message."""
        logprobs, versions = call.finished[tuple(choice.token_ids)]
        choice.message.prompt_token_ids = prompt_token_ids
        choice.message.generation_token_ids = choice.token_ids
        choice.message.generation_log_probs = logprobs
        choice.message.weight_versions = versions


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise VLLMValidationError(f"{name} must be a list of token ids", parameter=name)
    return value
