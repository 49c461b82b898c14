"""One call, `add(a=1)`, in each tool-call format of vLLM's parsers."""

_OBJECT = '{"name": "add", "arguments": {"a": 1}}'
_TAGGED = f"<tool_call>\n{_OBJECT}\n</tool_call>"
_KEYS = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
_FUNCTION = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_LLAMA = '{"name": "add", "parameters": {"a": 1}}'


def _dsml(section: str, space: str = "") -> str:
    head = f"｜DSML｜{space}"
    return (
        f'<{head}{section}>\n<{head}invoke name="add">\n<{head}parameter name="a" string="false">1'
        f"</{head}parameter>\n</{head}invoke>\n</{head}{section}>"
    )


def _minimax(*tags: str) -> str:
    return "".join("]<]minimax[>[" + tag for tag in tags)


def _plamo(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


CALLS = {
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>',
    "deepseek_v3": _DEEPSEEK.format(call='function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'),
    "deepseek_v31": _DEEPSEEK.format(call='add<｜tool▁sep｜>{"a": 1}'),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": (
        '<dots_function_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</dots_function_call>"
    ),
    "ernie45": _TAGGED,
    "functiongemma": "<start_function_call>call:add{a:<escape>1<escape>}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "gigachat3": f"<|function_call|>{_OBJECT}",
    "glm45": _KEYS,
    "glm47": _KEYS,
    "granite": f"<|tool_call|>[{_OBJECT}]",
    "granite-20b-fc": f"<function_call>{_OBJECT}",
    "granite4": _TAGGED,
    "hermes": _TAGGED,
    "hunyuan_a13b": f"<tool_calls>[{_OBJECT}]</tool_calls>",
    "hy_v3": (
        "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value>"
        "</tool_call></tool_calls>"
    ),
    "hy_v4": (
        "<tool_calls><tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "</tool_calls>"
    ),
    "inkling": '<|content_invoke_tool_json|>{"name":"add","args":{"a":1}}<|end_message|>',
    "internlm": f"<|action_start|><|plugin|>\n{_LLAMA}<|action_end|>",
    "jamba": f"<tool_calls>[\n    {_OBJECT}\n]</tool_calls>",
    "k2_horizon": (
        "<ifm|tool_calls><ifm|tool_call>add<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>1"
        "</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" '
        'type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    ),
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "ling3": _KEYS,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": "[add(a=1)]",
    "longcat": f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>",
    "mimo": _FUNCTION.replace("\n1\n", "1"),
    "minicpm5": '<function name="add"><param name="a">1</param></function>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "minimax_m3": _minimax(
        "<tool_call>", '<invoke name="add">', "<a>1", "</a>", "</invoke>", "</tool_call>"
    ),
    "mistral": '[TOOL_CALLS]add{"a": 1}',
    "muse_glimmer": (
        ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls><|eom|>"
    ),
    "olmo3": "<function_calls>add(a=1)</function_calls>",
    "phi4_mini_json": f"functools[{_OBJECT}]",
    "plamo3": (
        _plamo("begin_tool_requests")
        + _plamo("begin_tool_request")
        + _plamo("begin_tool_name")
        + "add"
        + _plamo("end_tool_name")
        + _plamo("begin_tool_arguments")
        + '<|plamo:constrain|>json<|plamo:msg|>{"a": 1}'
        + _plamo("end_tool_arguments")
        + _plamo("end_tool_request")
        + _plamo("end_tool_requests")
    ),
    "poolside_v1": _KEYS,
    "pythonic": "[add(a=1)]",
    "qwen3_coder": _FUNCTION,
    "qwen3_json": _TAGGED,
    "qwen3_xml": _FUNCTION,
    "seed_oss": _FUNCTION.replace("tool_call", "seed:tool_call"),
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="add"><steptml:parameter name="a">1</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "step3p5": _FUNCTION,
    "xlam": f"[{_OBJECT}]",
}
"""The call by the parser's name."""
TOKENS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|im_start|>", "<|im_end|>"),
    *("<|channel>", "<channel|>", "<|turn>", "<|tool_response>", "<seed:bos>", "<seed:eos>"),
    *("<response>", "</response>", "<0x0A>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<|tool_call|>"),
    *("<|tool_call>", "<tool_call|>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    "<|tool_call_argument_begin|>",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")),
    *(
        f"<{end}｜DSML｜{name}>"
        for name in ("function_calls", "tool_calls", " calls")
        for end in ("", "/")
    ),
    *(_plamo(name) for name in ("begin_think", "end_think", "tag")),
]
"""Special tokens that a parser wants in the model's tokenizer."""
