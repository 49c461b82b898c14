"""Requests of nothing but token ids and log-probs, without vLLM's frontend.

vLLM's frontend (`AsyncLLM.generate`) has a detokenizer, log-probs by rank and an object for each
output, and wakes its caller for each of them. A request of token ids needs none of that: here, the
outputs of the engine's process become chunks at once. All other requests, such as those with stop
strings, pass through vLLM's frontend as before.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, cast

from turnwise.core.deadlines import StallClock
from turnwise.engine.adapters import LoadedAdapter
from turnwise.engine.protocol import Chunk, FinishReason
from turnwise.engine.vllm_requests import version_of
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from turnwise.internals import vllm


class TokenStreams:
    """The requests of one engine that do without vLLM's frontend; the clock notes each output as
    progress."""

    def __init__(self, llm: "vllm.AsyncLLM", clock: StallClock) -> None:
        from turnwise.internals import vllm  # seconds to import

        self._vllm = vllm
        self._llm = weakref.proxy(llm)  # its output processor refers to this object
        self._clock = clock
        self._numbers = itertools.count()
        self._streams: dict[str, TokenStream] = {}  # unfinished requests by vLLM's internal id
        self._outputs = llm.output_processor
        self._process, self._propagate = vllm.divert_outputs(llm, self._receive, self._fail)
        config = llm.vllm_config
        self._usable = not (
            config.aux_output_config.enabled
            or config.scheduler_config.max_num_queued_reqs is not None
            or config.scheduler_config.max_num_queued_tokens is not None
            or config.watermark_config is not None
            or self._outputs.tracing_enabled
        )

    def take(self, params: "vllm.SamplingParams") -> bool:
        """Return whether a request can do without vLLM's frontend."""
        return (
            self._usable
            and params.logprobs == 0
            and params.prompt_logprobs is None
            and not params.detokenize
        )

    async def chunks(
        self,
        inputs: "vllm.TokensInput",
        params: "vllm.SamplingParams",
        request_id: str,
        adapter: LoadedAdapter | None,
        watching: Callable[[], AbstractAsyncContextManager[object]],
    ) -> AsyncGenerator[Chunk, None]:
        """Send a request to the engine's process, and yield its chunks; closing aborts it.
        `watching` limits the wait for a chunk."""
        llm = self._llm
        if llm.errored:
            raise self._vllm.EngineDeadError
        request = llm.input_processor.process_inputs(
            request_id,
            inputs,
            params,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=adapter.request if adapter is not None else None,
        )
        request.external_req_id = request_id
        request.request_id = f"{request_id}-ids-{next(self._numbers)}"
        self._vllm.read_outputs(llm)
        stats = None
        if self._outputs.log_stats:
            stats = self._vllm.RequestStateStats(arrival_time=request.arrival_time)
        stream = TokenStream(request, adapter.version if adapter is not None else None, stats)
        self._streams[request.request_id] = stream
        try:
            await llm.engine_core.add_request_async(request)
        except BaseException:
            self._streams.pop(request.request_id, None)
            raise
        try:
            finished = False
            while not finished:
                async with watching():
                    chunk = await stream.next()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if self._streams.pop(stream.request_id, None) is not None:  # it has not ended
                await self._abort([stream])

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with finish reason `abort`; unknown ones are ignored."""
        named = {*request_ids}
        ended = [each for each in self._streams.values() if each.external_req_id in named]
        for stream in ended:
            del self._streams[stream.request_id]
            stream.end("abort")
        await self._abort(ended)

    async def _abort(self, streams: "Sequence[TokenStream]") -> None:
        for stream in streams:
            self._outputs.lora_states.request_finished(stream.request_id, stream.lora_name)
        await self._llm.engine_core.abort_requests_async([each.request_id for each in streams])

    def _receive(
        self,
        outputs: "list[vllm.EngineCoreOutput]",
        timestamp: float | None = None,
        stats: "vllm.IterationStats | None" = None,
        weight_version: str | None = None,
    ) -> "vllm.OutputProcessorOutput":
        """Pass the engine's outputs on, in place of vLLM's `process_outputs`."""
        self._clock.moved()
        others = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                others.append(output)
                continue
            if stats is not None:  # counted with the times of all its tokens
                times = (output.kv_transfer_params or {}).get(self._vllm.TIMES)
                assert stream.stats is not None
                before, first = stream.stats.last_token_ts, stream.is_prefilling
                when = times[-1] if times else timestamp
                self._vllm.count_output(self._outputs, stream, output, when, stats)
                if times and not first:
                    stats.inter_token_latencies_iter[-1:] = [
                        after - earlier for earlier, after in itertools.pairwise([before, *times])
                    ]
            stream.add(output, weight_version)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
                self._vllm.count_end(self._outputs, stream, output.finish_reason, stats)
        return self._process(others, timestamp, stats, weight_version=weight_version)

    def _fail(self, error: Exception) -> None:
        """Raise an error from all requests, in place of vLLM's `propagate_error`."""
        shown = error
        if not isinstance(error, self._vllm.EngineDeadError):
            shown = self._vllm.EngineGenerateError()
            shown.__cause__ = error
        for stream in self._streams.values():
            stream.fail(shown)
        self._streams.clear()
        self._propagate(error)


class TokenStream:
    """The chunks of one request; the public attributes are those that vLLM's statistics read.

    Args:
        version: Version of the adapter that samples all tokens; None if the weights' counts.
    """

    parent_req = None

    def __init__(
        self,
        request: "vllm.EngineCoreRequest",
        version: int | None,
        stats: "vllm.RequestStateStats | None",
    ) -> None:
        params, lora = request.sampling_params, request.lora_request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.lora_name = lora.lora_name if lora is not None else None
        self.prompt_len = len(request.prompt_token_ids)
        self.max_tokens_param = params.max_tokens
        self.is_prefilling = True
        self.num_cached_tokens = self._stored = 0
        self.stats = stats
        self._version = version
        self._interval = params.stream_interval or 1
        self._first: float | None = None
        self._chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    async def next(self) -> Chunk:
        """Wait for `stream_interval` tokens, or the end; raises the error that ended the
        request."""
        chunk = await self._chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def add(self, output: "vllm.EngineCoreOutput", label: str | None) -> None:
        """Add an output; a chunk follows once it has enough tokens."""
        token_ids, rows = output.new_token_ids, output.new_logprobs
        logprobs = [] if rows is None else rows.logprobs[:, 0].tolist()
        if len(logprobs) != len(token_ids):
            found = f"{len(logprobs)} log-probs for {len(token_ids)} tokens"
            return self.fail(EngineError(f"vLLM gave {found}"))
        if token_ids:
            if self._version is None and label is None:
                return self.fail(EngineError("vLLM did not report the weights of its tokens"))
            version = version_of(label or "") if self._version is None else self._version
            self._token_ids += token_ids
            self._logprobs += logprobs
            self._versions += [version] * len(token_ids)
            if self._first is None:
                self._first = asyncio.get_running_loop().time()
        if self.is_prefilling:
            self.is_prefilling = False
            if output.prefill_stats is not None:
                self.num_cached_tokens = output.prefill_stats.num_cached_tokens
                self._stored = output.prefill_stats.num_cache_creation_tokens
        if output.finish_reason is not None:
            self.end(str(output.finish_reason), output.stop_reason)
        elif len(self._token_ids) >= self._interval:
            self._put(None, None)

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request with the tokens so far."""
        if reason == "error":
            self.fail(EngineError(f"vLLM failed in request {self.external_req_id}"))
        else:
            self._put(cast(FinishReason, reason), stop_reason)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._chunks.put_nowait(error)

    def _put(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        age = None if self._first is None else asyncio.get_running_loop().time() - self._first
        queued = None
        if self.stats is not None:
            queued = max(0.0, self.stats.scheduled_ts - self.stats.queued_ts)
        chunk = Chunk(
            self._token_ids,
            self._logprobs,
            self._versions,
            reason,
            stop_reason,
            self.num_cached_tokens,
            first_token_age=age,
            queued=queued,
            stored_tokens=self._stored,
        )
        self._chunks.put_nowait(chunk)
        self._token_ids, self._logprobs, self._versions = [], [], []
