"""`turnwise serve` and vLLM's own API server, with one model and equal engines, as processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from turnwise.config import EngineConfig, ModelConfig
from turnwise.engine.vllm_start import engine_arguments

MAX_NUM_SEQS = 128
START_SECONDS = 120.0


@contextmanager
def serving(model: Path, folder: Path, max_length: int = 512) -> Iterator[tuple[str, int]]:
    """Run `turnwise serve`; yield its base URL and process id."""
    config = folder / "serve.yaml"
    tree = {
        "model": {"path": str(model), "max_length": max_length},
        "serving": {"port": 0},
        "engine": {"max_num_seqs": MAX_NUM_SEQS},
    }
    config.write_text(json.dumps(tree))
    command = [str(Path(sys.executable).with_name("turnwise")), "serve", str(config)]
    log = folder / "serve.log"  # not a pipe, which would fill up
    with log.open("w") as output, subprocess.Popen(command, stdout=output) as process:
        try:
            while not (found := re.search(r"http://\S+/v1", log.read_text())):
                if process.poll() is not None:
                    raise SystemExit("turnwise serve ended before it printed its address")
                time.sleep(0.2)
            yield found[0], process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@contextmanager
def vllm_server(model: Path, folder: Path, max_length: int = 512) -> Iterator[tuple[str, int]]:
    """Run vLLM's API server with an engine as in `serving`; yield its base URL and process id."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    config = ModelConfig(path=str(model), max_length=max_length)
    arguments = engine_arguments(
        config, EngineConfig(max_num_seqs=MAX_NUM_SEQS), deterministic=False
    )
    flags = [f"--port={port}", "--host=127.0.0.1", "--disable-uvicorn-access-log"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    log = folder / "vllm.log"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}  # it logs that it is ready
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while "Application startup complete" not in log.read_text():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1", process.pid
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def both_servers(
    model: Path, folder: Path, max_length: int = 512
) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Run both servers, which start at the same time; yield `serving`'s values first."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        ours, theirs = (
            pool.submit(stack.enter_context, server(model, folder, max_length))
            for server in (serving, vllm_server)
        )
        yield ours.result(), theirs.result()
