"""Checks of `turnwise doctor FILE`: model, data, environment, algorithm, memory, log-probs, disk,
ports."""

import os
import shutil
import socket
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from turnwise.config import Config
from turnwise.config.chat_template import TEMPLATE_NAMES
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.errors import InputError
from turnwise.observe.doctor import Check, Finding, State, size
from turnwise.serving.openai.address import listen
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from turnwise.training.batching import Layout

_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_CONNECT_SECONDS = 5.0
_LEAST = 2**30
"""Free space that any run needs."""
_LARGEST = 16 * 2**30
"""Memory of a CPU of which half may hold a model: a larger one would take minutes."""
_STATE = 4
"""Size of a checkpoint in sizes of the model: weights, and Adam's float32 state."""


@dataclass
class ConfigChecks:
    """The checks of one configuration.

    Example:
        checks = ConfigChecks(load_config("config.yaml")).all
        findings = [*examine(checks)]
    """

    config: Config
    _prompt_tokens: int | None = None
    """Length of the first row's prompt; None before it is known."""

    @property
    def all(self) -> list[Check]:
        """The checks, in the order of the report."""
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
        """Check that the model, its tokenizer and the other models can be found."""
        check_model(self.config.model.path)
        if self.config.model.tokenizer is not None:
            check_tokenizer(self.config.model.tokenizer)
        for key, other in self.config.algorithm.other_models().items():
            check_model(other, f"{key}.path")
        weights = _weight_bytes(self.config)
        known = f", {size(weights)} of weights" if weights else ", from the Hugging Face Hub"
        return Finding("model", "ok", f"{self.config.model.path}{known}")

    def data(self) -> Finding:
        """Check that the rows can be read."""
        from turnwise.rollout.data import load_heldout, load_training

        counts = []
        for name, part in self.config.parts().items():
            for path in filter(None, (part.data.path, part.data.eval_path)):
                check_data(path)
            counts.append(f"{f'{name}: ' if name else ''}{len(load_training(part)):,} rows")
            if part.data.eval_path:
                counts.append(f"{len(load_heldout(part)):,} held out")
        return Finding("data", "ok", ", ".join(counts))

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        from turnwise.chat.template import load_tokenizer

        return load_tokenizer(self.config)

    def template(self) -> Finding:
        """Check how the bridge works with the model's chat template, and what it leaves out."""
        from turnwise.chat.template import load_template, missing_stop
        from turnwise.trajectory.check_template import TOOLS, check_template
        from turnwise.trajectory.left_out import left_out

        template = load_template(self.config, self._tokenizer)
        if template.missing:
            return Finding("chat template", "warning", template.missing)
        findings = check_template(template)
        counts = Counter(finding.verdict for finding in findings)
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        said = f"{len(findings)} kinds of conversation: {said}"
        if hidden := left_out(template, TOOLS):
            said += f"; it leaves out {', '.join(hidden)}"
        if stop := missing_stop(self.config, template):
            return Finding("chat template", "warning", said, stop)
        if not counts["forks"] and not counts["refuses"]:
            return Finding("chat template", "ok", said)
        path = resolve_tokenizer(self.config.model)
        see = f"python -m turnwise.trajectory.check_template {path}"
        if own := self.config.model.chat_template:
            see += f" --chat-template {own if own in TEMPLATE_NAMES else 'FILE'}"
        return Finding("chat template", "warning", said, see)

    def environment(self) -> Finding:
        """Build the environment and prompt of the first row of each environment."""
        from turnwise.rollout import Runner
        from turnwise.rollout.data import load_training
        from turnwise.rollout.mixture import first_of_each

        runner, parts, said = Runner(self.config, self._tokenizer), self.config.parts(), []
        for problem in first_of_each(load_training(self.config)):
            length = runner.check(problem)
            if length is not None:
                self._prompt_tokens = max(length, self._prompt_tokens or 0)
            prompt = "a prompt known later" if length is None else f"a prompt of {length} tokens"
            said.append(f"{parts[problem.environment].environment}: {problem.id}, {prompt}")
        return Finding("environment", "ok", "; ".join(said))

    def algorithm(self) -> Finding:
        """Check that the parts of the algorithm fit each other, and the size of the groups."""
        from turnwise.training.advantages import check_group_size
        from turnwise.training.algorithms import make_algorithm

        parts, n = self.config.algorithm, self.config.sampling.n
        check_group_size(self.config, make_algorithm(parts))
        said = f"{parts.advantage.name} and {parts.loss.name}, groups of {n}"
        return Finding("algorithm", "ok", said)

    def memory(self) -> Finding:
        """Check that the run fits on this machine's devices, as `turnwise plan` computes it."""
        from turnwise.observe.plan import Machine, make_plan  # imports Ray

        plan = make_plan(self.config, Machine.here(), self._prompt_tokens)
        each = (
            f"{one.device}: {size(one.expected)} expected, {size(one.bytes)} at the worst, of "
            f"{size(one.limit)}"
            for one in plan.loads
        )
        said = f"{'; '.join(each)}; an engine's cache holds {plan.contexts:.1f} full contexts"
        if plan.fits:
            return Finding("memory", "ok", said)
        if not plan.possible:
            return Finding("memory", "broken", said, "turnwise plan FILE")
        return Finding("memory", "warning", said, "turnwise plan FILE")

    def logprobs(self) -> Finding:
        """Check that the trainer's log-probs are the model's own, in each layout."""
        import torch

        from turnwise.training.layout_check import agreed_layout, check_policy
        from turnwise.training.loading import POLICY, dtype_of, parameters_of
        from turnwise.training.rank import layout_of

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        room = torch.cuda.mem_get_info()[0] if device.type == "cuda" else _LARGEST
        room = min(room, psutil.virtual_memory().available) // 2
        needed = parameters_of(self.config, POLICY) * dtype_of(self.config, POLICY).itemsize
        if needed > room:
            said = f"not checked here: {size(needed)} of weights, and {size(room)} is the limit"
            return Finding("log-probs", "ok", f"{said}; each run checks them before it trains")
        check = check_policy(self.config, device)
        agreed = agreed_layout(
            [check], self.config.training, layout_of(self.config.training, device)
        )
        layouts: tuple[Layout, ...] = ("padded", "packed", "shared")
        found = ", ".join(f"{layout} {check.compare(layout)}" for layout in layouts)
        said = f"{agreed.layout} micro-batches; from the model's own: {found}"
        return Finding("log-probs", "warning" if agreed.warning else "ok", said, agreed.warning)

    def disk(self) -> Finding:
        """Check the free space of output_dir against the size of the run's checkpoints."""
        folder = Path(self.config.output_dir).absolute()
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK):
            return Finding("disk", "broken", f"{folder} is not writable", "set output_dir=FOLDER")
        free = shutil.disk_usage(folder).free
        kept = self.config.training.keep_last + 2  # the best one, and the one that is written
        needed = _weight_bytes(self.config) * _STATE * kept
        said = f"{size(free)} free in {folder}"
        if needed:
            said += f"; {kept} checkpoints take about {size(needed)}"
        if free < max(_LEAST, needed):
            return Finding("disk", "broken", said, "set output_dir=FOLDER or training.keep_last=1")
        return Finding("disk", "ok", said)

    def ports(self) -> Sequence[Finding]:
        """Check that the ports of `turnwise serve` and of a run's metrics are free."""
        host, config = self.config.serving.host, self.config
        findings, free = list[Finding](), list[str]()
        uses: tuple[tuple[str, int | None, State, str], ...] = (
            ("serving.port", config.serving.port, "warning", "turnwise serve FILE serving.port=0"),
            ("metrics.port", config.metrics.port, "broken", "turnwise train FILE metrics.port=0"),
        )
        for key, port, state, mend in uses:
            try:
                if port:  # 0 takes a free one
                    listen(host, port).close()
                    free.append(f"{host}:{port} is free ({key})")
            except InputError as error:
                said = f"{host}:{port} ({key}) cannot be used: {error.__cause__}"
                findings.append(Finding("ports", state, said, mend))
        if not findings:
            findings.append(Finding("ports", "ok", ", ".join(free) or "free ones are chosen"))
        return findings

    def servers(self) -> Sequence[Finding]:
        """Check that the servers answer that the environment, the agent and the tools need."""
        findings, named = list[Finding](), {"rollout.agent": self.config.rollout.agent or ""}
        for name, part in self.config.parts().items():
            own = f"environments.{name}." if name else ""
            named[f"{own}environment"] = (part.environment or "").partition(":")[2]
            tools = own if part.rollout.tools is not self.config.rollout.tools else "rollout."
            for number, tool in enumerate(part.rollout.tools):
                if tool.mcp is not None and tool.mcp.url is not None:
                    named[f"{tools}tools.{number}.mcp.url"] = tool.mcp.url
        for key, url in named.items():
            parts = urlsplit(url)
            if parts.scheme not in _PORTS or not parts.hostname:
                continue
            address = parts.hostname, parts.port or _PORTS[parts.scheme]
            said = f"{address[0]}:{address[1]} ({key})"
            try:
                socket.create_connection(address, _CONNECT_SECONDS).close()
                findings.append(Finding("servers", "ok", f"{said} answers"))
            except OSError as error:
                mend = f"start the server, or change {key}"
                findings.append(Finding("servers", "broken", f"{said}: {error}", mend))
        return findings


def spread(trajectories: Sequence[Trajectory], dropped: Counter[str]) -> Finding:
    """Describe the rewards of some groups: their mean, and their spread within groups.

    Args:
        dropped: Failed trajectories by reason.
    """
    groups: dict[str, list[float]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem_id, []).append(trajectory.reward or 0.0)
    failed = f"; failed: {dict(dropped)}" if dropped else ""
    if not groups:
        return Finding("rollout", "broken", f"no trajectory{failed}", "see errors.log")
    mean = statistics.fmean(reward for group in groups.values() for reward in group)
    within = statistics.fmean(statistics.pstdev(group) for group in groups.values())
    said = (
        f"{len(trajectories)} trajectories of {len(groups)} problems, reward {mean:.3g}, spread "
        f"within a problem {within:.3g}{failed}"
    )
    if within == 0:
        mend = "change the problems or the reward: equal rewards within a group train nothing"
        return Finding("rollout", "warning", said, mend)
    return Finding("rollout", "ok", said)


def _weight_bytes(config: Config) -> int:
    """Return the size of the model's weights on this disk; 0 if they are not in a folder."""
    folder = Path(resolve_model(config.model.path)).expanduser()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
