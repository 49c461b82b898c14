"""The sections `rollout`, `sampling` and `eval`, and the entries of `environments`."""

from collections.abc import Iterator, Mapping
from shutil import which
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from turnwise.config.algorithm import TeacherConfig
from turnwise.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Tree,
    built_in_or_path,
)
from turnwise.config.data import RowsConfig

LOOP_NAMES = (
    *("tool_calling", "single_turn", "interleaved"),
    *("agent", "chat_scheduler", "self_play", "sampler"),
)
"""Names of the built-in agent loops, which `rollout.loops` implements."""
BASE = "base"
"""Name of the model without an adapter among several policies (`rollout.policies`)."""
COMPACTIONS = ("drop_results", "summarise")
"""Names of the built-in ways to shorten a conversation (see `rollouts.context_window`)."""
_LOOP_KEYS = {
    "chat_scheduler": "package.module:Class, a ChatCompletionScheduler",
    "sampler": "package.module:name, a RolloutSampler",
}
"""Loops that need the key of `rollout` with the loop's name, and the form of that key's value."""
AGENT = "package.module:function, a command, worker: COMMAND, or the URL of an endpoint"
"""Forms of `rollout.agent`, for errors."""
Loop = Annotated[str, built_in_or_path("loop", LOOP_NAMES)]
AgentSamplingRule = Literal["override", "override_all", "context", "refuse"]
SANDBOXES = ("auto", "sandlock", "bubblewrap", "docker", "podman", "none")
"""Names of the built-in sandboxes for code."""


def _result_format(text: str) -> str:
    """Check that the text around a result has the field {result} and no other field."""
    try:
        fields = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        text.format(result="")
    except (ValueError, LookupError, AttributeError):
        fields = set()
    if fields != {"result"}:
        raise ValueError(
            "result_format must have {result}, where the result is put, and no other braces than "
            f"{{{{ and }}}}, which stand for one, not {text!r}"
        )
    return text


def _with_colon(path: str) -> str:
    """Convert `package.module.Class`, which is verl's form, to `package.module:Class`."""
    return path if ":" in path else ":".join(path.rsplit(".", 1))


class CodeToolConfig(Section):
    """A tool that runs the model's code in a sandbox; each trajectory has its own sandbox."""

    sandbox: Annotated[
        str, built_in_or_path("sandbox", SANDBOXES, "a URL, or package.module:Class")
    ] = "auto"
    """Sandbox of the code: sandlock; bubblewrap; auto, the first of these two that works; docker;
    podman; the URL of a sandbox server; package.module:Class, a sandbox of your own; or none, which
    gives the code all rights of the run's user."""
    timeout: PositiveFloat = 10.0
    """Deadline in seconds for one call, after which the code is interrupted."""
    memory: PositiveInt = 512
    """Largest memory in MiB, of each process and of all processes together."""
    disk: PositiveInt = 64
    """Largest size of all files in MiB."""
    processes: PositiveInt = 32
    """Largest number of processes and threads."""
    interpreter: str | None = None
    """Path of the Python executable, in whose environment the code finds its packages; for docker
    and podman, a path in the image. null offers Python's own modules only."""
    image: str = "docker.io/library/python:3.12-slim"
    """For docker and podman: an image that has been pulled, with Python 3.9 or newer, and with bash
    for the tool `shell`."""


class McpConfig(Section):
    """An MCP server: a command that communicates over standard input and output, or the URL of a
    streamable HTTP server."""

    command: str | None = None
    """Program to start: one process for each trajectory, unless shared."""
    args: list[str] = []
    """Arguments of the command."""
    env: dict[str, str] = {}
    """Environment variables of the command besides PATH, HOME, USER, SHELL and TERM; ${NAME} stands
    for a variable of this process."""
    cwd: str | None = None
    """Working directory of the command; null uses this process's."""
    url: str | None = None
    """URL of a running server; each trajectory has its own MCP session, unless shared."""
    headers: dict[str, str] = {}
    """HTTP headers for the URL; ${NAME} stands for a variable of this process."""
    session_header: str | None = None
    """Name of an HTTP header that has its own value for each trajectory; null sends no header."""
    shared: bool = False
    """One process, or one MCP session, for all trajectories."""
    warm: NonNegativeInt = 0
    """Number of processes that are started before a trajectory needs them."""
    tools: list[str] | None = None
    """Names of the server's tools to offer; null offers all tools."""
    prefix: str = ""
    """Text before each tool's name."""
    start_timeout: Seconds = 60.0
    """Deadline in seconds for the server to start and list its tools."""

    def mistakes(self) -> Iterator[str]:
        if bool(self.command) == bool(self.url):
            yield "an MCP server has either a command or a url"
        if self.command and " " in self.command and not which(self.command):
            name, *args = self.command.split()
            yield (
                f"there is no program {self.command!r}: a command is one name, and what follows it "
                f"are its args: {{command: {name}, args: [{', '.join(args)}]}}"
            )
        if self.command and (self.headers or self.session_header):
            yield "headers and session_header apply to a url, not to a command"
        if self.url and (self.args or self.env or self.cwd or self.warm):
            yield "args, env, cwd and warm apply to a command, not to a url"
        if self.shared and (self.session_header or self.warm):
            yield (
                "session_header and warm are for one connection per trajectory: set shared to false"
            )


class ToolConfig(Section):
    """Tools from one source; exactly one key is set."""

    use: str | None = None
    """package.module:name of a function, a Tool, a toolset, a tool of openai-agents, pydantic-ai,
    LangChain or smolagents, or a class or function that makes a toolset for each trajectory."""
    mcp: McpConfig | None = None
    """The tools of an MCP server."""
    python: CodeToolConfig | None = None
    """A Python session for each trajectory."""
    shell: CodeToolConfig | None = None
    """A bash session for each trajectory."""

    def mistakes(self) -> Iterator[str]:
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"an entry of rollout.tools has exactly one of the keys {', '.join(names)}" + (
                f", not {' and '.join(given)}" if given else ""
            )


class JudgeConfig(Section):
    """A model that judges trajectories by a rubric, behind an OpenAI-compatible URL."""

    url: Annotated[str, Field(pattern="^https?://")]
    """URL of any server with the Chat Completions API, up to and including /v1."""
    model: str
    """Name of the model at the server."""
    rubric: str
    """Criteria by which the judge scores, as a text."""
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Worst and best score in the judge's own numbers, such as [1, 10]; the reward is from 0 to
    1."""
    compare: bool = False
    """Score all trajectories of a group in one request, which compares them."""
    row_fields: list[str] = []
    """Fields of the row to show to the judge, such as a reference answer."""
    api_key_variable: str | None = None
    """Name of the environment variable with the server's key; null sends none."""
    request: Tree = {}
    """Other parameters of each request, such as {temperature: 0}; for a server without structured
    output, set `response_format: null`."""
    concurrency: PositiveInt = 16
    """Largest number of requests at the same time, in all rollout.processes together."""
    timeout: Seconds = 60.0
    """Deadline in seconds for one verdict, retries included."""
    retries: NonNegativeInt = 4
    """Number of further attempts after an unusable answer, or after a 5xx status other than 502 to
    504. If the server is away or busy (connection errors, 408, 409, 429, 502 to 504), the request
    is repeated until the timeout, with growing pauses or after the time that the server names. 0
    never repeats a request. Without a verdict, the trajectory is dropped; with compare, the
    whole group is dropped."""

    def mistakes(self) -> Iterator[str]:
        if self.scale[0] >= self.scale[1]:
            yield f"scale must be [worst, best], not {self.scale}"


class RewardConfig(Section):
    """One part of the reward: the environment's own, a function of a trajectory or of a group, a
    reward model, or a judge."""

    function: str | None = None
    """package.module:function(trajectory, row) -> number, sync or async; null uses no function."""
    group_function: str | None = None
    """package.module:function(trajectories, row) -> one number for each trajectory, sync or async,
    called once for all finished trajectories of a group, to compare them; null uses no such
    function."""
    trl: str | None = None
    """package.module:function with TRL's signature, sync or async, called once for all finished
    trajectories of a group; null uses no such function."""
    model: str | None = None
    """Folder or Hugging Face name of a sequence-classification model with one output; null uses no
    model."""
    judge: JudgeConfig | None = None
    """Model that judges by a rubric, over Chat Completions; null uses no judge."""
    tokenizer: str | None = None
    """Folder or Hugging Face name of the model's tokenizer and chat template; null takes them from
    the folder or name in `model`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the model's weights: float32, bfloat16, or auto for the saved precision."""
    gpus: NonNegativeFloat = 0.0
    """GPUs for the model's process, such as 0.5 for half of one; 0 computes on the CPU."""
    name: str | None = None
    """Name in metrics; null uses the name of the function, of the model or of the judge's model."""
    weight: float = 1.0
    """Factor of this part in the sum."""

    @property
    def label(self) -> str:
        """Name of this part of the reward in metrics."""
        source = self.function or self.group_function or self.trl or self.model
        return self.name or source or (self.judge and self.judge.model) or "environment"

    def mistakes(self) -> Iterator[str]:
        given = (self.function, self.group_function, self.trl, self.model, self.judge)
        if sum(map(bool, given)) > 1:
            yield "an entry has one of function, group_function, trl, model and judge: use several"


class ContextConfig(Section):
    """Compaction: how a conversation is shortened when its context nears the limit."""

    compact: (
        Annotated[str, built_in_or_path("compact", COMPACTIONS, "package.module:function")] | None
    ) = None
    """Way to shorten the conversation, for loop tool_calling: drop_results leaves out all tool
    results except the results of the latest turn; summarise asks the model for a summary, which is
    trained, and continues with only the problem and the summary; package.module:function(messages,
    row) -> messages, sync or async, returns the messages to continue with. The shortened
    conversation is a new branch of the trajectory. null never shortens."""
    limit: PositiveInt | None = None
    """Largest number of tokens of a prompt; a longer prompt is compacted. null is model.max_length
    - 2 * sampling.max_tokens, but at least half of model.max_length."""

    def mistakes(self) -> Iterator[str]:
        if self.limit is not None and self.compact is None:
            yield f"limit does nothing without compact: set compact to {' or '.join(COMPACTIONS)}"


class RolloutConfig(Section):
    """Agent loop, tools, rewards and limits."""

    loop: Loop = "tool_calling"
    """Agent loop: tool_calling, single_turn, interleaved, agent, chat_scheduler, self_play,
    sampler, or package.module:Class."""
    agent: str | None = None
    """For loop agent: the agent, which receives an OpenAI base URL and a problem. It is a
    package.module:function, a command, the URL of an endpoint (http://host/run), or "worker:
    COMMAND" for a long-lived process."""
    chat_scheduler: Annotated[str, AfterValidator(_with_colon)] | None = None
    """package.module:Class or package.module.Class of a ChatCompletionScheduler. One instance
    conducts the conversations of all trajectories; its generate_sequences is called for each
    trajectory. Setting this key also sets loop to chat_scheduler."""
    sampler: Annotated[str, AfterValidator(_with_colon)] | None = None
    """package.module:name of a RolloutSampler, which samples the answers to a batch of prompts at
    once: a function (llm, prompts, sampling_params), or an object with a method generate(prompts,
    llm, sampling_params). Setting this key also sets loop to sampler."""
    agent_rewards: bool = False
    """Let an agent read and reward its own session (GET and POST .../reward); its reward replaces
    the environment's. If false, an agent has no access to its reward."""
    agent_branches: Annotated[
        str, built_in_or_path("rule", ("all", "longest"), "package.module:function")
    ] = "all"
    """Branches of an agent's session that are trained, if it has several conversations (the task, a
    title, a summary, a sub-agent): all branches (all); the branch with the most sampled tokens
    (longest); or package.module:function(trajectory, branches), which returns a list with a bool
    for each branch. Tokens that are not on a trained branch are context; the event left_out_branch
    counts the branches that are not trained."""
    agent_sampling: AgentSamplingRule = "override"
    """Treatment of sampling parameters in the requests of an agent or chat scheduler. Temperature,
    top_p, top_k, min_p and grammars (response_format, strict tools, tool_choice) apply to the turn,
    which is trained under them. A turn cannot be trained exactly if it was sampled with other
    settings: greedily, or with penalties, biases, min_tokens or logits processors. If a request has
    such settings, the turn uses the values of `sampling` instead (override); or the turn is sampled
    as requested, and is context that is not trained (context); or the request gets status 400
    (refuse). override_all uses only `sampling` for every turn. Events count the requested
    parameters."""
    policies: list[str] = []
    """Names of several policies that are trained at the same time, such as the players of a game.
    Each policy is a LoRA adapter (model.lora) with its own samples and optimizer. The attribute
    `policies` of the environment names the policy of each player, or base for the model without an
    adapter. An empty list trains one policy."""
    agent_env: list[str] = []
    """Names of environment variables to pass to an agent's command, in addition to PATH, HOME,
    PYTHON* and the like."""
    prompts_per_step: PositiveInt = 16
    """Number of problems in one training step, each with one group of trajectories."""
    concurrency: PositiveInt | None = None
    """Largest number of trajectories in progress at once. A trajectory that waits for a tool
    counts; a trajectory that waits only for its reward or judge does not. null keeps the engines
    busy: it allows 1.25 * `engine.max_num_seqs` trajectories for each engine, without counting
    those that wait for a tool, and fewer while an engine's KV cache is full."""
    processes: PositiveInt = 1
    """Number of processes that run trajectories. 1 runs them in the driver. With more, each process
    is a Ray actor on any node; this helps if one event loop cannot keep up with the turns of all
    engines. Environments and reward functions run in these processes, and each process has its own
    copy of their global state."""
    oversample: NonNegativeFloat = 0.0
    """Share of extra groups to start for a step, which then trains on the first groups to finish;
    0.25 starts a quarter more. Problems of groups that are too old for the next step begin again,
    at most as many as there are extra groups."""
    retries: NonNegativeInt = 0
    """Number of times that a failed trajectory is retried. If a judge fails to compare a group,
    nothing is retried."""
    rewards: list[RewardConfig] = []
    """Parts of the reward, which are summed. An entry without function, group_function, trl, model
    and judge is the environment's own reward; an empty list uses only the environment's reward."""
    history: Literal["exact", "template"] = "exact"
    """Tokens of earlier turns in the next prompt: the sampled tokens (exact), or the tokens that
    the chat template renders (template). With template, a turn begins a new branch where the two
    differ."""
    max_turns: PositiveInt = 8
    """Largest number of turns (calls to the engine) in one trajectory. Further requests of an agent
    or chat scheduler are refused, and its trajectory ends with the turns that it has."""
    max_response_tokens: PositiveInt | None = None
    """Largest number of tokens of a conversation after its first prompt, tool results included;
    null sets no limit other than model.max_length. Does not apply to agents over HTTP."""
    context: ContextConfig = ContextConfig()
    environment_timeout: Seconds = 120.0
    """Deadline in seconds for each call of an environment: its construction together with setup,
    and each step, metrics and close. It also applies to functions in `context.compact` and
    `agent_branches`."""
    environment_process: bool = False
    """Run each trajectory's environment in a separate process, so that a crash, or a call that
    never returns, fails only one trajectory, and leaked resources are freed when the process ends.
    If false, environments run in threads of the driver."""
    stall_timeout: Seconds = 300.0
    """Largest number of seconds that a trajectory, or its reward, may go without progress. Time
    spent in turns, tools and the environment does not count; engine.request_timeout, tool_timeout
    and environment_timeout limit that time."""
    trajectory_timeout: Seconds = 21_600.0
    """Deadline in seconds for a whole trajectory."""
    max_failed_fraction: Fraction = 0.5
    """Largest share of failed trajectories in a step or an evaluation. With several environments,
    it also limits the share of each environment, in samples of 20 or more trajectories. A larger
    share ends the run, after its last step is saved."""
    tools: list[ToolConfig] = []
    """Tools added to every environment's own. An entry has one key: `use`, the
    package.module:name of a function, a Tool, a toolset, or a class or function that makes one;
    `mcp`, an MCP server; or `python` or `shell`, a sandbox with its limits."""
    tools_in_prompt: bool = True
    """Give the environment's tools to the chat template, which must show them. If false, the
    problem has to describe the tools itself, and a template that leaves out the tools of an agent's
    requests is accepted."""
    tool_parser: str = "hermes"
    """Tool-call format of the model: the name of a vLLM tool parser."""
    tool_timeout: Seconds = 30.0
    """Deadline in seconds for one tool call."""
    tool_max_chars: PositiveInt = 8192
    """Largest number of characters of a tool result; the rest is cut off. Values above about 8,000
    have no effect on the tools `python` and `shell`, which keep at most 8,000 bytes of a call's
    output."""
    result_format: Annotated[str, AfterValidator(_result_format)] = (
        "\n<tool_response>\n{result}\n</tool_response>\n"
    )
    """For loop interleaved: the text of a result, {result}, in the assistant's turn."""
    call_start: str | None = None
    """For loop interleaved: the text that opens a call, such as <code>; null uses the format of
    rollout.tool_parser. If it is set, the chat template shows no tools: describe them in the
    prompt."""
    call_end: str | None = None
    """For loop interleaved: the text that closes a call, such as </code>; set with call_start."""
    call_tool: str | None = None
    """For loop interleaved: the tool that receives the text between call_start and call_end as its
    only argument; null parses the text as a JSON object with name and arguments, or as a call such
    as add(1, 2)."""

    @model_validator(mode="before")
    @classmethod
    def _loop_of_key(cls, tree: object) -> object:
        for name in _LOOP_KEYS:
            if isinstance(tree, dict) and tree.get(name) and tree.get("loop") is None:
                return {**tree, "loop": name}
        return tree

    def mistakes(self) -> Iterator[str]:
        if bool(self.call_start) != bool(self.call_end):
            yield "call_start and call_end belong together: set both or neither"
        if self.processes > 1 and any(reward.model for reward in self.rewards):
            yield "reward models need processes 1"
        if self.call_tool and not self.call_start:
            yield "call_tool receives the text between the tags: set call_start"
        if self.call_start and self.loop in set(LOOP_NAMES) - {"interleaved"}:
            yield f"call_start applies only to loop interleaved, not to {self.loop}"
        if self.context.compact and self.loop != "tool_calling":
            yield (
                f"context.compact applies to loop tool_calling, not to {self.loop}; an agent that "
                "shortens its own messages begins a branch without it"
            )
        for entry in self.tools:
            for name, code in (("python", entry.python), ("shell", entry.shell)):
                if code is not None and code.timeout >= self.tool_timeout:
                    yield (
                        f"{name}: its timeout ({code.timeout:g}) must be shorter than tool_timeout "
                        f"({self.tool_timeout:g})"
                    )
        if self.loop == "agent" and not self.agent:
            yield f"loop agent needs agent: {AGENT}"
        for name, kind in _LOOP_KEYS.items():
            given: str | None = getattr(self, name)
            if given and self.loop != name:
                yield f"loop {self.loop} does not use {name}: set loop to {name}"
            if self.loop == name and not given:
                yield f"loop {name} needs {name}: {kind}"
            if given and ":" not in given:
                yield f"{name} must be {kind}, not {given!r}"


class EnvironmentConfig(Section):
    """One of several environments: its class, its rows, and its share of the groups."""

    environment: str
    """As the top-level key `environment`."""
    environment_args: Tree = {}
    """As the top-level key `environment_args`."""
    data: RowsConfig
    """Rows, selected by these keys of `data`: path, filter, eval_path, eval_sets, subset, split,
    eval_split, limit, eval_limit."""
    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the other weights."""
    loop: Loop | None = None
    """Agent loop; null uses rollout.loop."""
    tools: list[ToolConfig] | None = None
    """Tools that are added to the environment's own, in place of rollout.tools; null uses
    rollout.tools."""
    teacher: TeacherConfig | None = None
    """Teacher of this environment's trajectories; null uses algorithm.teacher."""


class ProcessorCall(Section):
    """A logits processor, created for each request by calling `qualname`."""

    qualname: str
    """package.module:name of the class or function that creates the processor."""
    args: list[object] | None = None
    """Positional arguments of the call; null passes none."""
    kwargs: Tree | None = None
    """Keyword arguments of the call; null passes none."""


class SamplingConfig(Section):
    """Sampling parameters of the engine, and the group size."""

    n: PositiveInt = 8
    """Number of trajectories per problem: the group size."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature, at most 2 (vLLM's own limit); 0 is greedy."""
    # In Megatron, 0 disables top_p.
    top_p: Annotated[Fraction, BeforeValidator(lambda p: 1.0 if p == 0 else p)] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; 1 or 0 means
    all."""
    # -1 means all tokens in older versions of vLLM.
    top_k: Annotated[NonNegativeInt, BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    """Number of most likely tokens to sample from; 0 or -1 means all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest probability of a token, as a share of the most likely token's probability; 0 means
    all."""
    max_tokens: PositiveInt = 512
    """Largest number of tokens sampled in one turn; the remaining context may lower this limit."""
    min_tokens: NonNegativeInt = 0
    """Smallest number of tokens sampled in one turn."""
    stop: list[str] = []
    """Texts that end a turn; they are kept in its tokens."""
    stop_token_ids: list[int] = []
    """Token ids that end a turn, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue sampling after the model's end-of-turn token."""
    # null means no log-probs in vLLM.
    prompt_logprobs: Annotated[bool, BeforeValidator(lambda on: False if on is None else on)] = (
        False
    )
    """Record the log-probs of each turn's prompt too, in every loop; slower, because it bypasses
    the prefix cache."""
    use_beam_search: bool = False
    """In evaluation, rollouts and modules, find the n most likely answers to a prompt with vLLM's
    beam search, n beams wide, instead of sampling answers. Temperature, top_p and top_k have no
    effect; for more than 10 beams, set engine.vllm_args.max_logprobs to 2 * n. Such answers were
    not sampled, so training refuses them."""
    logits_processor_args: Tree = {}
    """Arguments of engine.logits_processors for each request."""
    logits_processors: list[str | ProcessorCall] = []
    """Logits processors for these requests only, each as package.module:function or as {qualname,
    args, kwargs}; engine.logits_processors_allowed must match their names."""

    def mistakes(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}"
        if self.use_beam_search and (self.min_tokens or self.logits_processors):
            yield "use_beam_search knows neither min_tokens nor logits_processors: leave them out"

    def within(self, room: int) -> "SamplingConfig":
        """Return the same parameters with at most `room` tokens per turn (at least 1)."""
        if self.max_tokens <= room:
            return self
        limits = {"max_tokens": room, "min_tokens": min(self.min_tokens, room)}
        return self.model_copy(update=limits)


class EvalConfig(Section):
    """Evaluation on held-out rows."""

    every: NonNegativeInt = 10
    """Number of steps between evaluations on data.eval_path, which also run before the first step
    and after the last; 0 never evaluates."""
    background: bool = False
    """Evaluate while training continues, except before the first step and after the last one. The
    evaluation runs on the same engines as the next step's rollouts, and begins after they have
    begun. The engines get new weights only after the evaluation, which therefore measures the
    weights of one step."""
    target: Fraction | dict[Literal["lower"], Fraction] | None = None
    """Accuracy on data.eval_path at which the run saves a checkpoint and ends; {lower: 0.9} ends it
    when the lower bound of the accuracy's 95 % interval is 0.9. null trains to training.steps."""
    success_reward: float = 1.0
    """Smallest reward at which a trajectory counts as correct in accuracy, pass@k and mean@k."""
    sampling: SamplingConfig = SamplingConfig(n=1, temperature=0.0)
    """Sampling in evaluation. Keys that are not set here take their values from `sampling`, except
    n and temperature, which are 1 and 0: one greedy trajectory per row."""

    def reached(self, heldout: Mapping[str, float] | None) -> bool:
        """Return whether an evaluation's results end the run; None means no evaluation."""
        if self.target is None or not heldout:
            return False
        if isinstance(self.target, dict):
            return heldout["accuracy_low"] >= self.target["lower"]
        return heldout["accuracy"] >= self.target
