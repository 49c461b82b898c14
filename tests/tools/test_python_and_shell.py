"""The tools `python` and `shell`: state, results, interruption, limits, choice of a sandbox."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnwise.tools
from tests.tools import sandboxes
from turnwise.config import RolloutConfig, ToolConfig
from turnwise.config.rollout import CodeToolConfig as Limits
from turnwise.errors import InputError
from turnwise.rollouts.runner import load_tools
from turnwise.tools.code import CodeSession, CodeTool, choose
from turnwise.tools.sandbox import backends
from turnwise.tools.toolbox import Toolbox


@pytest.fixture(scope="module")
def python() -> Iterator[CodeSession]:
    opened = sandboxes.session("first", Limits(timeout=20.0))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def shell() -> Iterator[CodeSession]:
    opened = sandboxes.session("first", Limits(timeout=20.0), shell=True)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("6 * 7", "42"),
        ("print('a'); 'b'", "a\n'b'"),
        ("x = 5", "[no output]"),
        ("None", "[no output]"),
        ("", "[no output]"),
        ("import sys; print('to stderr', file=sys.stderr)", "to stderr"),
        ("import subprocess; subprocess.run(['echo', 'hi']).returncode", "hi\n0"),
        ("def f():\n    return 'ä\U0001f600'\nf()", "'ä\U0001f600'"),
        ("input()", "EOFError: EOF when reading a line"),
        ("exit(3)", "SystemExit: 3"),
        ("'\ud800'", "'?'"),
    ],
)
def test_a_call_returns_the_output_and_the_last_value(
    python: CodeSession, code: str, text: str
) -> None:
    assert python.run(code).endswith(text)


def test_variables_modules_and_files_stay(python: CodeSession) -> None:
    python.run("import math\nradius = 2\nopen('note', 'w').write('kept')")
    assert python.run("round(math.pi * radius**2, 2), open('note').read()") == "(12.57, 'kept')"


def test_an_error_names_the_line_of_the_code_and_nothing_of_ours(python: CodeSession) -> None:
    text = python.run("def half(x):\n    return x / 0\n\nhalf(3)")
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert "line 2, in half" in text
    assert "return x / 0" in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "inner.py" not in text
    assert python.run("x = = 3").startswith('  File "<call')


def test_a_long_output_keeps_its_beginning_and_its_end(python: CodeSession) -> None:
    text = python.run("print('begin'); print('x' * 10**6); print('end')")
    assert text.startswith("begin\n")
    assert text.endswith("\nend")
    assert "bytes left out" in text
    assert len(text) < 8100


def test_interrupted_code_keeps_its_variables() -> None:
    opened = sandboxes.session("first", Limits(timeout=0.5))
    try:
        opened.run("kept = 1")
        text = opened.run("print('partial')\nwhile True: pass")
        assert text.startswith("partial\n")
        assert text.endswith("KeyboardInterrupt: interrupted after 0.5 s")
        assert opened.run("kept") == "1"
    finally:
        opened.close()


def test_a_shell_keeps_directory_variables_and_functions(shell: CodeSession) -> None:
    shell.run("mkdir -p sub && cd sub; X='two words'; twice() { echo \"$1 $1\"; }")
    assert shell.run('basename "$PWD"; echo $X; twice ab').split("\n") == [
        "sub", "two words", "ab ab",
    ]  # fmt: skip
    assert shell.run("false") == "[exit code 1]"
    assert shell.run("exit 3") == "[exit code 3]"
    assert shell.run("basename $PWD") == "sub"
    assert "No such file" in shell.run("cat missing")
    assert shell.run("python3 -c 'print(6 * 7)'") == "42"


def test_an_interrupted_command_leaves_the_shell_as_it_was() -> None:
    opened = sandboxes.session("first", Limits(timeout=1.0), shell=True)
    try:
        opened.run("X=kept; echo data > file")
        assert "[interrupted after 1 s]" in opened.run("trap '' INT TERM; sleep 300")
        assert opened.run("echo $X; cat file") == "kept\ndata"
    finally:
        opened.close()


def test_close_ends_a_call() -> None:
    opened = sandboxes.session("first", Limits(timeout=300.0))
    assert opened.run("1") == "1"
    said: list[str] = []
    call = threading.Thread(target=lambda: said.append(opened.run("while True: pass")))
    call.start()
    while not opened._calls.locked():
        pass
    opened.close()
    call.join(60)
    assert said == ["[the interpreter ended; variables and files are lost]"]
    with pytest.raises(InputError, match="the sandbox is closed"):
        opened.run("1")


async def test_each_trajectory_has_a_sandbox_of_its_own() -> None:
    sandboxes.backend("first")
    tool = turnwise.tools.python()
    first, second = tool.toolset(), tool.toolset()
    boxes = [
        Toolbox(await opened.open(), timeout=60.0, max_chars=1000) for opened in (first, second)
    ]
    assert (await boxes[0].call("python", '{"code": "x = 1"}')).outcome == "ok"
    assert (await boxes[0].call("python", '{"code": "x"}')).text == "1"
    assert "NameError" in (await boxes[1].call("python", '{"code": "x"}')).text
    assert (await boxes[1].call("python", '{"command": "x"}')).outcome == "bad_arguments"
    await first.close()
    await second.close()


async def test_calls_of_one_turn_run_in_their_order() -> None:
    sandboxes.backend("first")
    opened = turnwise.tools.python().toolset()
    box = Toolbox(await opened.open(), timeout=60.0, max_chars=1000)
    try:
        await box.call("python", '{"code": "done = []"}')
        calls = [box.call("python", f'{{"code": "done.append({n}); done"}}') for n in range(20)]
        results = await asyncio.gather(*calls)
        assert results[-1].text == str(list(range(20)))
    finally:
        await opened.close()


def test_an_interpreter_brings_its_packages() -> None:
    opened = sandboxes.session(
        "first", Limits(timeout=60.0, memory=1024, interpreter=sys.executable)
    )
    try:
        assert opened.run("import numpy; int(numpy.arange(4).sum())") == "6"
    finally:
        opened.close()


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("no_programs")
def test_without_a_sandbox_the_error_says_what_to_install() -> None:
    for wanted in ("auto", "sandlock", "bubblewrap"):
        with pytest.raises(InputError, match=r"'turnwise\[sandbox\]'.*apt install bubblewrap"):
            choose(wanted)
    entry = ToolConfig.model_validate({"python": {}})
    with pytest.raises(InputError, match=r"^rollout\.tools\.python: a sandbox for code needs"):
        load_tools([entry])
    unconfined = ToolConfig.model_validate({"python": {"sandbox": "none"}})
    assert len(load_tools([unconfined])) == 1
    with pytest.raises(InputError, match=r"podman: not installed"):
        choose("podman")
    with pytest.raises(ValueError, match="sandbox must be auto, sandlock, bubblewrap, docker"):
        Limits(sandbox="nothing")


def test_code_without_a_sandbox_has_limits_and_its_own_folder() -> None:
    opened = CodeSession("none", Limits(timeout=1.0, memory=256))
    try:
        assert opened.run("6 * 7") == "42"
        assert "MemoryError" in opened.run("bytearray(1 << 30)")
        assert "interrupted after 1 s" in opened.run("while True: pass")
        folder = Path(opened.run("import os; print(os.getcwd())"))
        assert folder.is_dir()
    finally:
        opened.close()
    assert not folder.exists()


def test_entries_of_the_configuration_are_checked() -> None:
    tools = [{"python": {"timeout": 5, "memory": 256}}, {"shell": {}}]
    rollout = RolloutConfig.model_validate({"tools": tools})
    assert rollout.tools[0].python is not None
    assert rollout.tools[0].python.memory == 256
    with pytest.raises(ValueError, match="must be shorter than tool_timeout"):
        RolloutConfig.model_validate({"tools": tools, "tool_timeout": 5})
    with pytest.raises(ValueError, match="exactly one of the keys"):
        ToolConfig.model_validate({"python": {}, "shell": {}})


async def test_a_configured_tool_is_made_for_each_trajectory() -> None:
    sandboxes.backend("first")
    (source,) = load_tools([ToolConfig.model_validate({"shell": {"memory": 128}})])
    first, second = source(), source()
    assert first is not second
    (tool,) = await first.open()  # type: ignore[union-attr]
    assert tool.name == "shell"
    await first.close()  # type: ignore[union-attr]


def test_the_tools_are_imported_on_first_use() -> None:
    code = (
        "import sys, turnwise.tools\n"
        "assert 'turnwise.tools.code' not in sys.modules and 'pydantic' not in sys.modules\n"
        "turnwise.tools.python; assert 'turnwise.tools.code' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = turnwise.tools.nothing  # type: ignore[attr-defined]
    assert isinstance(turnwise.tools.python(), CodeTool)
