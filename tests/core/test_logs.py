"""Where lines go, in a process of its own: logging belongs to the whole process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment
from turnwise.config import Config, dump_config
from turnwise.core import logs

DRIVER = """
import logging, logging.config, sys
from turnwise.core import logs
from turnwise.config import load_config
logs.to_terminal()
config = load_config(sys.argv[1], sys.argv[2:])
opened = logs.open_logs(config.run_folder, config.log_level)
opened.__enter__()
logging.getLogger("their.agent").warning("theirs")
ray = logging.getLogger("ray")
ray.addHandler(logging.StreamHandler())
ray.setLevel(logs.quiet("ray"))
# What libraries do as they are imported.
logging.getLogger().setLevel(logging.ERROR)
logging.getLogger().handlers = []
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "root": {"level": 40}})
ours = logging.getLogger("turnwise.serving.manager")
ours.warning("worker-0 failed")
ours.info("a detail")
ours.debug("a trifle")
logging.getLogger("vllm.engine").info("vLLM's chatter")
ray.info("Ray's chatter")
"""
ACTOR = """
import logging, os, sys
from turnwise.core import logs
logs.redirect_output()
print("printed")
os.system("echo a child")
logging.getLogger("turnwise.serving.scheduler").info("ours")
logging.getLogger("turnwise.serving.scheduler").debug("a trifle")
"""


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=command_environment() | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


@pytest.mark.parametrize(
    ("level", "printed", "filed"),
    [
        ("warning", ["worker-0 failed"], ["worker-0 failed", "a detail"]),
        ("debug", ["worker-0 failed", "a detail", "a trifle"], ["a detail", "a trifle"]),
        ("error", [], ["worker-0 failed", "a detail"]),
    ],
)
def test_our_lines_are_printed_and_everybodys_are_in_the_file(
    make_config: Callable[..., Config],
    tmp_path: Path,
    level: str,
    printed: list[str],
    filed: list[str],
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(make_config(output_dir=str(tmp_path))))
    done = run(DRIVER, tmp_path / "config.yaml", f"log_level={level}")
    theirs = ["WARNING their.agent: theirs"] if level != "error" else []
    lines = done.stderr.splitlines()
    assert [line for line in lines if "turnwise" not in line] == theirs
    assert [line.partition(": ")[2] for line in lines if "turnwise" in line] == printed
    text = (tmp_path / "run" / "logs" / "turnwise.log").read_text()
    for line in [*filed, "vLLM's chatter", "Ray's chatter", "theirs"]:
        assert text.count(line) == 1, text
    assert ("a trifle" in text) == (level == "debug")


def test_an_actor_and_its_children_write_to_a_file_of_their_own(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(output_dir=str(tmp_path))
    environment = logs.environment(config.run_folder, config.log_level, "worker-3")
    done = run(ACTOR, **environment)
    assert done.stdout == done.stderr == ""
    lines = (tmp_path / "run" / "logs" / "worker-3.log").read_text().splitlines()
    assert {"printed", "a child"} < set(lines)
    (own,) = (line for line in lines if line not in ("printed", "a child"))
    assert own.endswith("turnwise.serving.scheduler: ours")
    assert "printed" in run(ACTOR).stdout  # where it was started without a file


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file")
    config = dump_config(make_config(output_dir=str(tmp_path / "runs")))
    (tmp_path / "config.yaml").write_text(config)
    done = run(DRIVER, tmp_path / "config.yaml")
    assert f"no logs can be written to {tmp_path}/runs/run/logs" in done.stderr
    assert "WARNING turnwise.serving.manager: worker-0 failed" in done.stderr


PROGRAM = """
import logging, sys
from turnwise.core import logs
from turnwise.config import load_config
if sys.argv[2] == "its own":
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
root, ours, theirs = map(logging.getLogger, (None, "turnwise.serving.manager", "my.program"))
for name in ("vllm", "ray"):
    logging.getLogger(name).addHandler(logging.NullHandler())
names = (None, "turnwise", "vllm", "ray")
state = lambda: [
    (each.level, each.propagate, [*each.handlers]) for each in map(logging.getLogger, names)
]
before = state()
config = load_config(sys.argv[1])
run, level = config.run_folder, config.log_level
for others in (1, 2):
    with logs.open_logs(run, level), logs.open_logs(run.with_name("other"), level):
        theirs.info("theirs %d", others)
        theirs.warning("their warning")
        ours.info("a detail")
        ours.warning("worker-0 failed")
        logging.getLogger("vllm.engine").info("vLLM's chatter")
        logging.getLogger("vllm.engine").warning("vLLM's warning")
    assert state() == before, (state(), before)
theirs.info("afterwards")
"""


@pytest.mark.parametrize("handlers", ["its own", "none"])
def test_a_program_keeps_its_own_handlers(
    make_config: Callable[..., Config], tmp_path: Path, handlers: str
) -> None:
    """Only the command line replaces those of the root; a run leaves nothing behind."""
    (tmp_path / "config.yaml").write_text(dump_config(make_config(output_dir=str(tmp_path))))
    done = run(PROGRAM, tmp_path / "config.yaml", handlers)
    warning = "turnwise.serving.manager: worker-0 failed"
    if handlers == "its own":
        each = [f"my.program: theirs {n}\nmy.program: their warning\n{warning}\n" for n in (1, 2)]
        assert done.stdout == "".join(each) + "my.program: afterwards\n"
        assert done.stderr == ""
    else:
        assert done.stdout == ""
        assert done.stderr == 2 * f"WARNING my.program: their warning\nWARNING {warning}\n"
    for name in ("run", "other"):
        text = (tmp_path / name / "logs" / "turnwise.log").read_text()
        assert text.count("vLLM's chatter") == text.count("a detail") == 2
        assert text.count("worker-0 failed") == text.count("their warning") == 2
