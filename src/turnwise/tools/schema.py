"""A function as a tool: its JSON schema, and conversion of a call's arguments to its types.

Pydantic reads the type hints, and docstring_parser reads the docstring. If all arguments are
required and have plain types and descriptions, a function gets the same description as from
Transformers' `get_json_schema`, which TRL uses. In all other descriptions, objects do not allow
additional properties, as OpenAI's strict mode requires.
"""

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter
from itertools import islice
from typing import Annotated, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import from_json

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, defined_at
from turnwise.tools.tool import ToolFunction

_LOG = logging.getLogger(__name__)
MAX_MISTAKES = 5
"""Maximum number of mistakes in a call's arguments that the error lists."""
_PLAIN_KEYS = {"type", "enum", "items", "additionalProperties", "description"}
"""JSON schema keywords of plain types: types that Transformers describes as completely as
pydantic."""


class ArgumentsError(Exception):
    """Raised for arguments that do not fit the tool; the message lists the mistakes."""


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    """A function's description for the model, and the parser of its arguments."""

    description: JsonObject
    """Description in OpenAI's format: {"type": "function", "function": {...}}."""
    _model: type[BaseModel]
    _parameters: tuple[Parameter, ...]
    """The function's parameters, in the order of the model's fields."""

    def read(self, arguments_json: str) -> tuple[list[object], dict[str, object]]:
        """Return a call's positional and keyword arguments, as the function's types.

        This runs user code, because types may have validators.

        Raises:
            ArgumentsError: when the arguments do not fit; it lists the mistakes and their paths.
        """
        try:
            model = self._model.model_validate_json(arguments_json)
        except ValidationError as error:
            raise ArgumentsError(describe_mistakes(error, arguments_json)) from None
        values = [getattr(model, field) for field in type(model).model_fields]
        arguments, keywords = [], {}
        for parameter, value in zip(self._parameters, values, strict=True):
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                arguments.append(value)
            else:
                keywords[parameter.name] = value
        return arguments, keywords


@lru_cache(maxsize=1024)
def function_schema(function: ToolFunction) -> FunctionSchema:
    """Describe a function to the model, by its type hints and its docstring.

    Docstrings are read in the styles of Google, NumPy and Sphinx. A description in `Annotated`, as
    a text or a `Field`, takes precedence. `*args` and `**kwargs` are left out. They are logged as
    warnings, once for each function, like a missing docstring or descriptions of unknown arguments.

    Raises:
        InputError: when an argument has no type hint, or a type that JSON cannot hold, such as a
            function; it names the tool and the argument.
    """
    several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = tuple(inspect.signature(function).parameters.values())
    first = parameters[0] if parameters else None
    if first and first.name in ("self", "cls") and first.annotation is Parameter.empty:
        parameters = parameters[1:]
    unfilled = [str(p).partition(":")[0] for p in parameters if p.kind in several]
    parameters = tuple(p for p in parameters if p.kind not in several)  # which a model can fill
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        why = f"its type hints cannot be read ({_first_sentence(error)})"
        raise _refused(function, why) from error
    for parameter in parameters:
        if parameter.name not in hints:
            raise _refused(function, f"its argument {parameter.name} has no type hint")
    read = docstring_parser.parse(inspect.getdoc(function) or "")
    lines = {
        name.strip(): _one_line(line.description)
        for line in read.params
        for name in line.arg_name.split(",")
    }
    _note_gaps(function.__name__, unfilled, read, {p.name for p in parameters} | {*hints})
    fields: JsonObject = {}  # pydantic's fields: each is a type, or a type and a default
    annotated: Foreign = Annotated  # a type checker does not know the metadata used here
    for number, parameter in enumerate(parameters):
        hint, default = hints[parameter.name], parameter.default
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        texts = (extra for extra in extras if isinstance(extra, str))
        line = next(texts, lines.get(parameter.name))
        # This `Field` comes first, so that a `Field` of the user takes precedence.
        known = Field(alias=parameter.name, description=line or None)
        field = annotated[(kind, known, *extras)]
        # The parameter's own name may be an attribute of pydantic's models, such as `copy`.
        name = f"argument_{number}"
        fields[name] = field if default is Parameter.empty else (field, default)
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        described = model.model_json_schema(schema_generator=_JsonSchema)
    except Exception as error:
        why = _untypable(parameters, hints) or _first_sentence(error)
        raise _refused(function, why) from error
    whole, definitions = _tidied(described)
    properties = whole["properties"]
    schema: JsonObject = {"type": "object", "properties": properties}
    if "required" in described:
        schema["required"] = described["required"]
    if not all("description" in each and _is_plain(each) for each in properties.values()):
        schema["additionalProperties"] = False
    if definitions:
        schema["$defs"] = definitions
    said = {
        "name": function.__name__,
        "description": (read.description or "").strip(),
        "parameters": schema,
    }
    if (returned := _returned(hints, read.returns)) is not None:
        said["return"] = returned
    return FunctionSchema({"type": "function", "function": said}, model, parameters)


def describe_mistakes(error: ValidationError, arguments_json: str) -> str:
    """Return the mistakes in a call's arguments as one line, each with its path."""
    given: Foreign = None
    with suppress(ValueError):
        given = from_json(arguments_json)
    found: dict[str, list[str]] = {}
    for mistake in error.errors(include_url=False, include_context=False, include_input=False):
        # Keep the keys and indices of the path, but not pydantic's names of types.
        steps, at, location = list[str](), given, mistake["loc"]
        for number, step in enumerate(location):
            if isinstance(at, list):
                inside = isinstance(step, int) and step < len(at)
            else:
                inside = isinstance(at, dict) and step in at
            if inside:
                at = at[step]
            if inside or (mistake["type"] == "missing" and number == len(location) - 1):
                steps.append(str(step))
        found.setdefault(".".join(steps) or "arguments", []).append(mistake["msg"])
    lines = []
    for path, messages in islice(found.items(), MAX_MISTAKES):
        first, *others = dict.fromkeys(messages)  # several if all members of a union refuse a value
        more = (other.removeprefix("Input should be ") for other in others)
        lines.append(" or ".join([f"{path}: {first}", *more]))
    return "; ".join(lines)


def _note_gaps(
    name: str, unfilled: list[str], read: docstring_parser.Docstring, known: set[str]
) -> None:
    """Log gaps in a description that the user may not know of."""
    gaps = [f"{argument} is not offered to the model" for argument in unfilled]
    if not (read.description or "").strip():
        gaps.append("it has no docstring, so the model reads its name and arguments only")
    described = (part.strip() for line in read.params for part in line.arg_name.split(","))
    if others := [part for part in described if part.lstrip("*") not in known]:
        gaps.append(f"its docstring describes {', '.join(others)}, and it has no such argument")
    for gap in gaps:
        _LOG.warning("tool %s: %s", name, gap)


def _refused(function: ToolFunction, why: str) -> InputError:
    where = defined_at(function)
    return InputError(
        f"tool {function.__name__}{where and f' ({where})'} cannot be offered to the "
        f"model: {why}; give each argument a type hint that JSON can hold"
    )


def _untypable(parameters: tuple[Parameter, ...], hints: Mapping[str, Foreign]) -> str | None:
    """Describe the first argument whose type pydantic cannot read; None if it can read all."""
    for parameter in parameters:
        try:
            TypeAdapter(hints[parameter.name]).json_schema(schema_generator=_JsonSchema)
        except Exception as error:
            reason = _first_sentence(error)
            return f"its argument {parameter.name} has a type that cannot be described ({reason})"
    return None


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


class _JsonSchema(GenerateJsonSchema):
    """Pydantic's JSON schema with keys in the given order, without warnings. A type without a JSON
    schema allows any value."""

    def emit_warning(self, kind: object, detail: str) -> None:
        pass

    def sort(self, value: JsonObject, parent_key: str | None = None) -> JsonObject:
        return value

    def callable_schema(self, schema: object) -> JsonObject:
        raise TypeError("it is a function, which JSON cannot hold")

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> JsonObject:
        return {}


def _is_plain(schema: JsonObject) -> bool:
    inner = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return schema.keys() <= _PLAIN_KEYS and all(map(_is_plain, inner))


def _returned(
    hints: Mapping[str, Foreign], line: docstring_parser.DocstringReturns | None
) -> JsonObject | None:
    """Return the schema of a plain result, as Transformers does; None for any other result."""
    if "return" not in hints:
        return None
    try:
        described = TypeAdapter(hints["return"]).json_schema(schema_generator=_JsonSchema)
    except Exception:  # a type of the user; the description then omits it
        return None
    returned, _ = _tidied(described)
    if not _is_plain(returned):
        return None
    description = _one_line(line.description if line else None)
    return {**returned, "description": description} if description else returned


def _tidied(described: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Convert a schema of pydantic to the form that chat templates and OpenAI's strict mode need;
    return it with the definitions that its references need.

    The result has no titles, and keeps references only to types that contain themselves. It uses
    `anyOf` for all unions and `enum` for all choices. Objects with fields do not allow additional
    properties.
    """
    given: JsonObject = described.get("$defs", {})
    recursive: dict[str, None] = {}

    def tidy(schema: object, within: tuple[str, ...] = ()) -> Foreign:
        """Return a converted copy of a schema. `within` has the names of the definitions that
        contain the schema."""
        if not isinstance(schema, dict):
            return schema  # true or false
        if "$ref" in schema:  # replace a reference by its definition, except inside the definition
            name = schema["$ref"].removeprefix("#/$defs/")
            if name in within:
                recursive[name] = None
            if name in within or name not in given:
                return schema
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            return tidy({**given[name], **beside}, (*within, name))
        tidied: JsonObject = {}
        for key, value in schema.items():
            match key:
                case "title" | "discriminator":
                    continue
                case "const":
                    tidied["enum"] = [value]
                case "anyOf" | "oneOf":
                    tidied["anyOf"] = [tidy(each, within) for each in value]
                case "prefixItems" | "allOf":
                    tidied[key] = [tidy(each, within) for each in value]
                case "properties" | "patternProperties":
                    tidied[key] = {name: tidy(each, within) for name, each in value.items()}
                case "items" | "additionalProperties" | "propertyNames":
                    tidied[key] = tidy(value, within)
                case _:
                    tidied[key] = value
        first, *others = tidied.get("prefixItems", [None])
        if first is not None and all(other == first for other in others) and "items" not in tidied:
            del tidied["prefixItems"]  # because more servers understand `items`
            tidied["items"] = first
        if "properties" in tidied:  # no additional properties, unless the type takes them
            tidied.setdefault("additionalProperties", False)
        elif tidied.get("additionalProperties") in (True, {}):  # which is the default
            del tidied["additionalProperties"]
        if tidied.get("items") in (True, {}):
            del tidied["items"]
        places = {"type": 0, "description": 2, "default": 3}  # the usual order
        return dict(sorted(tidied.items(), key=lambda item: places.get(item[0], 1)))

    whole = tidy(described)
    definitions: JsonObject = {}
    while missing := [name for name in recursive if name not in definitions]:
        for name in missing:
            definitions[name] = tidy(given[name], (name,))
    return whole, definitions
