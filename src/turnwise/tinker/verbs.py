"""The protocol's routes below /api/v1, and the verbs that answer them."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from turnwise.core.json_types import JsonObject
from turnwise.tinker.service import TinkerService

CONSTANT: Mapping[str, JsonObject] = {
    "client/config": {
        "pjwt_auth_enabled": True,  # the SDK reads `whoami` from its token
        "parallel_fwdbwd_chunks": False,  # in their order, so that one that must wait fills no gap
        "proto_compress_fwdbwd": False,
        # Its polls could not tell a client which samples a server that was killed has lost.
        "sample_use_retrieve_futures": False,
        "sample_max_concurrent_requests": 400,  # of a client: each holds a connection
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,  # the SDK computes them from the log-probs
    },
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},  # and dropped
}
"""Answers of routes that are always the same: flags of the SDK, as this server needs them."""
Verb = Callable[[TinkerService, str, JsonObject], Awaitable[JsonObject]]
POST: Mapping[str, Verb] = {
    "create_session": TinkerService.create_session,
    "session_heartbeat": TinkerService.heartbeat,
    "sessions/{session_id}/finish": TinkerService.finish,
    "create_model": TinkerService.create_model,
    "get_info": TinkerService.get_info,
    "optim_step": partial(TinkerService.in_turn, work=TinkerService.step),
    "save_weights_for_sampler": partial(TinkerService.in_turn, work=TinkerService.save_for_sampler),
    "save_weights": partial(TinkerService.in_turn, work=TinkerService.save_weights),
    "save_weights_external": partial(
        TinkerService.in_turn, work=partial(TinkerService.save_weights, kind="external_weights")
    ),
    "load_weights": TinkerService.load_weights,
    "create_sampling_session": TinkerService.create_sampler,
    "asample": TinkerService.sample,
    "cancel_future": TinkerService.cancel,
}
"""Verbs by their routes below /api/v1, which get the body's values and those of the path."""
GET: Mapping[str, Verb] = {
    "get_server_capabilities": TinkerService.capabilities,
    "samplers/{sampler_id}": TinkerService.get_sampler,
}
