"""Files for launchers, which no test can run: their form, their keys, and the script they share."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.conftest import ROOT, command_environment
from tests.test_cli import Lottery, write_config
from turnwise.config import Config, known_keys

__all__ = ["Lottery"]

LAUNCHERS = ROOT / "examples" / "launchers"
SCRIPT = LAUNCHERS / "train_or_resume.sh"
_OVERRIDE = re.compile(r"^([a-z_]+(?:\.[a-z_]+)*)=")


def an_object(needed: str, optional: str = "", **kinds: Any) -> dict[str, Any]:
    """A schema of an object with these fields and no others."""
    names = [*needed.split(), *optional.split()]
    return {
        "type": "object",
        "required": needed.split(),
        "properties": {name: kinds.get(name, {}) for name in names},
        "additionalProperties": False,
    }


TEMPLATE = an_object("spec", "metadata", spec={"type": "object", "required": ["containers"]})
GROUP = "rayStartParams template"
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
RAY_JOB = an_object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=an_object("name", "namespace labels annotations"),
    spec=an_object(
        "entrypoint rayClusterSpec",
        "submissionMode backoffLimit shutdownAfterJobFinishes ttlSecondsAfterFinished "
        "activeDeadlineSeconds runtimeEnvYAML submitterPodTemplate suspend",
        entrypoint={"type": "string"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=an_object(
            "rayVersion headGroupSpec workerGroupSpecs",
            rayVersion={"type": "string"},
            headGroupSpec=an_object(GROUP, template=TEMPLATE, rayStartParams=PARAMETERS),
            workerGroupSpecs={
                "type": "array",
                "items": an_object(
                    f"groupName replicas minReplicas maxReplicas {GROUP}",
                    template=TEMPLATE,
                    rayStartParams=PARAMETERS,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                ),
            },
        ),
    ),
)
"""The fields of KubeRay's RayJob that its reference has and a run may need."""
TASK = an_object(
    "name resources run",
    "workdir num_nodes envs secrets file_mounts setup",
    name={"type": "string"},
    run={"type": "string"},
    setup={"type": "string"},
    envs={"type": "object", "additionalProperties": {"type": "string"}},
    resources=an_object(
        "accelerators use_spot",
        "infra cpus memory disk_size disk_tier image_id job_recovery",
        use_spot={"type": "boolean"},
        job_recovery=an_object(
            "strategy",
            "max_restarts_on_errors recover_on_exit_codes",
            strategy={"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
            max_restarts_on_errors=COUNT,
        ),
    ),
    file_mounts={
        "type": "object",
        "additionalProperties": an_object(
            "mode", "name source store", mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}
        ),
    },
)
"""The fields of SkyPilot's task, in the same way."""


def read(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((LAUNCHERS / name).read_text())
    return tree


def pods() -> list[dict[str, Any]]:
    cluster = read("rayjob.yaml")["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize(("name", "schema"), [("rayjob.yaml", RAY_JOB), ("skypilot.yaml", TASK)])
def test_a_launchers_file_has_only_fields_that_it_knows(name: str, schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(read(name))


def test_commands_set_keys_that_exist_and_name_files_that_exist() -> None:
    commands = [read("rayjob.yaml")["spec"]["entrypoint"], read("skypilot.yaml")["run"]]
    known = known_keys()
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        overrides = [found[1] for word in words if (found := _OVERRIDE.match(word))]
        assert "training.checkpoint_minutes" in overrides
        assert [key for key in overrides if key not in known] == []
        files = [word for word in words if word.startswith("examples/")]
        assert str(SCRIPT.relative_to(ROOT)) in files
        assert all((ROOT / file).exists() for file in files)
    assert (ROOT / read("skypilot.yaml")["envs"]["CONFIG"]).exists()


def test_the_cluster_has_this_ray_and_as_many_gpus_as_the_run() -> None:
    job = read("rayjob.yaml")["spec"]
    assert job["rayClusterSpec"]["rayVersion"] == version("ray")
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    of_a_pod = int(pods()[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    used = re.findall(r"(?:serving\.workers|training\.ranks)=(\d+)", job["entrypoint"])
    assert sum(map(int, used)) == group["replicas"] * of_a_pod
    run = read("skypilot.yaml")
    used = re.findall(r"(?:serving\.workers|training\.ranks)=(\d+)", run["run"])
    assert sum(map(int, used)) == int(run["resources"]["accelerators"].partition(":")[2])


def test_a_pod_that_is_taken_away_has_time_to_save() -> None:
    head, *workers = pods()
    assert head["terminationGracePeriodSeconds"] > 60 + 30
    hook = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    entrypoint = read("rayjob.yaml")["spec"]["entrypoint"]
    (pid_file,) = re.findall(r"PID_FILE=(\S+)", entrypoint)
    assert f"cat {pid_file}" in hook[-1]
    for pod in (head, *workers):  # all of them see the run's folder
        assert {"name": "runs", "mountPath": "/runs"} in pod["containers"][0]["volumeMounts"]


def test_the_hook_ends_the_process_and_waits_for_it(tmp_path: Path) -> None:
    (*shell, hook) = pods()[0]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    saved, pid_file = tmp_path / "saved", tmp_path / "pid"
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        f"    open({str(saved)!r}, 'w')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(pid_file)!r}, 'w').write(str(__import__('os').getpid()))\n"
        "signal.pause()\n"
    )
    # Its parent must not be this process, of which it would remain a zombie.
    started = f"{shlex.join([sys.executable, '-c', program])} > /dev/null 2>&1 &"
    subprocess.run(["sh", "-c", started], check=True)
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.01)
    command = [*shell, hook.replace("/tmp/turnwise.pid", str(pid_file))]
    subprocess.run(command, timeout=60, stderr=subprocess.DEVNULL)
    assert saved.exists()


def script(folder: Path, *arguments: object, **environment: str) -> list[str]:
    """Run the script with a program in place of turnwise that prints its arguments."""
    place = folder / "bin" / "turnwise"
    place.parent.mkdir(exist_ok=True)
    place.write_text('#!/bin/sh\necho $$\nprintf "%s\\n" "$@"\n')
    place.chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPT), *map(str, arguments)],
        env={"PATH": f"{place.parent}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_run_without_a_checkpoint_starts(tmp_path: Path) -> None:
    folder, pid_file = tmp_path / "my runs" / "one", tmp_path / "pid"
    pid, *found = script(tmp_path, folder, "c.yaml", "training.steps=3", PID_FILE=str(pid_file))
    place = f"output_dir={folder.parent}"
    assert found == ["train", "c.yaml", place, "name=one", "training.steps=3"]
    assert pid_file.read_text().strip() == pid


def test_a_run_with_a_checkpoint_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "one"
    (folder / "checkpoints" / "step-0003").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    _, *found = script(tmp_path, folder, "c.yaml", "training.steps=3")
    assert found == ["train", "--resume", str(folder), "training.steps=3"]


def test_a_run_without_a_checkpoint_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "checkpoints" / "step-0003.writing").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("kept")
    _, *found = script(tmp_path, folder, "c.yaml")
    assert found[:2] == ["train", "c.yaml"]
    (aside,) = tmp_path.glob("one.*")
    assert (aside / "metrics.jsonl").read_text() == "kept"
    assert not folder.exists()


@pytest.mark.slow
def test_the_script_trains_and_goes_on(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config, folder = write_config(make_config, tmp_path), tmp_path / "out" / "one"
    environment = command_environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    said = []
    for steps in (1, 2):
        done = subprocess.run(
            ["sh", SCRIPT, folder, config, f"training.steps={steps}", "eval.every=0"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "continuing from" not in said[0]
    assert f"continuing from {folder.resolve()}/checkpoints/step-0001" in said[1]


@pytest.mark.slow
def test_kubernetes_own_schema_accepts_the_pods() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for pod in pods():
        tree = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        validate.validate(tree, validate.latest_version(), strict=True)


@pytest.mark.slow
def test_skypilot_accepts_the_task() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCHERS / "skypilot.yaml"))
    assert task.name == "turnwise"
    assert all(resources.use_spot for resources in task.resources)
