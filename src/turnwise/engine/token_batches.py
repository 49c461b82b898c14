"""Tokens that an engine's process sends together.

vLLM's engine sends each token of each request by itself, with three arrays for its log-prob, and
the frontend collects `stream_interval` of them. Here the engine's process collects them, which
saves both most of that work. `vllm_api`, which each process of an engine imports, installs it.

A request's first token and its end are sent at once, as before. All collected tokens are sent
before the process handles anything but a new request: before a pause, an abort or an update, so
that they keep the version of the weights that sampled them. If vLLM's statistics are collected,
tokens that waited bring their times along.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from turnwise.engine.vllm_api import EngineCoreOutput, EngineCoreOutputs, Request

TIMES = "turnwise_times"
"""Key in `kv_transfer_params` of outputs that waited: the time of each step, on the engine's
monotonic clock."""
_UNHELD = (
    "finish_reason",
    "prefill_stats",  # comes with the first token
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "events",
    "kv_transfer_params",
    "ec_transfer_params",
    "trace_headers",
    "routed_experts",
    "mm_cache_miss_hashes",
    "new_sampling_mask",
    "spec_decode_metrics",
    "prompt_token_id_logprobs",
)
"""Fields that are None in an output with nothing but tokens and their log-probs."""


class TokenBatches:
    """The tokens that one engine's process has not sent yet.

    Args:
        requests: The scheduler's requests, by id.
        timed: Whether vLLM's statistics are collected.

    Example:
        batches = TokenBatches(core.scheduler.requests)
        batches.collect(step)
    """

    def __init__(self, requests: "Mapping[str, Request]", timed: bool = False) -> None:
        self._requests = requests
        self._timed = timed
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._times: dict[str, list[float]] = {}
        """The time of each output in `_held`."""
        self._clients: dict[str, int] = {}
        """Number of the client of each request in `_held`."""
        self._version: str | None = None
        """Version of the weights that sampled all held tokens."""

    def collect(self, step: "dict[int, EngineCoreOutputs]") -> None:
        """Take the tokens that can wait out of a step's outputs, and add those that waited.

        Args:
            step: Outputs of one step, with the version of their weights, by client.
        """
        for client, outputs in list(step.items()):
            self._version = outputs.weight_version
            outputs.outputs = [
                sent
                for output in outputs.outputs
                for sent in self._due(client, output, outputs.timestamp)
            ]
            if not (outputs.outputs or outputs.scheduler_stats or outputs.finished_requests):
                del step[client]

    def release(self, send: "Callable[[tuple[int, EngineCoreOutputs]], None]") -> None:
        """Send all held tokens.

        Args:
            send: Called with the number of a client, and its outputs.
        """
        from turnwise.engine import vllm_api as vllm  # imports this module

        for request_id, client in list(self._clients.items()):
            outputs = [self._take(request_id)]
            send((client, vllm.EngineCoreOutputs(outputs=outputs, weight_version=self._version)))

    def _due(
        self, client: int, output: "EngineCoreOutput", time: float
    ) -> "list[EngineCoreOutput]":
        """Return what has to be sent now that this output has come."""
        request_id = output.request_id
        held = self._held.get(request_id)
        interval = self._interval(output)
        if interval == 1:
            return [output] if held is None else [self._take(request_id), output]
        if held is None:
            held = self._held[request_id] = []
            self._times[request_id] = []
            self._clients[request_id] = client
        held.append(output)
        self._times[request_id].append(time)
        if sum(len(each.new_token_ids) for each in held) < interval:
            return []
        return [self._take(request_id)]

    def _take(self, request_id: str) -> "EngineCoreOutput":
        """Remove a request's held tokens, and return them as one output."""
        del self._clients[request_id]
        joined, times = _joined(self._held.pop(request_id)), self._times.pop(request_id)
        if self._timed:
            joined.kv_transfer_params = {TIMES: times}
        return joined

    def _interval(self, output: "EngineCoreOutput") -> int:
        """Return the number of tokens after which a request's are sent; 1 sends this at once."""
        request = self._requests.get(output.request_id)
        params = None if request is None else request.sampling_params
        if (
            params is None
            or params.detokenize  # stop strings are found in the frontend
            or output.num_nans_in_logits
            or any(getattr(output, name) is not None for name in _UNHELD)
        ):
            return 1
        return params.stream_interval or 1


def _joined(held: "list[EngineCoreOutput]") -> "EngineCoreOutput":
    """Return one output with the tokens of several."""
    from turnwise.engine import vllm_api as vllm  # imports this module

    if len(held) == 1:
        return held[0]
    rows = [output.new_logprobs for output in held if output.new_logprobs is not None]
    logprobs = None
    if rows:
        # A step's rows are as wide as the request in it that asked for most log-probs.
        width = min(each.logprobs.shape[1] for each in rows)
        columns = zip(
            *((each[0][:, :width], each[1][:, :width], each[2]) for each in rows), strict=True
        )
        logprobs = vllm.LogprobsLists(*(np.concatenate(column) for column in columns))
    tokens = [token for output in held for token in output.new_token_ids]
    return vllm.EngineCoreOutput(held[0].request_id, tokens, logprobs)
