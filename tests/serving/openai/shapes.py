"""Requests of every shape that vLLM's server takes, for a model with the calculator's tokenizer.

Each is greedy or has a seed, so that two servers of one model answer it with one text.
"""

from dataclasses import dataclass
from typing import Any

from examples.calculator.tool import TOOL_SCHEMA

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "What is 12 plus 30?"}
PROMPT = "12 plus 30 is"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "adult": {"type": "boolean"}},
    "required": ["name", "adult"],
    "additionalProperties": False,
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "calculate"}}
STRICT = {**TOOL_SCHEMA, "function": {**TOOL_SCHEMA["function"], "strict": True}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call-1",
            "type": "function",
            "function": {"name": "calculate", "arguments": '{"operation": "+", "a": 12, "b": 30}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "42"}


@dataclass(frozen=True)
class Shape:
    """One request; without a body it is a GET."""

    path: str
    body: dict[str, Any] | None = None


def seeded(seed: int, **options: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, **options}


def schema(tree: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "given", "schema": tree}}


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": seeded(1),
    "warm": seeded(2, temperature=1.7),
    "cold": seeded(3, temperature=0.2),
    "top_p": seeded(4, top_p=0.5),
    "top_k": seeded(5, top_k=5),
    "top_k of -1": seeded(6, top_k=-1),
    "min_p": seeded(7, min_p=0.3),
    "all of them": seeded(8, top_p=0.9, top_k=20, min_p=0.01),
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {"20": 100}},
    "a ban by logit_bias": {"logit_bias": {"0": -100, "15": -100, "17": -100}},
    "allowed_token_ids": {"allowed_token_ids": [15, 16, 17, 18]},
    "bad_words": {"bad_words": ["calculate", "1"]},
    "stop": {"stop": "a"},
    "stops": {"stop": ["zzz", "e", "}"]},
    "stop is kept": {"stop": ["a", "e"], "include_stop_str_in_output": True},
    "stop and min_tokens": {"stop": ["a", "e"], "min_tokens": 5},
    "stop_token_ids": {"stop_token_ids": list(range(40, 140))},
    "min_tokens": {"min_tokens": 12},
    "ignore_eos": {"ignore_eos": True},
    "one token": {"max_tokens": 1},
    "long": {"max_tokens": 60, "ignore_eos": True},
    "n": seeded(9, n=3),
    "n of 1": {"n": 1},
    "return_token_ids": {"return_token_ids": True},
    "special tokens shown": {"skip_special_tokens": False, "ignore_eos": True},
    "no spaces between special tokens": {"spaces_between_special_tokens": False},
    "truncated on the left": {"truncate_prompt_tokens": 5, "truncation_side": "left"},
    "truncated on the right": {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    "a user": {"user": "somebody"},
    "a request id": {"request_id": "mine"},
    "cache_salt": {"cache_salt": "salt"},
    "an unknown key": {"nothing_of_this_name": 1},
    "nulls": {"seed": None, "stop": None, "top_p": None, "stream_options": None, "user": None},
    "any one choice": {"structured_outputs": {"choice": ["Alpha", "Beta", "Gamma"]}},
    "a pattern": {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= "SELECT " ("a" | "b")'}},
    "a schema": {"structured_outputs": {"json": PERSON}, "max_tokens": 80},
    "a schema with a seed": seeded(10, structured_outputs={"json": PERSON}, max_tokens=80),
    "a schema of an enum": {"response_format": schema(COLOUR), "max_tokens": 80},
    "a schema, n": seeded(11, response_format=schema(COLOUR), n=2, max_tokens=80),
    "any JSON": {"structured_outputs": {"json_object": True}},
    "json_object": {"response_format": {"type": "json_object"}},
    "text": {"response_format": {"type": "text"}},
}
"""Options of chats and completions."""
SCORING: dict[str, dict[str, Any]] = {
    "prompt_logprobs of 0": {"prompt_logprobs": 0},
    "prompt_logprobs of 1": {"prompt_logprobs": 1},
    "prompt_logprobs of 4": {"prompt_logprobs": 4},
    "prompt_logprobs of n": seeded(12, prompt_logprobs=2, n=2),
    "prompt_logprobs and a stop": {"prompt_logprobs": 1, "stop": ["a", "e"]},
    "prompt_logprobs and a grammar": {
        "prompt_logprobs": 1,
        "structured_outputs": {"choice": ["Alpha", "Beta"]},
    },
    "prompt_logprobs of all": {"prompt_logprobs": -1},
    "too many prompt_logprobs": {"prompt_logprobs": 21},
    "negative prompt_logprobs": {"prompt_logprobs": -2},
}
CHATS: dict[str, dict[str, Any]] = {
    "max_completion_tokens": {"max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "top_logprobs, warm": seeded(13, logprobs=True, top_logprobs=2, temperature=1.5),
    "top_logprobs, n": seeded(14, logprobs=True, top_logprobs=2, n=2),
    "top_logprobs of a choice": {
        "logprobs": True,
        "top_logprobs": 5,
        "structured_outputs": {"choice": ["Alpha", "Beta"]},
    },
    "logprobs as ids": {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
    "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [15, 16, 300]},
    "logprob_token_ids and top_logprobs": {
        **{"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [7]}
    },
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "a developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "a conversation": {"messages": [USER, {"role": "assistant", "content": "42"}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "12 + 30?"}]}]},
    "two parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "12"}, {"type": "text", "text": "plus 30?"}],
            }
        ]
    },
    "a role of its own": {"messages": [{"role": "critic", "content": "12 plus 30?"}]},
    "a name": {"messages": [{**USER, "name": "Ann"}]},
    "an empty message": {"messages": [{"role": "user", "content": ""}]},
    "other letters": {"messages": [{"role": "user", "content": "zwölf ü € 😀"}]},
    "tools": {"tools": [TOOL_SCHEMA]},
    "tools, auto": {"tools": [TOOL_SCHEMA], "tool_choice": "auto"},
    "tools, none": {"tools": [TOOL_SCHEMA], "tool_choice": "none"},
    "tools, required": {"tools": [TOOL_SCHEMA], "tool_choice": "required", "max_tokens": 80},
    "tools, named": {"tools": [TOOL_SCHEMA], "tool_choice": NAMED, "max_tokens": 80},
    "a strict tool, required": {"tools": [STRICT], "tool_choice": "required", "max_tokens": 80},
    "one call at a time": {"tools": [TOOL_SCHEMA], "parallel_tool_calls": False},
    "a call and its result": {"messages": [USER, CALL, RESULT], "tools": [TOOL_SCHEMA]},
    "a call and no tools": {"messages": [USER, CALL, RESULT]},
    "echo": {"echo": True},
    "echo of an answer": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        **{"echo": True, "continue_final_message": True, "add_generation_prompt": False},
    },
    "an answer continued": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        **{"continue_final_message": True, "add_generation_prompt": False},
    },
    "no generation prompt": {"add_generation_prompt": False},
    "a variable of the template": {"chat_template_kwargs": {"enable_thinking": False}},
    "special tokens added": {"add_special_tokens": True},
    "almost the whole context": {"max_tokens": 500},
    "a special token in a message": {"messages": [{"role": "user", "content": "12<|im_end|>30"}]},
    "ids of the prompt": {"kv_transfer_params": {"prompt_token_ids": [20, 21, 22]}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "no reasoning": {"include_reasoning": False},
    "metadata": {"metadata": {"a": "b"}},
    "a service tier": {"service_tier": "auto"},
    "stored": {"store": True},
}
TEXTS: dict[str, dict[str, Any]] = {
    "ids": {"prompt": [20, 21, 22, 23]},
    "two prompts": {"prompt": ["12 plus", "30 is"]},
    "lists of ids": {"prompt": [[20, 21], [22, 23, 24]]},
    "two prompts, n": seeded(15, prompt=["12 plus", "30 is"], n=2),
    "one id": {"prompt": [20]},
    "logprobs of 0": {"logprobs": 0},
    "logprobs of 1": {"logprobs": 1},
    "logprobs of 5": {"logprobs": 5},
    "logprobs, warm": seeded(16, logprobs=3, temperature=1.5),
    "logprobs as ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "logprob_token_ids": {"logprobs": 3, "logprob_token_ids": [15, 16, 300]},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "echo with logprobs of 0": {"echo": True, "logprobs": 0},
    "echo with logprobs, n": seeded(17, echo=True, logprobs=2, n=2),
    "echo with logprobs of two": {"echo": True, "logprobs": 1, "prompt": ["12 plus", "30 is"]},
    "echo of ids": {"echo": True, "logprobs": 1, "prompt": [20, 21, 22]},
    "echo of one id": {"echo": True, "logprobs": 1, "prompt": [20]},
    "scoring": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "scoring of two": {"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": ["12 plus", "is"]},
    "scoring of ids": {"echo": True, "logprobs": 5, "max_tokens": 0, "prompt": [20, 21, 22]},
    "scoring without log-probs": {"echo": True, "max_tokens": 0},
    "echo and prompt_logprobs": {"echo": True, "logprobs": 1, "prompt_logprobs": 3},
    "special tokens in the text": {"prompt": "<|im_start|>user\n12<|im_end|>", "echo": True},
    "no special tokens": {"add_special_tokens": False},
}
RESPONDED: dict[str, dict[str, Any]] = {
    "text": {},
    "messages": {"input": [USER]},
    "instructions": {"instructions": "Be brief."},
    "a conversation": {"input": [USER, {"role": "assistant", "content": "42"}, USER]},
    "seeded": {"temperature": 0.9, "top_p": 0.8, "seed": 4},
    "a limit": {"max_output_tokens": 3},
    "a schema": {
        "text": {"format": {"type": "json_schema", "name": "given", "schema": PERSON}},
        "max_output_tokens": 80,
    },
    "a schema of an enum": {
        "text": {
            "format": {"type": "json_schema", "name": "c", "schema": COLOUR, "strict": True},
        },
        "max_output_tokens": 80,
    },
    "json_object": {"text": {"format": {"type": "json_object"}}},
    "log-probs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "tools": {"tools": [{"type": "function", **TOOL_SCHEMA["function"]}]},
    "tools, required": {
        "tools": [{"type": "function", **TOOL_SCHEMA["function"]}],
        **{"tool_choice": "required", "max_output_tokens": 80},
    },
    "not stored": {"store": False},
}
ANTHROPIC: dict[str, dict[str, Any]] = {
    "text": {},
    "a system prompt": {"system": "Be brief."},
    "a conversation": {"messages": [USER, {"role": "assistant", "content": "42"}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "12 + 30?"}]}]},
    "stop_sequences": {"stop_sequences": ["a", "e"]},
    "top_k": {"top_k": 1},
    "a tool": {
        "tools": [
            {
                "name": "calculate",
                "description": "Compute.",
                "input_schema": TOOL_SCHEMA["function"]["parameters"],
            }
        ]
    },
}
WRONG: dict[str, dict[str, Any]] = {
    "temperature below 0": {"temperature": -1},
    "a warm text": {"temperature": "warm"},
    "top_p of 0": {"top_p": 0},
    "top_p above 1": {"top_p": 1.5},
    "top_k below -1": {"top_k": -5},
    "min_p above 1": {"min_p": 2},
    "n of 0": {"n": 0},
    "greedy and n": {"n": 2},
    "max_tokens below 0": {"max_tokens": -1},
    "max_tokens of a text": {"max_tokens": "many"},
    "more than the context": {"max_tokens": 100_000},
    "min_tokens above max_tokens": {"min_tokens": 30},
    "a penalty": {"presence_penalty": 3},
    "repetition_penalty of 0": {"repetition_penalty": 0},
    "a huge seed": {"seed": 1 << 64},
    "stop of a number": {"stop": 5},
    "stop of nothing": {"stop": ""},
    "logit_bias of a text": {"logit_bias": {"a": 1}},
    "logit_bias of no token": {"logit_bias": {"1000000": 1}},
    "no allowed token": {"allowed_token_ids": []},
    "an allowed token that is none": {"allowed_token_ids": [1_000_000]},
    "stream_options without a stream": {"stream_options": {"include_usage": True}},
    "a grammar that is none": {"structured_outputs": {"grammar": "root ::= ("}},
    "a pattern that is none": {"structured_outputs": {"regex": "("}},
    "no choice": {"structured_outputs": {"choice": []}},
    "two constraints": {"structured_outputs": {"choice": ["a"], "regex": "b"}},
    "a schema without a schema": {"response_format": {"type": "json_schema"}},
    "a format of no type": {"response_format": {"type": "yaml"}},
    "prompt_logprobs of a stream": {"prompt_logprobs": 1, "stream": True},
    "bad_words of numbers": {"bad_words": [1]},
    "too many ids": {"logprobs": 1, "logprob_token_ids": [1] * 200},
    "an id that is none": {"logprobs": 1, "logprob_token_ids": [1_000_000]},
    "ids without logprobs": {"logprob_token_ids": [1]},
}
"""Requests that chats and completions refuse."""
WRONG_CHATS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "messages of a text": {"messages": "12 plus 30"},
    "a message without a role": {"messages": [{"content": "12"}]},
    "no limit": {"max_tokens": None},
    "too long": {"messages": [{"role": "user", "content": "12 plus " * 400}]},
    "too many top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs below -1": {"logprobs": True, "top_logprobs": -2},
    "required without tools": {"tool_choice": "required"},
    "a tool that is none": {
        "tools": [TOOL_SCHEMA],
        "tool_choice": {"type": "function", "function": {"name": "nothing"}},
    },
    "a choice of no kind": {"tools": [TOOL_SCHEMA], "tool_choice": "perhaps"},
    "continued and generated": {"continue_final_message": True},
    "a picture": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            }
        ]
    },
}
WRONG_TEXTS: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": None},
    "an empty prompt": {"prompt": ""},
    "an empty list": {"prompt": []},
    "no token": {"prompt": [-1]},
    "a token that is none": {"prompt": [1_000_000]},
    "too long": {"prompt": "12 plus " * 400},
    "too many logprobs": {"logprobs": 21},
    "negative logprobs": {"logprobs": -2},
    "no limit": {"max_tokens": None},
    "a suffix": {"suffix": "."},
    "ids and echo": {"echo": True, "logprobs": 1, "logprob_token_ids": [5]},
    "max_tokens of 0": {"max_tokens": 0},
    "a streamed suffix": {"suffix": ".", "stream": True},
}
OTHERS: dict[str, Shape] = {
    "health": Shape("/health"),
    "version": Shape("/version"),
    "models": Shape("/v1/models"),
    "tokenize a text": Shape("/tokenize", {"prompt": PROMPT}),
    "tokenize with tokens": Shape("/tokenize", {"prompt": PROMPT, "return_token_strs": True}),
    "tokenize a chat": Shape("/tokenize", {"messages": [USER], "tools": [TOOL_SCHEMA]}),
    "tokenize nothing": Shape("/tokenize", {}),
    "detokenize": Shape("/detokenize", {"tokens": [20, 21, 22]}),
    "detokenize a text": Shape("/detokenize", {"tokens": "a"}),
    "count tokens": Shape("/v1/messages/count_tokens", {"messages": [USER]}),
    "responses without input": Shape(RESPONSES, {"max_output_tokens": 4}),
    "messages without a limit": Shape(MESSAGES, {"messages": [USER]}),
    "no path": Shape("/v1/nothing", {}),
    "GET of a chat": Shape(CHAT),
}
# What vLLM's frontend loses by chance when a slow client gets several pieces joined: the name of a
# forced call, and the scores of the prompt of a second choice.
STREAMED_CHATS = {k: each for k, each in CHATS.items() if k != "a strict tool, required"}
STREAMED_TEXTS = {name: each for name, each in TEXTS.items() if name != "echo with logprobs, n"}
STREAMED = {"stream": True}
USAGE = {**STREAMED, "stream_options": {"include_usage": True}}
ALL_USAGE = {
    **STREAMED,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def _shapes() -> dict[str, Shape]:
    chat = {"model": "model", "messages": [USER], "temperature": 0, "max_tokens": 16}
    text = {"model": "model", "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    response = {"model": "model", "input": PROMPT, "temperature": 0, "max_output_tokens": 16}
    message = {"model": "model", "messages": [USER], "temperature": 0, "max_tokens": 16}
    limit = {"max_tokens": None}
    kinds = (
        ("chat", CHAT, chat, {**SAMPLING, **SCORING, **CHATS, **WRONG, **WRONG_CHATS}),
        ("chat, streamed", CHAT, chat | STREAMED, {**SAMPLING, **STREAMED_CHATS}),
        ("text", TEXT, text, {**SAMPLING, **SCORING, **TEXTS, **WRONG, **WRONG_TEXTS}),
        ("text, streamed", TEXT, text | STREAMED, {**SAMPLING, **STREAMED_TEXTS}),
        ("response", RESPONSES, response, RESPONDED),
        ("response, streamed", RESPONSES, response | STREAMED, RESPONDED),
        ("message", MESSAGES, message, ANTHROPIC),
        ("message, streamed", MESSAGES, message | STREAMED, ANTHROPIC),
        ("chat, usage", CHAT, chat | USAGE, {"plain": {}, "n": seeded(18, n=2)}),
        ("chat, all usage", CHAT, chat | ALL_USAGE, {"plain": {}}),
        ("text, usage", TEXT, text | USAGE, {"plain": {}, "echo": {"echo": True}}),
        ("text, all usage", TEXT, text | ALL_USAGE, {"plain": {}}),
    )
    made = dict(OTHERS)
    for kind, path, base, options in kinds:
        for name, changes in options.items():
            body = base | changes
            if "max_completion_tokens" in changes:
                body |= limit
            made[f"{kind}: {name}"] = Shape(path, body)
    return made


SHAPES = _shapes()
