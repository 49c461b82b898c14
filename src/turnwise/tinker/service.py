"""The server's state and verbs: sessions, models, sampling sessions and their requests.

Each verb answers one route: it gets the caller's owner and the request, and returns plain values.
Work that takes a while becomes a request of `Futures`. Session ids are random. Ids of models and
sampling sessions are derived from the session's id, so that a client can repeat any request. An
owner finds only its own objects. A session ends when its client is silent for too long.

To add a verb of Tinker's protocol: write a method of `TinkerService`, its request in
`tinker/requests.py`, and its route in `tinker/routes.py`.
"""

import asyncio
import json
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, together
from turnwise.core.json_types import JsonObject
from turnwise.core.run_files import RunFiles
from turnwise.engine.protocol import Generator, Route, generate
from turnwise.errors import EngineError, InputError, TurnwiseError, text_of, visible
from turnwise.tinker import requests
from turnwise.tinker.checkpoints import Checkpoint, Checkpoints, Kind, expiry
from turnwise.tinker.futures import SMALLEST, Busy, Futures, Gone, Missing, Reply, Work
from turnwise.tinker.images import ChunkReader
from turnwise.tinker.losses import NOT_STABLE, STABLE
from turnwise.tinker.queue import ModelOrder
from turnwise.tinker.requests import parsed
from turnwise.tinker.run_log import RunLog, SampleIndex
from turnwise.tinker.trainer import AdapterTrainer
from turnwise.tinker.wire import Array, TrainingRequest, sample_reply, training_reply
from turnwise.training.trainer_group import TrainerGroup

logger = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", bound=requests.BaseRequest)
_Work = Callable[..., Awaitable[Reply]]
_SILENT_SECONDS = 900.0
"""Seconds of silence after which a session ends; clients send a heartbeat every 10 s."""
_LOOK_SECONDS = 30.0
_MAX_SESSIONS = 1000
"""Maximum number of an owner's sessions; at the limit, sessions silent for `_QUIET_SECONDS` end."""
_QUIET_SECONDS = 120.0
_UNUSED_SECONDS = 3600.0
"""Seconds without a sample after which unnamed weights are removed when newer weights of their
model are saved. A training loop saves unnamed weights at every step."""
_HEAD = (
    "this server trains no adapter of the output head: train_unembed has no effect, because "
    "engines cannot score prompts with one"
)
_STAND_IN = "stable_reinforce is computed as %s, its settings and provenance are not used"


@dataclass(slots=True, eq=False)
class TinkerSession:
    """One client's session, which ends when the client closes it or is silent for too long. The ids
    of its models, samplers and requests begin with the session's id."""

    id: str
    owner: str
    futures: Futures
    seen: float = field(default_factory=time.monotonic)
    """Time of the last request or heartbeat."""
    models: "dict[str, Model]" = field(default_factory=dict)
    samplers: "dict[str, Sampler]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Model:
    """An adapter in training."""

    session: TinkerSession
    state: Checkpoint
    """The model's current state; the state's kind and name are placeholders."""
    log: RunLog
    order: ModelOrder = field(default_factory=ModelOrder)
    lost: str = ""
    """Error of a pass that failed since the last step and may have left a partial gradient; "" if
    no pass failed."""
    stands_in: bool = False
    """Whether a pass asked for stable_reinforce and was computed with another loss."""

    @property
    def id(self) -> str:
        return self.state.run


@dataclass(slots=True, eq=False)
class Sampler:
    """A sampling session: the base model, or a saved adapter on it."""

    id: str
    session: TinkerSession
    checkpoint: Checkpoint | None = None
    seen: float = field(default_factory=time.monotonic)
    """Time of the last request."""

    @property
    def snapshot(self) -> Checkpoint | None:
        """The checkpoint if it is a snapshot, else None. A snapshot does not have an address that a
        client could use, and is removed when the session ends."""
        saved = self.checkpoint
        return saved if saved is not None and saved.kind == "snapshots" else None


class TinkerService:
    """One server's sessions, models and samplers.

    Args:
        generator: The engines.
        trainer: The trainer.
        vocabulary: Size of the model's vocabulary.
        folder: The run's folder; `tinker` below it has the checkpoints and the files of each
            client's training run.
        decode: Decodes token ids to text, for the files of runs.
        stable: Name of the loss to compute for stable_reinforce; "" refuses stable_reinforce.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator,
        trainer: TrainerGroup,
        vocabulary: int,
        folder: Path,
        decode: Callable[[list[int]], str] = str,
        stable: str = "",
    ) -> None:
        path = config.model.path
        self.model_name = config.serving.served_model_name or path
        self.join_chunks = ChunkReader(config.model, config.engine.images_per_prompt).join
        self.checkpoints = Checkpoints(folder / "tinker")
        self.links: dict[str, tuple[Checkpoint, str, float]] = {}
        """Checkpoint, file name and expiry (monotonic seconds) of each link, by the secret that
        gives anyone access to the file."""
        self._names = {self.model_name, path, Path(path).name}
        self._tokenizer = config.model.tokenizer or path
        self._config, self._stable = config, stable
        self._generator, self._vocabulary = generator, vocabulary
        seed = config.seed if config.deterministic else None
        self._trainer = AdapterTrainer(trainer, config.algorithm, seed)
        self._sessions: dict[str, TinkerSession] = {}
        self._held: dict[str, int] = {}
        self._files = RunFiles(folder / "tinker_sessions")
        self._sampled = SampleIndex(decode)

    def restore(self) -> None:
        """Restore the sessions and samplers of a server that was killed, from their files."""
        held = set[Path]()
        for path in self._files.path("").glob("*.jsonl"):
            with suppress(ValueError, TypeError, LookupError):
                whole = path.read_text().rpartition("\n")[0]  # the last line may be incomplete
                first, *others = map(json.loads, whole.splitlines())
                own = first["model"] in self._names  # keep another model's files: it may return
                session = self._open(first["id"], first["owner"]) if own else None
                for name, tree in others:
                    saved = Checkpoint(**tree) if tree else None
                    if saved and not (folder := self.checkpoints.folder(saved)).exists():
                        continue
                    held |= {folder} if saved else set()
                    if session is not None:
                        session.samplers[name] = Sampler(name, session, saved)
        self.checkpoints.tidy(held)

    async def _note(self, session: TinkerSession, line: object) -> None:
        await self._files.add(f"{session.id}.jsonl", json.dumps(line) + "\n")

    def sessions_of(self, owner: str) -> list[TinkerSession]:
        """Return an owner's sessions, the newest first."""
        return [each for each in reversed(self._sessions.values()) if each.owner == owner]

    async def watch(self) -> None:
        """End silent sessions and remove expired checkpoints, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._end_silent(_SILENT_SECONDS)
            with suppress(OSError):  # a folder was removed meanwhile
                await run_in_thread(self.checkpoints.tidy)

    async def _end_silent(self, seconds: float, owner: str | None = None) -> None:
        """End the sessions, of all owners or of one, that have been silent for `seconds`. They end
        concurrently, because the end of each session waits for a turn at the trainer."""
        oldest = time.monotonic() - seconds
        own = list(self._sessions.values()) if owner is None else self.sessions_of(owner)
        silent = [each for each in own if each.seen < oldest]
        for session in silent:
            logger.info("the Tinker session %s is silent, and ends", session.id)
        await together(self._end(session) for session in silent)

    async def _drop(self, sampler: Sampler) -> None:
        sampler.session.samplers.pop(sampler.id, None)
        if (saved := sampler.snapshot) is not None:
            with suppress(OSError):  # already removed
                await run_in_thread(self.checkpoints.remove, saved)

    # Sessions

    async def capabilities(self, owner: str, _: JsonObject) -> JsonObject:
        own = {"model_name": self.model_name, "max_context_length": self._config.model.max_length}
        return {"supported_models": [own | {"trainable": True, "sampleable": True}]}

    async def create_session(self, owner: str, _: JsonObject) -> JsonObject:
        if len(self.sessions_of(owner)) >= _MAX_SESSIONS:
            await self._end_silent(_QUIET_SECONDS, owner)
        if len(self.sessions_of(owner)) >= _MAX_SESSIONS:
            raise Busy(f"you have {_MAX_SESSIONS:,} sessions: close some, or wait until some end")
        session = self._open(str(uuid.uuid4()), owner)
        line = {"id": session.id, "owner": owner, "model": self.model_name}
        await self._note(session, line)
        info = f"{_HEAD}; {_STAND_IN % self._stable}" if self._stable else _HEAD
        return {"session_id": session.id, "info_message": info}

    def _open(self, name: str, owner: str) -> TinkerSession:
        # All sessions have the same owner if the server has a key.
        account = owner if self._config.serving.key is None else name
        session = TinkerSession(name, owner, Futures(account, self._held))
        self._sessions[name] = session
        return session

    async def heartbeat(self, owner: str, asked: requests.OfSession) -> JsonObject:
        self._session(asked.session_id, owner)
        return {}

    async def get_session(self, owner: str, asked: requests.OfSession) -> JsonObject:
        if (session := self._own(asked.session_id, owner)) is None:
            raise Missing(f"there is no session {asked.session_id[:100]} of yours")
        return {"training_run_ids": [*session.models], "sampler_ids": [*session.samplers]}

    async def finish(self, owner: str, asked: requests.OfSession) -> JsonObject:
        await self._end(self._session(asked.session_id, owner))
        return {}

    def _own(self, name: str, owner: str) -> TinkerSession | None:
        """Return an owner's session by its id, or by the id of its model, sampler or request."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None or session.owner != owner:
            return None
        session.seen = time.monotonic()
        return session

    def _session(self, name: str, owner: str) -> TinkerSession:
        if (session := self._own(name, owner)) is None:
            raise Gone(
                f"there is no session of {visible(name)[:100]}: it has ended, or the server was "
                "restarted"
            )
        return session

    async def _end(self, session: TinkerSession) -> None:
        """End a session, its models and its samplers; keep the checkpoints saved under a name."""
        if self._sessions.pop(session.id, None) is None:
            return
        session.futures.drop(*session.futures.entries)
        with suppress(OSError):
            self._files.path(f"{session.id}.jsonl").unlink()
        for sampler in list(session.samplers.values()):
            await self._drop(sampler)
        for model in list(session.models.values()):
            await self._remove(model)

    async def _remove(self, model: Model) -> None:
        model.session.models.pop(model.id, None)
        await model.log.close()
        try:
            await self._trainer.remove(model.id)
        except TurnwiseError as error:  # if the trainer died, its own watch ends the server
            logger.warning("the adapter %s is not removed: %s", model.id, error)

    # Requests

    async def retrieve(self, owner: str, request_id: str) -> Reply | None:
        """Return the result of a request; None if it is not ready yet."""
        return await self._session(request_id, owner).futures.retrieve(request_id)

    async def cancel(self, owner: str, asked: requests.Named) -> JsonObject:
        """Cancel a sample that its client no longer wants. Ignore requests of other kinds,
        because a model's later requests wait for them."""
        if ":sample:" in asked.request_id and (own := self._own(asked.request_id, owner)):
            own.futures.drop(asked.request_id)
        return {}

    # Training

    async def new_model(
        self, owner: str, tree: JsonObject, kind: type[_Kind], work: _Work
    ) -> JsonObject:
        """Answer a request for a new model; `work` makes it from name, session and request."""
        given = parsed(requests.OfNewModel, tree)
        session = self._session(given.session_id, owner)
        name = f"{session.id}:train:{given.model_seq_id}"
        answer = partial(self._answer, kind, work, tree, name, session)
        session.futures.begin(name, answer, 2 * tree["body_bytes"])
        return {"request_id": name, "model_id": name}

    async def create(self, name: str, session: TinkerSession, asked: requests.CreateModel) -> Reply:
        self._check_base(asked.base_model)
        if asked.lora_config is None:
            raise InputError("this server trains adapters: create_model needs a lora_config")
        spec, owner = asked.lora_config.model_dump(exclude={"body_bytes"}), session.owner
        new = Checkpoint(name, "snapshots", "", owner, self.model_name, 0, spec)
        await self._add_model(session, replace(new, run_metadata=asked.user_metadata))
        return {"model_id": name}

    async def _add_model(
        self, session: TinkerSession, state: Checkpoint, loaded: tuple[Path, bool] | None = None
    ) -> Model:
        """Add an adapter; for a saved one, `loaded` has the arguments of `Adapters.read`: its
        folder, and whether to read its optimizer."""
        name, spec = state.run, requests.LoraSpec.model_validate(state.spec)
        if name in session.models:
            raise Gone(f"the result of the request {name} is not kept any more")
        if not 1 <= spec.rank <= (max_rank := self._config.model.lora.rank):
            raise InputError(
                f"lora_config: rank {spec.rank} is not from 1 to {max_rank} (model.lora.rank of "
                "this server)"
            )
        log = RunLog(self._config, self.checkpoints.root, name, session.owner, self._sampled)
        model = session.models[name] = Model(session, state, log)
        try:
            await self._trainer.add(name, spec, session.futures.account)
            if loaded is not None:
                await self._trainer.read(name, *loaded)
        except Exception:  # not a cancellation: a session that ends removes its models itself
            await self._remove(model)
            raise
        return model

    async def get_info(self, owner: str, asked: requests.GetInfo) -> JsonObject:
        model, name = self._model(asked.model_id, owner), self.model_name
        data = {"model_name": name, "tokenizer_id": self._tokenizer}
        known = {"model_id": model.id, "model_name": name, "model_data": data}
        return known | {"is_lora": True, "lora_rank": model.state.spec["rank"]}

    async def train(self, owner: str, request: TrainingRequest) -> JsonObject:
        """Answer `forward_backward`, whose body is a protobuf message."""
        model = self._model(request.model_id, owner)
        work = partial(self._train, model, request)
        return self._enqueue(model, request.seq_id, work, request.size)

    async def _train(self, model: Model, request: TrainingRequest) -> Reply:
        if request.loss == STABLE and self._stable:
            if not model.stands_in:
                logger.warning("%s: " + _STAND_IN, model.id, self._stable)
            model.stands_in = True
            request = replace(request, loss=self._stable, loss_config={})
        longest = self._config.model.max_length
        await run_in_thread(requests.check_training, request, self._vocabulary, longest)
        outputs, loss = list[Array](), 0.0
        try:
            for part in requests.turns_of(request):
                found, its_loss = await self._trainer.run(model.id, part)
                outputs, loss = outputs + found, loss + its_loss
            model.log.add(request, outputs, loss)
            return await run_in_thread(training_reply, outputs, loss)
        except Exception as error:
            # If the first part is refused (InputError), nothing ran, so the gradient is intact.
            if not request.forward_only and (outputs or not isinstance(error, InputError)):
                model.lost = text_of(error)
            raise

    async def in_turn(
        self, owner: str, tree: JsonObject, kind: type[_Kind], work: _Work
    ) -> JsonObject:
        """Answer a model's request with `work`, once the model's earlier requests have ended. A
        malformed request also waits before it fails: a client cannot reuse its position."""
        given = parsed(requests.OfModel, tree)
        model = self._model(given.model_id, owner)
        answer = partial(self._answer, kind, work, tree, model)
        return self._enqueue(model, given.seq_id, answer, 2 * given.body_bytes)

    async def _answer(
        self, kind: type[_Kind], work: _Work, tree: JsonObject, *given: object
    ) -> Reply:
        asked = parsed(kind, tree)
        asked.check()
        return await work(self, *given, asked)

    async def step(self, model: Model, asked: requests.OptimStep) -> Reply:
        taken = asked.adam_params
        try:
            if model.lost:
                await self._trainer.drop(model.id)
                why, model.lost = model.lost, ""
                raise InputError(
                    f"optim_step: a pass of this step failed ({why}), so the gradient was dropped "
                    "and nothing changed: send the passes of this step again"
                )
            metrics = await self._trainer.step(model.id, taken)
        except InputError:  # the gradient is dropped
            model.log.drop()
            raise
        before = model.state.version
        await model.log.step(before, taken.learning_rate, metrics)
        model.state = replace(model.state, version=before + 1, created=str(expiry(0)))
        return {"metrics": metrics}

    async def save_for_sampler(self, model: Model, asked: requests.SaveForSampler) -> Reply:
        # A saved adapter never changes. So a snapshot also fulfils the contract of `inflight`,
        # which asks for the weights at the sampler's creation, or newer ones.
        if asked.path is not None:
            saved = await self._save(model, "sampler_weights", asked.path, asked)
            return {"path": saved.address}
        if (number := asked.sampling_session_seq_id) is None:
            raise InputError("save_weights_for_sampler needs a path, or a sampling session")
        sampler = f"{model.session.id}:sample:{number}"
        saved = await self._save(model, "snapshots", str(number), asked)
        try:
            oldest = time.monotonic() - _UNUSED_SECONDS
            for each in list(model.session.samplers.values()):
                if each.snapshot and each.snapshot.run == saved.run and each.seen < oldest:
                    await self._drop(each)
            await self._add_sampler(Sampler(sampler, model.session, saved))
        except BaseException:  # its session has ended meanwhile
            await run_in_thread(self.checkpoints.remove, saved)
            raise
        return {"sampling_session_id": sampler}

    async def save_weights(
        self, model: Model, asked: requests.SaveWeights, kind: Kind = "weights"
    ) -> Reply:
        return {"path": (await self._save(model, kind, asked.path, asked)).address}

    async def load(self, model: Model, asked: requests.LoadWeights) -> Reply:
        saved = await self._saved(asked, model.session)
        async with self._holding(saved) as held:
            await self._trainer.read(model.id, held, asked.optimizer)
        model.log.drop()  # loading dropped the gradient of these passes
        model.lost = ""
        model.state = replace(model.state, version=saved.version)
        return {"path": saved.address, "model_id": model.id}

    async def create_from(
        self, name: str, session: TinkerSession, asked: requests.LoadWeights
    ) -> Reply:
        saved = await self._saved(asked, session)
        new = replace(saved, run=name, kind="snapshots", created=str(expiry(0)), expires=None)
        new = replace(new, run_metadata=asked.user_metadata)
        async with self._holding(saved) as held:
            await self._add_model(session, new, (held, asked.optimizer))
        return {"path": saved.address, "model_id": name}

    async def _saved(self, asked: requests.LoadWeights, session: TinkerSession) -> Checkpoint:
        saved = await run_in_thread(self.checkpoints.find, asked.path, session.owner)
        for name in (asked.base_model, saved.base_model):
            self._check_base(name or saved.base_model)
        return saved

    @asynccontextmanager
    async def _holding(self, saved: Checkpoint) -> AsyncIterator[Path]:
        """Yield the folder of a checkpoint's files; they stay until the end of the block."""
        held = asyncio.ensure_future(run_in_thread(self.checkpoints.hold, saved))
        try:
            yield await asyncio.shield(held)
        finally:
            await asyncio.wait([held])  # also after a cancellation
            if held.exception() is None:
                await run_in_thread(self.checkpoints.release, held.result())

    async def _save(
        self, model: Model, kind: Kind, name: str, asked: requests.Saving
    ) -> Checkpoint:
        """Save a model; the kind `weights` includes its optimizer."""
        state, expires = model.state, expiry(asked.ttl_seconds)
        saved = replace(state, kind=kind, name=name, created=str(expiry(0)), expires=expires)
        saved = replace(saved, user_metadata=asked.user_metadata)
        begun = await run_in_thread(
            partial(self.checkpoints.begin, saved, overwrite=asked.overwrite)
        )
        flush = kind != "snapshots"  # snapshots end with their session
        how = {"overwrite": asked.overwrite, "flush": flush}
        try:
            await self._trainer.write(model.id, begun, kind == "weights")
            await run_in_thread(partial(self.checkpoints.commit, saved, begun, **how))
        except BaseException:  # free the space: the disk may be full
            await run_in_thread(partial(shutil.rmtree, begun, ignore_errors=True))
            raise
        return saved

    def _enqueue(self, model: Model, position: int, work: Work, size: int = 0) -> JsonObject:
        """Begin a model's request of `size` bytes; it runs after the model's earlier requests."""
        name = f"{model.id}:{position}"

        async def run() -> Reply:
            account = model.session.futures.account
            async with self._trainer.queue.request(account, model.order, position):
                return await work()

        if name not in model.session.futures.entries and position < model.order.next:
            raise Gone(f"the result of the request {name} is not kept any more")
        model.session.futures.begin(name, run, size)
        return {"request_id": name, "model_id": model.id}

    def _model(self, name: str, owner: str) -> Model:
        if (session := self._own(name, owner)) is None or name not in session.models:
            raise Missing(
                f"there is no model {name[:100]}: its session has ended, or the server was "
                "restarted; create_training_client_from_state goes on from a saved state"
            )
        return session.models[name]

    def _check_base(self, name: str) -> None:
        if name not in self._names:
            raise InputError(f"this server has the model {self.model_name}, not {name[:100]!r}")

    # Sampling

    async def create_sampler(self, owner: str, asked: requests.CreateSamplingSession) -> JsonObject:
        session = self._session(asked.session_id, owner)
        name = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        if name not in session.samplers:
            saved: Checkpoint | None = None
            if asked.base_model is not None:
                self._check_base(asked.base_model)
            if asked.model_path is not None:
                saved = await run_in_thread(partial(self.checkpoints.find, asked.model_path, owner))
                self._check_base(saved.base_model)
            elif asked.base_model is None:
                raise InputError("create_sampling_session needs a model_path or a base_model")
            await self._add_sampler(Sampler(name, session, saved))
        return {"sampling_session_id": name}

    async def _add_sampler(self, made: Sampler) -> None:
        session = made.session
        self._session(session.id, session.owner)  # it may have ended meanwhile
        await self._note(session, [made.id, made.checkpoint and asdict(made.checkpoint)])
        self._session(session.id, session.owner).samplers[made.id] = made

    async def get_sampler(self, owner: str, asked: requests.Named) -> JsonObject:
        sampler = self._sampler(asked.sampler_id, owner)
        saved = None if sampler.snapshot else sampler.checkpoint
        named = None if saved is None else saved.address
        return {"sampler_id": sampler.id, "base_model": self.model_name, "model_path": named}

    async def sample(self, owner: str, asked: requests.SampleRequest) -> JsonObject:
        sampler = self._sampler(asked.sampling_session_id, owner)
        name = f"{sampler.id}:{asked.seq_id}"
        work = partial(self._sample, sampler, asked, name)
        sampler.session.futures.begin(name, work, asked.size + SMALLEST * asked.num_samples)
        ids = [f"{name}:{number}" for number in range(asked.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _sample(self, sampler: Sampler, asked: requests.SampleRequest, name: str) -> Reply:
        if asked.record_stability_info and not self._stable:
            raise InputError(f"record_stability_info: {NOT_STABLE}")
        ids = await run_in_thread(asked.tokens, self._vocabulary, self.join_chunks)
        saved, route = sampler.checkpoint, Route(group=name)
        async with AsyncExitStack() as stack:
            if saved is not None:
                held = await stack.enter_async_context(self._holding(saved))
                route = Route("", name, f"{saved.address} {saved.created}", str(held))
            made = asked.requests(ids, name, route, self._config.model.max_length)
            done = await together(generate(self._generator, each) for each in made)
        if any(each.finish_reason == "abort" for each in done):
            raise EngineError(f"an engine ended {name} early")
        if not asked.scored(len(ids)):  # the samples of a scoring request are thrown away
            self._sampled.add(sampler.session.owner, ids, done, saved.version if saved else 0)
        likeliest = asked.topk_prompt_logprobs, asked.topk_sample_logprobs
        reply = partial(sample_reply, done, asked.scored(len(ids)), likeliest)
        return await run_in_thread(reply)

    def _sampler(self, name: str, owner: str) -> Sampler:
        if (session := self._own(name, owner)) is None or name not in session.samplers:
            raise Missing(
                f"there is no sampling session {name[:100]}: its session has ended, the server was "
                "restarted, or its weights, which have no name, were not sampled from for an hour "
                "when newer ones were saved"
            )
        session.samplers[name].seen = time.monotonic()
        return session.samplers[name]
