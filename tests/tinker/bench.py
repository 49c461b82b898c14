"""A Tinker server without Ray and vLLM: the trainer's rank in this process, a simulated engine.

    python -m tests.tinker.bench MODEL PORT FOLDER [key.sub=value ...]

serves it over HTTP, for programs that use the SDK.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI

from tests.simulated import SimulatedEngine
from tests.tinker.local import LocalTrainer
from turnwise.config import Config
from turnwise.tinker.backend import server_config
from turnwise.tinker.routes import add_routes
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import PROTOBUF, message_classes

KEY = {"X-API-Key": "tml-one"}
VOCABULARY = 512


class Client:
    """Speaks the protocol with the server's routes as the SDK does."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.rank: Any = None
        self.session = ""
        self.model = ""

    async def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=body or {}, headers=headers or KEY)

    async def tree(self, path: str, body: object = None) -> dict[str, Any]:
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def open(self, **lora: Any) -> dict[str, Any]:
        """Open a session with a model; returns the outcome of its creation."""
        self.session = (await self.tree("create_session", {"tags": []}))["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "model"}
        lora = {"rank": 4, "seed": 1} | lora
        promise = await self.tree("create_model", body | {"lora_config": lora})
        self.model = promise["model_id"]
        return await self.result(promise)

    async def result(self, promise: dict[str, Any]) -> Any:
        answer = await self.post("retrieve_future", {"request_id": promise["request_id"]})
        assert answer.status_code == 200, answer.text
        return answer.content if answer.headers["content-type"] == PROTOBUF else answer.json()

    async def train(
        self, seq: int, data: list[dict[str, Any]], loss: str, forward_only: bool = False
    ) -> httpx.Response:
        return await self.http.post(
            "/api/v1/forward_backward",
            content=message(self.model, seq, data, loss, forward_only),
            headers=KEY | {"Content-Type": PROTOBUF},
        )

    async def trained(self, seq: int, data: list[dict[str, Any]], loss: str) -> Any:
        return await self.result((await self.train(seq, data, loss)).json())

    async def step(self, seq: int, **adam: float) -> Any:
        body = {"model_id": self.model, "seq_id": seq, "adam_params": adam}
        return await self.result(await self.tree("optim_step", body))


def message(
    model: str, seq: int, data: list[dict[str, Any]], loss: str, forward_only: bool = False
) -> bytes:
    """Return a forward_backward request: each datum has `tokens`, and inputs by their names; a
    member of `tokens` may be the file of an image, with the number of ids that it is to have."""
    made = message_classes()["ForwardBackwardRequest"](
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    for each in data:
        datum = made.data.add()
        for is_text, part in groupby(each["tokens"], lambda one: not isinstance(one, tuple)):
            if is_text:
                ids = np.asarray([*part], np.int32)
                datum.model_input.add().encoded_text.tokens = ids.tobytes()
            else:
                for data, expected in part:
                    image = datum.model_input.add().image
                    image.data, image.format, image.expected_tokens = data, "png", expected
        for name, values in each.items():
            if name != "tokens":
                whole = name == "target_tokens"
                array = np.asarray(values, np.int64 if whole else np.float32)
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype, tensor.dense = 1 + whole, array.tobytes()
                tensor.shape.extend(array.shape)
    return bytes(made.SerializeToString())


def logprobs_of(reply: bytes, name: str = "logprobs") -> list[np.ndarray[Any, Any]]:
    read = message_classes()["ForwardBackwardOutput"]()
    read.ParseFromString(reply)
    tensor = read.loss_fn_outputs[0].fields[name]
    bounds = np.frombuffer(tensor.offsets, np.int64)[1:-1] // 4
    return np.split(np.frombuffer(tensor.data, np.float32), bounds)


def loss_of(reply: bytes) -> float:
    read = message_classes()["ForwardBackwardOutput"]()
    read.ParseFromString(reply)
    return float(read.metrics["loss:sum"])


@asynccontextmanager
async def opened(
    config: Config, folder: Path, stable: str = ""
) -> AsyncIterator[tuple[Client, TinkerService]]:
    trainer = LocalTrainer(config, folder)
    words = await trainer.begin_adapters()
    engine = SimulatedEngine(vocab_size=min(words, VOCABULARY))
    service = TinkerService(config, engine, trainer, words, folder, stable=stable)
    app = add_routes(FastAPI(), service)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        client = Client(http)
        client.rank = trainer.rank
        yield client, service


async def serve(model: str, port: int, folder: Path, *changes: str) -> None:
    """Serve clients over HTTP on a port, until interrupted."""
    config = server_config(model, None, [f"output_dir={folder}", "training.threads=1", *changes])
    async with opened(config, folder) as (client, service):
        service.restore()
        transport = client.http._transport
        assert isinstance(transport, httpx.ASGITransport)
        settings = uvicorn.Config(transport.app, port=port, log_level="warning")
        await uvicorn.Server(settings).serve()


if __name__ == "__main__":  # python -m tests.tinker.bench MODEL PORT FOLDER [key.sub=value ...]
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
