"""Sandboxes in containers, behind a server, and of a class: the same sessions, ended as surely.

A script stands for podman in the fast tests. podman itself runs in the slow ones, where it is
installed with the default image.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.sandboxes.server import Server
from tests.tools import sandboxes
from turnwise.config.rollout import CodeToolConfig as Limits
from turnwise.errors import InputError, TrajectoryError
from turnwise.tools.code import CodeSession, CodeTool, choose
from turnwise.tools.sandbox.http import KEY_VARIABLE
from turnwise.tools.toolbox import Toolbox


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with the state of the script that stands for podman."""
    (tmp_path / "podman").symlink_to(Path(__file__).with_name("fake_engine.sh"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path))
    choose.cache_clear()
    yield tmp_path
    choose.cache_clear()


def containers(engine: Path) -> list[Path]:
    return list(engine.glob("turnwise-*"))


def gone(engine: Path) -> None:
    """Wait until no container is left."""
    ends = time.monotonic() + 60
    while containers(engine):
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_session_in_a_container_keeps_its_state_and_is_removed(engine: Path) -> None:
    session = CodeSession(choose("podman"), Limits(timeout=20.0))
    try:
        assert session.run("x = 41") == "[no output]"
        assert session.run("print('a' * 20000); x + 1").endswith("aaa\n42")
        assert session.run("1 / 0").endswith("ZeroDivisionError: division by zero")
        assert len(containers(engine)) == 1
    finally:
        session.close()
    assert containers(engine) == []


def test_a_container_has_no_network_and_all_limits(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", "a-secret")
    session = CodeSession("podman", Limits(memory=128, disk=32, processes=9, image="mine"))
    try:
        session.run("1")
        assert session._process is not None
        keeper = Path(f"/proc/{session._process._keeper.pid}/cmdline").read_text()
        assert "a-secret" not in keeper  # others on the machine may read it
    finally:
        session.close()
    run = (engine / "log").read_text().splitlines()[0]
    for option in (
        *("--network=none", "--memory=128m", "--memory-swap=128m", "--pids-limit=10"),
        *(
            "--init",
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--pull=never",
        ),
        *(
            "--tmpfs=/sandbox:rw,exec,nosuid,nodev,mode=1777,size=32m",
            "--log-driver=none",
            " mine ",
        ),
    ):
        assert option in run, option


def test_code_that_ignores_its_deadline_ends_with_its_container(engine: Path) -> None:
    session = CodeSession("podman", Limits(timeout=1.0))
    try:
        text = session.run(
            "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile 1: 0"
        )
        assert "[stopped after 1 s; variables and files are lost]" in text
        assert containers(engine) == []
        assert session.run("6 * 7") == "42"
    finally:
        session.close()


def test_a_container_ends_with_the_process_that_began_it(engine: Path) -> None:
    code = (
        "import os; from turnwise.tools.code import CodeSession\n"
        "from turnwise.config.rollout import CodeToolConfig\n"
        "session = CodeSession('podman', CodeToolConfig(timeout=50.0))\n"
        "session.run('1'); print('begun', flush=True)\n"
        "session.run('while True: pass')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"begun\n"
        [place] = containers(engine)
        pid = int(place.read_text())
        driver.kill()
    gone(engine)
    while Path(f"/proc/{pid}").exists():  # the keeper has not buried it yet
        time.sleep(0.05)


def test_an_image_that_is_missing_is_named(engine: Path) -> None:
    with pytest.raises(
        InputError, match=r"podman: podman did not start: .*image not known.*missing"
    ):
        choose("podman", None, "missing")


async def test_a_sandbox_that_does_not_start_drops_the_trajectory(engine: Path) -> None:
    toolset = CodeTool("python", {"sandbox": "podman"}).toolset()
    box = Toolbox(await toolset.open(), timeout=60.0, max_chars=1000)
    (engine / "podman").unlink()
    with pytest.raises(TrajectoryError) as failure:
        await box.call("python", '{"code": "1"}')
    assert failure.value.reason == "sandbox_error"
    await toolset.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's server, on this machine's own sandbox."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with Server(("127.0.0.1", 0), "secret", sandboxes.backend("first")) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
        thread.join()


async def test_a_server_keeps_the_sessions_of_another_machine(server: str) -> None:
    tool = CodeTool("python", {"sandbox": server, "timeout": 20})
    first, second = tool.toolset(), tool.toolset()
    boxes = [Toolbox(await each.open(), timeout=60.0, max_chars=999) for each in (first, second)]
    code = json.dumps({"code": "x = 41"})
    assert (await boxes[0].call("python", code)).text == "[no output]"
    assert (await boxes[0].call("python", json.dumps({"code": "x + 1"}))).text == "42"
    assert "NameError" in (await boxes[1].call("python", json.dumps({"code": "x"}))).text
    await first.close()
    await second.close()
    with pytest.raises(TrajectoryError, match=r"the sandbox server at .* 400") as failure:
        await boxes[0].call("python", code)
    assert failure.value.reason == "sandbox_error"


def test_a_server_that_is_not_there_is_named() -> None:
    limits = Limits(sandbox="http://127.0.0.1:9/")
    with pytest.raises(
        TrajectoryError, match=r"the sandbox server at http://127\.0\.0\.1:9 cannot be reached"
    ):
        CodeTool("shell", limits.model_dump()).choose()(limits, shell=True).run("ls")


class Echo:
    """A sandbox of one's own."""

    def __init__(self, limits: Limits, *, shell: bool) -> None:
        self.limits, self.shell, self.closed = limits, shell, False

    def run(self, code: str) -> str:
        return f"{self.limits.image} {self.shell} {code}"

    def close(self) -> None:
        self.closed = True


async def test_a_class_of_ones_own_is_a_sandbox() -> None:
    tool = CodeTool("shell", {"sandbox": f"{__name__}:Echo", "image": "mine"})
    toolset = tool.toolset()
    box = Toolbox(await toolset.open(), timeout=60.0, max_chars=1000)
    assert (await box.call("shell", '{"command": "ls"}')).text == "mine True ls"
    await toolset.close()
    with pytest.raises(InputError, match=r"sandbox: .* has no Nothing"):
        CodeTool("shell", {"sandbox": f"{__name__}:Nothing"}).choose()


@pytest.mark.parametrize(
    "name", ["e2b:E2B", "daytona:DaytonaSandbox", "modal_sandbox:ModalSandbox"]
)
def test_the_classes_for_services_say_what_to_install(name: str) -> None:
    tool = CodeTool("python", {"sandbox": f"examples.sandboxes.{name}"})
    session = tool.choose()(tool.limits, shell=False)
    with pytest.raises(InputError, match="pip install"):
        session.run("1")
    session.close()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["podman", "docker"])
def test_containers_of_the_real_programs(program: str) -> None:
    try:
        backend = choose(program)
    except InputError as error:
        pytest.skip(str(error))
    session = CodeSession(backend, Limits(timeout=5.0, memory=128))
    try:
        assert session.run("x = 41") == "[no output]"
        assert session.run("x + 1") == "42"
        assert "MemoryError" in session.run("bytearray(1 << 30)")
        network = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
        assert "OSError" in session.run(network)
        assert "Read-only file system" in session.run("open('/usr/x', 'w')")
        assert session.run("open('note', 'w').write('kept')") == "4"
        assert "[stopped after 5 s" in session.run(
            "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
        )
    finally:
        session.close()
    listed = [program, "ps", "-a", "--filter", "label=turnwise", "--format", "{{.Names}}"]
    assert subprocess.run(listed, capture_output=True, check=True).stdout == b""
