"""The server's state and verbs: sessions, models, sampling sessions and their requests.

Each method in `VERBS` answers one route: it gets the caller's owner and the body's values, and
returns plain values. Whatever takes a while becomes a request of `Futures`. Ids of sessions are
random; those of models and sampling sessions are made of them, so that a client can repeat any
request. Nothing is found with another owner's key.
"""

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, together
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Completion, Generator, Request, Route, generate
from turnwise.errors import EngineError, InputError, TurnwiseError
from turnwise.tinker import requests
from turnwise.tinker.checkpoints import Checkpoint, Checkpoints
from turnwise.tinker.futures import (
    SMALLEST,
    WAIT_SECONDS,
    Busy,
    Futures,
    Gone,
    Missing,
    Reply,
    Turns,
    Work,
)
from turnwise.tinker.wire import Array, TrainingRequest, sample_reply, training_reply

logger = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", bound=BaseModel)
_SILENT_SECONDS = 900.0
"""Time without a heartbeat, which clients send every 10 s, after which a session ends."""
_LOOK_SECONDS = 30.0
_MOST_SESSIONS = 1000
"""Sessions of one owner, beyond which those that are silent for `_QUIET_SECONDS` end."""
_QUIET_SECONDS = 120.0
_UNUSED_SECONDS = 3600.0
"""Time without a sample after which weights that have no name are removed, if there are newer ones
of their model: a loop saves some at every step."""
_CLONE = 10**9  # the SDK's: copies of a sampler count their requests from multiples of it
_HEAD = (
    "this server trains no adapter of the output head: train_unembed has no effect, because "
    "engines could not score prompts beside it"
)


@dataclass(slots=True, eq=False)
class Session:
    """One client, until it ends or is silent for too long."""

    id: str
    owner: str
    user_metadata: JsonObject | None = None
    display_name: str | None = None
    seen: float = field(default_factory=time.monotonic)
    """Time of the last request or heartbeat."""


@dataclass(slots=True, eq=False)
class Model:
    """An adapter in training."""

    id: str
    session: Session
    spec: requests.AdapterSpec
    user_metadata: JsonObject | None
    turns: Turns = field(default_factory=Turns)
    version: int = 0
    """Number of optimizer steps."""


@dataclass(slots=True, eq=False)
class Sampler:
    """A sampling session: the base model, or a saved adapter on it."""

    id: str
    session: Session
    checkpoint: Checkpoint | None = None
    temporary: bool = False
    """Whether the checkpoint has no name, and ends with the session."""
    seen: float = field(default_factory=time.monotonic)
    """Time of the last request."""


Ask = Callable[..., Awaitable[Foreign]]
"""Calls a method of `AdapterRank` by its name, with the name of an adapter; one call at a time."""


class TinkerService:
    """One server's sessions, models and samplers.

    Args:
        generator: The engines.
        ask: The trainer.
        vocabulary: Number of ids that the model knows.
        folder: The run's folder; checkpoints are in `tinker` below it.
    """

    def __init__(
        self, config: Config, generator: Generator, ask: Ask, vocabulary: int, folder: Path
    ) -> None:
        path = config.model.path
        self.model_name = config.serving.served_model_name or path
        self.futures = Futures()
        self.checkpoints = Checkpoints(folder / "tinker")
        self._names = {self.model_name, path, Path(path).name}
        self._tokenizer = config.model.tokenizer or path
        self._config = config
        self._generator, self._trainer, self._vocabulary = generator, ask, vocabulary
        self._trainer_turn = asyncio.Lock()
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}

    async def watch(self) -> None:
        """End sessions of clients that have vanished, without end."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._end_silent(_SILENT_SECONDS)
            await self._remove_unused()

    async def _end_silent(self, seconds: float, owner: str | None = None) -> None:
        """End sessions that are silent for some time, all or an owner's, all at once: each has its
        turn at the trainer to wait for."""
        oldest = time.monotonic() - seconds
        silent = [
            each
            for each in self._sessions.values()
            if each.seen < oldest and owner in (None, each.owner)
        ]
        for session in silent:
            logger.info("the Tinker session %s is silent, and ends", session.id)
        await together(self._end(session) for session in silent)

    async def _make_room(self, owner: str) -> None:
        """Let an owner have one session more; `Busy` if all of too many are alive."""
        for _ in range(2):
            if sum(each.owner == owner for each in self._sessions.values()) < _MOST_SESSIONS:
                return
            await self._end_silent(_QUIET_SECONDS, owner)
        raise Busy(f"you have {_MOST_SESSIONS:,} sessions: close some, or wait until some end")

    async def _remove_unused(self) -> None:
        """Remove weights without a name that nobody samples from, but for each model's newest."""
        oldest, newer = time.monotonic() - _UNUSED_SECONDS, set[str]()
        for sampler in reversed(list(self._samplers.values())):
            if sampler.temporary and sampler.checkpoint is not None:
                if sampler.seen < oldest and sampler.checkpoint.run in newer:
                    await self._drop(sampler)
                newer.add(sampler.checkpoint.run)

    async def _drop(self, sampler: Sampler) -> None:
        self._samplers.pop(sampler.id, None)
        if sampler.temporary and sampler.checkpoint is not None:
            folder = self.checkpoints.folder(sampler.checkpoint)
            await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))

    # Sessions

    async def capabilities(self, owner: str, tree: JsonObject) -> JsonObject:
        known = {
            "model_name": self.model_name,
            "max_context_length": self._config.model.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [known]}

    async def create_session(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.CreateSession, tree)
        await self._make_room(owner)
        session = Session(str(uuid.uuid4()), owner, asked.user_metadata, asked.display_name)
        self._sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id, "info_message": _HEAD}

    async def heartbeat(self, owner: str, tree: JsonObject) -> JsonObject:
        self._session(parsed(requests.OfSession, tree).session_id, owner)
        return {"type": "session_heartbeat"}

    async def finish(self, owner: str, tree: JsonObject) -> JsonObject:
        await self._end(self._session(parsed(requests.OfSession, tree).session_id, owner))
        return {}

    def _session(self, name: str, owner: str) -> Session:
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise Gone(f"there is no session {name}: it has ended, or the server was restarted")
        session.seen = time.monotonic()
        return session

    async def _end(self, session: Session) -> None:
        """End a session with its models and samplers; what it has saved under a name stays."""
        self._sessions.pop(session.id, None)
        self.futures.forget(session.id)
        for sampler in [each for each in self._samplers.values() if each.session is session]:
            await self._drop(sampler)
        for model in [each for each in self._models.values() if each.session is session]:
            del self._models[model.id]
            model.turns.close()
            try:
                await self._ask("remove", model.id)
            except TurnwiseError as error:  # the trainer's own watch ends the server if it died
                logger.warning("the adapter %s is not removed: %s", model.id, error)

    # Training

    async def create_model(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.CreateModel, tree)
        session = self._session(asked.session_id, owner)
        name = f"{session.id}:train:{asked.model_seq_id}"

        async def create() -> Reply:
            self._check_base(asked.base_model)
            spec = asked.spec(self._config.model.lora.rank)
            await self._ask("create", name, spec)
            if session.id not in self._sessions:  # it has ended meanwhile
                await self._ask("remove", name)
                raise Gone(f"the session {session.id} has ended")
            self._models[name] = Model(name, session, spec, asked.user_metadata)
            return Reply({"type": "create_model", "model_id": name})

        self.futures.begin(name, owner, create)
        return {"request_id": name, "model_id": name}

    async def get_info(self, owner: str, tree: JsonObject) -> JsonObject:
        model = self._model(parsed(requests.GetInfo, tree).model_id, owner)
        data = {"model_name": self.model_name, "tokenizer_id": self._tokenizer}
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "model_name": self.model_name,
            "is_lora": True,
            "lora_rank": model.spec.rank,
        }

    async def train(self, owner: str, request: TrainingRequest) -> JsonObject:
        """Answer `forward_backward`, whose body is a message."""
        model = self._model(request.model_id, owner)

        work = partial(self._train, model, request)
        return self._in_turn(model, request.seq_id, work, request.size)

    async def _train(self, model: Model, request: TrainingRequest) -> Reply:
        longest = self._config.model.max_length
        await run_in_thread(requests.check_training, request, self._vocabulary, longest)
        outputs, metrics = list[dict[str, Array]](), dict[str, float]()
        for part in requests.turns_of(request):
            found, sums = await self._ask("run", model.id, part)
            outputs += found
            metrics = {key: metrics.get(key, 0.0) + value for key, value in sums.items()}
        return Reply(message=await run_in_thread(training_reply, outputs, metrics))

    async def optim_step(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.OfModel, tree)
        model = self._model(asked.model_id, owner)

        async def step() -> Reply:
            taken = parsed(requests.OptimStep, tree).step()
            metrics = await self._ask("step", model.id, taken)
            model.version += 1
            return Reply({"metrics": metrics})

        return self._in_turn(model, asked.seq_id, step)

    async def save_for_sampler(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.OfModel, tree)
        model = self._model(asked.model_id, owner)

        async def save() -> Reply:
            wanted = parsed(requests.SaveForSampler, tree)
            # An adapter is never changed once it is saved, so a snapshot also keeps the contract
            # of `inflight`: the weights of its creation, or newer ones.
            number = wanted.sampling_session_seq_id
            if wanted.path is None and number is None:
                raise InputError("save_weights_for_sampler needs a path, or a sampling session")
            name = f"session-{number}" if wanted.path is None else wanted.path
            saved = Checkpoint(
                model.id,
                "sampler_weights",
                name,
                owner,
                self.model_name,
                model.version,
                model.spec.model_dump(),
                user_metadata=wanted.user_metadata,
            )
            await self._write(model, saved, flush=wanted.path is not None)
            if wanted.path is not None:
                return Reply({"type": "save_weights_for_sampler", "path": saved.address})
            sampler = f"{model.session.id}:sample:{number}"
            self._samplers[sampler] = Sampler(sampler, model.session, saved, temporary=True)
            return Reply({"type": "save_weights_for_sampler", "sampling_session_id": sampler})

        return self._in_turn(model, asked.seq_id, save)

    async def refuse_in_turn(self, owner: str, tree: JsonObject) -> JsonObject:
        """Answer a request of a model that this server does not know, at its position."""
        why = InputError(f"this server does not answer {str(tree.get('type'))[:40]} yet")
        if tree.get("model_id") is None:  # it would make a model
            raise why
        asked = parsed(requests.OfModel, tree)

        async def refuse() -> Reply:
            raise why

        return self._in_turn(self._model(asked.model_id, owner), asked.seq_id, refuse)

    async def _write(self, model: Model, saved: Checkpoint, *, flush: bool) -> None:
        """Write a model's adapter as a checkpoint."""
        begun = await run_in_thread(partial(self.checkpoints.begin, saved))
        await self._ask("write", model.id, begun)
        await run_in_thread(partial(self.checkpoints.commit, saved, flush=flush))

    async def _ask(self, method: str, name: str, *arguments: object) -> Foreign:
        """Call a method of `AdapterRank`; models take turns, in the order of their requests."""
        async with self._trainer_turn:
            return await self._trainer(method, name, *arguments)

    def _in_turn(self, model: Model, position: int, work: Work, size: int = 0) -> JsonObject:
        """Run a request, of some bytes, of a model once those before it have ended."""
        name = f"{model.id}:{position}"

        async def run() -> Reply:
            model.turns.check()
            return await work()

        if name not in self.futures:
            if position < model.turns.next:
                raise Gone(f"the result of the request {name} is not kept any more")
            self.futures.promise(name, model.session.owner, size)
            model.turns.add(position, partial(self.futures.run, name, run))
        return {"request_id": name, "model_id": model.id}

    def _model(self, name: str, owner: str) -> Model:
        model = self._models.get(name)
        if model is None or model.session.owner != owner:
            raise Missing(
                f"there is no model {name[:100]}: its session has ended, or the server was "
                "restarted; create_training_client_from_state goes on from a saved state"
            )
        model.session.seen = time.monotonic()
        return model

    def _check_base(self, name: str) -> None:
        if name not in self._names:
            raise InputError(f"this server has the model {self.model_name}, not {name[:100]!r}")

    # Sampling

    async def create_sampler(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.CreateSamplingSession, tree)
        session = self._session(asked.session_id, owner)
        name = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        if name not in self._samplers:
            saved: Checkpoint | None = None
            if asked.base_model is not None:
                self._check_base(asked.base_model)
            if asked.model_path is not None:
                saved = await run_in_thread(partial(self.checkpoints.find, asked.model_path, owner))
            elif asked.base_model is None:
                raise InputError("create_sampling_session needs a model_path or a base_model")
            self._samplers[name] = Sampler(name, session, saved)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def get_sampler(self, owner: str, tree: JsonObject) -> JsonObject:
        sampler = self._sampler(str(tree["sampler_id"]), owner)
        address = None if sampler.checkpoint is None else sampler.checkpoint.address
        named = None if sampler.temporary else address
        return {"sampler_id": sampler.id, "base_model": self.model_name, "model_path": named}

    async def sample(self, owner: str, tree: JsonObject) -> JsonObject:
        asked = parsed(requests.Sample, tree)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise InputError("asample needs a sampling_session_id and a seq_id")
        sampler = self._sampler(asked.sampling_session_id, owner)
        name = f"{sampler.id}:{asked.seq_id}"
        tokens = sum(len(chunk.tokens) for chunk in asked.prompt.chunks)
        work = partial(self._sample, sampler, asked, name)
        channel = f"{sampler.id}/{asked.seq_id // _CLONE}"
        self.futures.begin(name, owner, work, 32 * tokens + SMALLEST * asked.num_samples, channel)
        ids = [f"{name}:{number}" for number in range(asked.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _sample(self, sampler: Sampler, asked: requests.Sample, name: str) -> Reply:
        ids = asked.tokens(self._vocabulary)
        longest, targets = self._config.model.max_length, asked.target_prompt_logprobs
        route = Route(group=name)
        if sampler.checkpoint is not None:
            saved = sampler.checkpoint
            folder = str(self.checkpoints.folder(saved))
            route = Route("", name, f"{saved.address} {saved.created}", folder)
        made = [
            Request(
                ids,
                asked.sampling(len(ids), longest, number),
                f"{name}:{number}",
                asked.seed(number),
                route,
            )
            for number in range(asked.num_samples)
        ]
        scores = None if targets is None else await self._score(targets, made[0])
        done = await together(map(self._completed, made))
        likeliest = asked.topk_prompt_logprobs, asked.topk_sample_logprobs
        return Reply(message=sample_reply(done, asked.scored(len(ids)), likeliest, scores))

    async def _score(self, targets: requests.TargetIds, request: Request) -> Foreign:
        """Return the log-probs of given ids at positions of a request's prompt."""
        values = np.zeros(len(targets.data), np.float32)

        async def score(row: int, places: list[int]) -> None:
            one = request._replace(
                prompt=request.prompt[: row + 1],
                sampling=targets.sampling(places),
                id=f"{request.id}:row{row}",
            )
            ((_, *scores),) = (await self._completed(one)).alternatives
            values[places] = [logprob for _, logprob, _ in scores]

        rows = targets.places(len(request.prompt), self._vocabulary)
        await together(score(*each) for each in rows.items())
        return targets.tensor(values)

    async def _completed(self, request: Request) -> Completion:
        done = await generate(self._generator, request)
        if done.finish_reason == "abort":
            raise EngineError(f"an engine ended {request.id} early")
        return done

    def _sampler(self, name: str, owner: str) -> Sampler:
        sampler = self._samplers.get(name)
        if sampler is None or sampler.session.owner != owner:
            raise Missing(
                f"there is no sampling session {name[:100]}: its session has ended, or the server "
                "was restarted"
            )
        sampler.seen = sampler.session.seen = time.monotonic()
        return sampler

    async def retrieve_futures(self, owner: str, tree: JsonObject) -> JsonObject:
        """Answer a sampler's question which of all its requests have ended."""
        asked = parsed(requests.RetrieveFutures, tree)
        sampler = self._sampler(asked.target.sampling_session_id, owner)
        seconds = WAIT_SECONDS if asked.timeout is None else min(asked.timeout, WAIT_SECONDS)
        channel = f"{sampler.id}/{asked.target.cloned_sampler_id}"
        arrived = asked.retrieved_request_ids
        return await self.futures.ended(channel, asked.prev_cursor, arrived, seconds)

    async def cancel(self, owner: str, tree: JsonObject) -> JsonObject:
        self.futures.cancel(str(tree.get("request_id", "")), owner)
        return {}


def parsed(kind: type[_Kind], tree: JsonObject) -> _Kind:
    """Return a request of plain values; InputError names the first key that is wrong."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{key}: {first['msg']}" if key else first["msg"]) from error


CONSTANT: Mapping[str, JsonObject] = {
    "client/config": {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": False,  # in their order, so that one that must wait fills no gap
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": True,  # else each sample in progress holds a connection
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
    "optim_step": TinkerService.optim_step,
    "save_weights_for_sampler": TinkerService.save_for_sampler,
    "save_weights": TinkerService.refuse_in_turn,
    "save_weights_external": TinkerService.refuse_in_turn,
    "load_weights": TinkerService.refuse_in_turn,
    "create_sampling_session": TinkerService.create_sampler,
    "asample": TinkerService.sample,
    "retrieve_futures": TinkerService.retrieve_futures,
    "cancel_future": TinkerService.cancel,
}
"""Verbs by their routes below /api/v1, which get the body's values and those of the path."""
GET: Mapping[str, Verb] = {
    "get_server_capabilities": TinkerService.capabilities,
    "samplers/{sampler_id}": TinkerService.get_sampler,
}
