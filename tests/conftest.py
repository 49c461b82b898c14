"""Fixtures that tests share: one untrained model, one engine and one Ray for the whole session.

torch, vLLM and Ray are imported by the fixtures that need them, so that tests of plain code start
at once: `tests/no_engines.py` has the tier of tests that need neither vLLM nor Ray.
"""

import copy
import fcntl
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.memory import PeakMemory
from turnwise.config import Config, parse_config
from turnwise.core import fork_server
from turnwise.trajectory import ChatTemplate

if TYPE_CHECKING:
    from turnwise.serving.worker_handle import WorkerHandle

ROOT = Path(__file__).parent.parent
# One thread for torch, here and in the programs that tests start: the models are tiny, and threads
# that wait for each other beside another worker of pytest-xdist take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background job ignores Ctrl-C, and so would the programs to which tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
LONGEST = (
    "serving/test_fleet.py",
    "test_runs.py",
    "serving/test_parallel.py",
    "test_cli.py",
    "examples/test_ladder.py",
    "serving/test_worker_handle.py",
    "serving/colocated/test_colocated.py",
    "pipeline/test_models.py",
    "weights/test_streams.py",
    "rollouts/test_agents.py",
    "training/test_trainer_group.py",
    "pipeline/test_pipeline.py",
    "test_api.py",
    "tools/test_mcp.py",
    "trl/test_trainer.py",
    "examples/test_three_rounds.py",
    "trajectory/test_bridge.py",
)
"""Files that take longest, the longest first, so that no worker ends alone with one of them."""
PEAK = pytest.StashKey[PeakMemory]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist is counted by its parent
        config.stash[PEAK] = PeakMemory()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what the tests' modules import: millions of objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files of parallel workers by `LONGEST`; the others keep their order after these."""
    if hasattr(config, "workerinput"):
        place = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_runtest_teardown() -> None:
    """Take back the threads that a test's trainer gave this process: see OMP_NUM_THREADS above."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    memory = config.stash[PEAK]
    memory.close()
    terminalreporter.write_line(
        f"peak memory of this session: {memory.peak / 2**30:.1f} GiB "
        f"in {memory.processes} processes"
    )


def python() -> list[str]:
    """Return a replacement for `python` in a command: a fork of the session's fork server.

    It saves a program the seconds that its imports take. Its children of Ray's and
    vLLM's are forked by the same server (`command_environment`).
    """
    address = fork_server.address()
    assert address is not None
    return fork_server.command(address)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator example's files, around a model that was hardly trained; read only.

    The workers of pytest-xdist share it.
    """
    from examples.calculator.imitation import WarmStart
    from examples.calculator.prepare import prepare

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "calculator"
    with (root / "calculator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            prepare(folder, seed=0, options=WarmStart(updates=5), train=64, heldout=16)
    return folder


@pytest.fixture(scope="session")
def model_path(build: Path) -> str:
    return str(build / "model")


@pytest.fixture(scope="session")
def tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def bare_path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenizer without a chat template, and with a BOS before plain texts; read only."""
    from tokenizers.processors import TemplateProcessing

    bare = copy.deepcopy(tokenizer)
    bare.chat_template, bare.bos_token = None, "<|endoftext|>"
    bare.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bare.bos_token_id)]
    )
    folder = tmp_path_factory.mktemp("bare")
    bare.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def bare(bare_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bare_path)


@pytest.fixture(scope="session")
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer)


@pytest.fixture(scope="session")
def make_config(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """Makes a small configuration; arguments replace whole sections."""

    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = {
            "environment": "examples.calculator.environment:Calculator",
            "output_dir": str(tmp_path_factory.mktemp("runs")),
            "model": {"path": str(build / "model"), "max_length": 512},
            "data": {
                "path": str(build / "train.jsonl"),
                "eval_path": str(build / "heldout.jsonl"),
            },
            "sampling": {"n": 4, "max_tokens": 16},
            "engine": {"logits_processors": ["tests.forced_tokens:ForcedTokens"]},
            "training": {"steps": 2, "learning_rate": 1e-3},
        }
        tree |= sections
        tree["engine"] = {"kv_cache_gib": 0.0625, **tree["engine"]}  # many engines side by side
        tree["training"] = {"threads": 1, **tree["training"]}
        return parse_config(tree)

    return make


@pytest.fixture(scope="session")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that reads images, with random weights; read only."""
    from tests.vision import make_qwen_vl

    return make_qwen_vl(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def ray_started() -> Iterator[None]:
    import ray

    from turnwise.core.ray import start_ray

    start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
async def engine(
    ray_started: None, make_config: Callable[..., Config]
) -> AsyncIterator["WorkerHandle"]:
    """The real engine, in its own process; tests that change its weights put them back."""
    from turnwise.compat.nemo_rl import VllmAsyncGenerationWorker
    from turnwise.compat.verl import ChatHost
    from turnwise.serving.worker_handle import WorkerHandle

    class Host(VllmAsyncGenerationWorker, ChatHost):
        """A worker's, with NeMo-RL's and verl's methods too."""

    engine = await WorkerHandle.start(make_config(), host=Host)
    yield engine
    await engine.shutdown()


def command_environment() -> dict[str, str]:
    """Return the environment of a turnwise command that a test starts."""
    shared = {fork_server.VARIABLE: fork_server.address() or "off"}
    return {**os.environ, **shared, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def own_environment() -> dict[str, str]:
    """Return the environment of a command that starts all processes itself, as a user's does."""
    environment = command_environment()
    del environment[fork_server.VARIABLE]
    return environment
