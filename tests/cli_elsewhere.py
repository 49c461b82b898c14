"""Run commands of the command line as on a system without what Linux alone has.

python -m tests.cli_elsewhere SYSTEM FOLDER: FOLDER holds a run named `demo`.
"""

import signal
import sys
from pathlib import Path

ABSENT = {
    "darwin": (("SIGRTMAX", "SIGRTMIN"), ()),
    "win32": (
        ("SIGRTMAX", "SIGRTMIN", "SIGKILL", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1"),
        ("resource", "fcntl", "termios", "pwd", "grp"),
    ),
}
"""Signals and modules that a system lacks."""


def main(system: str, folder: Path) -> None:
    signals, modules = ABSENT[system]
    for name in signals:
        delattr(signal, name)
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]
    from typer.testing import CliRunner

    from turnwise.cli import app

    run = str(folder / "demo")
    page, traces, back = (
        str(folder / name) for name in ("page.html", "traces.jsonl", "back.jsonl")
    )
    steps = str(max((folder / "demo" / "trajectories").glob("step-*.jsonl")))
    for command in (
        ["--help"],
        ["show", run],
        ["view", run, "--export", page],
        ["config"],
        ["docs", "reward"],
        ["explain", "grad_norm"],
        ["config", f"{run}/config.yaml"],
        ["trace", "export", steps, traces],
        ["trace", "import", traces, back],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output, result.exception)
    heavy = {"vllm", "ray"} & sys.modules.keys()
    assert not heavy, heavy
    if system == "darwin":  # torch itself asks sys.platform what a system has
        result = CliRunner().invoke(app, ["export", run])
        assert "holds no whole checkpoint" in result.output, result.output
    sys.platform = system
    for command in (
        *(["train", "x.yaml"], ["serve", "x.yaml"], ["eval", "x.yaml"]),
        *(["stuck", run], ["scale", run, "--workers", "2"], ["replay", run], ["bundle", run]),
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, command
        assert f"{command[0]} needs Linux, and this is {system}" in result.output, result.output


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
