"""Conversion of requests to vLLM's parameters, and of vLLM's outputs to chunks.

vLLM's frontend (`AsyncLLM.generate`) detokenizes, ranks log-probs, makes an object for each output
and wakes its caller for each output. A request that only wants token ids does not need any of this,
so its outputs from the engine's process become chunks directly. All other requests, such as
requests with stop strings, pass through the frontend. Importing this module does not import vLLM.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, cast

from turnwise.config import SamplingConfig
from turnwise.core.deadlines import StallClock
from turnwise.engine.adapters import LoadedAdapter
from turnwise.engine.logits_processors import extra_args
from turnwise.engine.protocol import (
    STREAM_INTERVAL,
    Alternatives,
    Chunk,
    FinishReason,
    Request,
    Sampling,
    join,
)
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from turnwise.internals import vllm

_Watching = Callable[[], AbstractAsyncContextManager[object]]  # limits the wait for a chunk


def sampling_params(sampling: Sampling, seed: int | None) -> "vllm.SamplingParams":
    """Return vLLM's sampling parameters for a streamed request. If `sampling` is already a
    `SamplingParams` of vLLM, it is changed in place."""
    from turnwise.internals import vllm  # seconds to import

    if isinstance(sampling, SamplingConfig):
        params = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=sampling.stop or None,
            stop_token_ids=sampling.stop_token_ids or None,
            ignore_eos=sampling.ignore_eos,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            extra_args=extra_args(sampling) or None,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            skip_clone=True,  # no other request uses this object
        )
        params.stream_interval = STREAM_INTERVAL
    else:
        params = sampling
        if not params.logprob_token_ids:  # with these, vLLM returns the sampled token's log-prob
            params.logprobs = params.logprobs or 0
        params.flat_logprobs = True
        params.detokenize = bool(params.stop)
    params.output_kind = vllm.RequestOutputKind.DELTA
    return params


class TokenStreams:
    """The requests of one engine. Each output counts as progress for the clock."""

    def __init__(self, llm: "vllm.AsyncLLM", clock: StallClock) -> None:
        from turnwise.internals import vllm  # seconds to import

        self._vllm = vllm
        self._llm = weakref.proxy(llm)  # avoids a cycle: llm's output processor refers to self
        self._clock = clock
        self._numbers = itertools.count()
        self._streams: dict[str, _Stream] = {}
        """Unfinished requests that bypass the frontend, by vLLM's internal id."""
        self._outputs = llm.output_processor
        self._process, self._propagate = vllm.divert_outputs(llm, self._receive, self._fail)
        config = llm.vllm_config
        self._direct = not (
            config.aux_output_config.enabled
            or config.scheduler_config.max_num_queued_reqs is not None
            or config.scheduler_config.max_num_queued_tokens is not None
            or config.watermark_config is not None
            or self._outputs.tracing_enabled
        )

    def chunks(
        self,
        inputs: "vllm.TokensInput",
        params: "vllm.SamplingParams",
        asked: Request,
        adapter: LoadedAdapter | None,
        watching: _Watching,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a new request; closing the generator aborts the request."""
        plain = params.logprobs == 0 and params.prompt_logprobs is None and not params.detokenize
        run = self._direct_chunks if self._direct and plain else self._frontend_chunks
        return run(inputs, params, asked, adapter, watching)

    async def _direct_chunks(
        self,
        inputs: "vllm.TokensInput",
        params: "vllm.SamplingParams",
        asked: Request,
        adapter: LoadedAdapter | None,
        watching: _Watching,
    ) -> AsyncGenerator[Chunk, None]:
        llm = self._llm
        if llm.errored:
            raise self._vllm.EngineDeadError
        request = llm.input_processor.process_inputs(
            asked.id,
            inputs,
            params,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=adapter.request if adapter is not None else None,
            priority=self._vllm.URGENT if asked.urgent else 0,
        )
        request.external_req_id = asked.id
        request.request_id = f"{asked.id}-ids-{next(self._numbers)}"
        self._vllm.read_outputs(llm)
        stats = None
        if self._outputs.log_stats:
            stats = self._vllm.RequestStateStats(arrival_time=request.arrival_time)
        stream = _Stream(request, adapter.version if adapter is not None else None, stats)
        self._streams[stream.request_id] = stream
        try:
            await llm.engine_core.add_request_async(request)
        except BaseException:
            self._streams.pop(stream.request_id, None)
            raise
        try:
            finished = False
            while not finished:
                async with watching():
                    chunk = await stream.chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if self._streams.pop(stream.request_id, None) is not None:  # the request has not ended
                await self._abort([stream])

    async def _frontend_chunks(
        self,
        inputs: "vllm.TokensInput",
        params: "vllm.SamplingParams",
        asked: Request,
        adapter: LoadedAdapter | None,
        watching: _Watching,
    ) -> AsyncGenerator[Chunk, None]:
        interval, params.stream_interval = params.stream_interval or 1, None
        clock = asyncio.get_running_loop().time
        sampled, few = 0, list[Chunk]()
        first: float | None = None
        lora, versions = (adapter.request, adapter.spans()) if adapter is not None else (None, None)
        priority = self._vllm.URGENT if asked.urgent else 0
        stream = self._llm.generate(inputs, params, asked.id, lora_request=lora, priority=priority)
        async with aclosing(stream) as outputs:
            while True:
                async with watching():
                    output = await anext(outputs, None)
                if output is None:
                    return
                piece = output.outputs[0]
                finished = piece.finish_reason is not None
                labels = versions or piece.weight_versions
                if not versions and not finished:
                    labels = self._vllm.weight_versions_so_far(self._llm, asked.id)
                if first is None and piece.token_ids:
                    first = clock()
                age = None if first is None else clock() - first
                few.append(make_chunk(output, labels or (), sampled, age))
                sampled += len(piece.token_ids)
                if finished or sum(len(chunk.token_ids) for chunk in few) >= interval:
                    yield join(few) if len(few) > 1 else few[0]
                    few = []
                if finished:
                    return

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with finish reason `abort`; ignore unknown ids."""
        named = {*request_ids}
        ended = [each for each in self._streams.values() if each.external_req_id in named]
        for stream in ended:
            del self._streams[stream.request_id]
            stream.end("abort")
        await self._abort(ended)
        await self._llm.abort(list(named))

    async def _abort(self, streams: "Sequence[_Stream]") -> None:
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
        """Pass the engine's outputs on; called in place of vLLM's `process_outputs`."""
        self._clock.moved()
        others = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                others.append(output)
                continue
            if stats is not None:  # an output of collected tokens has the time of each token
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
        """Make all requests raise an error; called in place of vLLM's `propagate_error`."""
        shown = error
        if not isinstance(error, self._vllm.EngineDeadError):
            shown = self._vllm.EngineGenerateError()
            shown.__cause__ = error
        for stream in self._streams.values():
            stream.chunks.put_nowait(shown)
        self._streams.clear()
        self._propagate(error)


class _Stream:
    """The chunks of one request. vLLM's functions for statistics read some of the attributes.

    Args:
        version: Version of the adapter that samples all tokens; None to use the weights' version.
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
        self.chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        """Chunks of `stream_interval` tokens each, or an error that ends the request."""
        self._version = version
        self._interval = params.stream_interval or 1
        self._first: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def add(self, output: "vllm.EngineCoreOutput", label: str | None) -> None:
        """Add an output; queue a chunk once there are enough tokens, or the request has ended."""
        token_ids, rows = output.new_token_ids, output.new_logprobs
        logprobs = [] if rows is None else rows.logprobs[:, 0].tolist()
        if len(logprobs) != len(token_ids):
            found = f"{len(logprobs)} log-probs for {len(token_ids)} tokens"
            return self.chunks.put_nowait(EngineError(f"vLLM gave {found}"))
        if token_ids:
            version = self._version
            if version is None:
                if label is None:
                    why = "vLLM did not report the weights of its tokens"
                    return self.chunks.put_nowait(EngineError(why))
                version = _version_of(label)
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
            self.end(None)

    def end(self, reason: str | None, stop_reason: int | str | None = None) -> None:
        """Queue a chunk of the tokens so far. With a reason, this is the request's last chunk."""
        if reason == "error":
            error = EngineError(f"vLLM failed in request {self.external_req_id}")
            return self.chunks.put_nowait(error)
        age = None if self._first is None else asyncio.get_running_loop().time() - self._first
        queued = None
        if self.stats is not None:
            queued = max(0.0, self.stats.scheduled_ts - self.stats.queued_ts)
        chunk = Chunk(
            self._token_ids,
            self._logprobs,
            self._versions,
            cast(FinishReason | None, reason),
            stop_reason,
            self.num_cached_tokens,
            first_token_age=age,
            queued=queued,
            stored_tokens=self._stored,
        )
        self.chunks.put_nowait(chunk)
        self._token_ids, self._logprobs, self._versions = [], [], []


def make_chunk(
    output: "vllm.RequestOutput",
    labels: Iterable["vllm.WeightVersionSpan"],
    start: int,
    first_token_age: float | None = None,
) -> Chunk:
    """Convert one output of vLLM. Raise EngineError when the request failed, or log-probs or weight
    versions are missing.

    Args:
        labels: Spans of weight versions, with positions from the completion's start.
        start: Number of the completion's tokens before this output.
    """
    piece = output.outputs[0]
    if piece.finish_reason == "error":
        raise EngineError(f"vLLM failed in request {output.request_id}")
    token_ids = list(piece.token_ids)
    flat = piece.logprobs
    logprobs: list[float] = []
    alternatives: Alternatives = []
    if token_ids and flat is not None:
        logprobs = [flat.logprobs[index] for index in flat.start_indices]
        if len(flat.logprobs) > len(logprobs):
            alternatives = _alternatives(flat)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    end = start + len(token_ids)
    versions = [
        _version_of(span.version)
        for span in labels
        for _ in range(max(span.start, start), min(span.end, end))
    ]
    if len(versions) != len(token_ids):
        raise EngineError(
            f"vLLM reported the weights of {len(versions)} of {len(token_ids)} tokens"
        )
    experts, rows_NLK = b"", piece.routed_experts  # used only if vLLM has a row for every token
    if rows_NLK is not None and len(rows_NLK) == len(output.prompt_token_ids) + end - 1:
        experts = bytes(rows_NLK.tobytes())
    stats = output.metrics
    scored = _alternatives(output.prompt_logprobs) if output.prompt_logprobs else []
    return Chunk(
        token_ids,
        logprobs,
        versions,
        cast(FinishReason | None, piece.finish_reason),
        piece.stop_reason,
        output.num_cached_tokens or 0,
        [ranked[0][1] if ranked else None for ranked in scored] or None,
        alternatives,
        scored[1:],
        first_token_age,
        None if stats is None else max(0.0, stats.scheduled_ts - stats.queued_ts),
        experts=experts,
        stored_tokens=output.num_cache_creation_tokens or 0,
    )


def _alternatives(flat: "vllm.FlatLogprobs") -> Alternatives:
    """Return the alternatives at each position; at a prompt's first position the list is empty."""
    ranked = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
    bounds = zip(flat.start_indices, flat.end_indices, strict=True)
    return [ranked[first:last] for first, last in bounds]


def _version_of(label: str) -> int:
    """Return the version in a label. vLLM labels the weights from the model's files "default"."""
    return 0 if label == "default" else int(label)
