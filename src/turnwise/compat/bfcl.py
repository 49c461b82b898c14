"""The multi-turn categories of the Berkeley Function Calling Leaderboard (package bfcl-eval).

The tools are the functions of BFCL's simulated systems, and BFCL's checker gives the reward.
"""

import importlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from uuid import uuid4

from turnwise.compat.package import adapter
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import required
from turnwise.errors import InputError
from turnwise.internals import internal
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool
from turnwise.trajectory import Message, Trajectory

_LONG = "long_context"
_ALL = "multi_turn"  # means all multi-turn categories


class Bfcl(Environment):
    """An entry of a multi-turn category: requests of a user, and simulated systems as tools.

    After an answer without a tool call, the user's next request follows. The reward is 1 if the
    checker finds each request fulfilled, otherwise 0. A metric with the category's name has the
    reward's value; the mean of this metric is the category's accuracy. A call that does not fit the
    tool's schema is not run; the model reads an error.

    Args:
        row: `id` of the entry.
        category: Name of a category, or `multi_turn` for all; "" uses the class attribute.
        train: Fraction of the entries for training; the remaining entries are held out. Entries
            with the same number are variants of one scenario, and are either all for training or
            all held out.

    Example:
        class Base(Bfcl):
            category = "multi_turn_base"
    """

    category: ClassVar[str] = ""

    def __init__(self, row: Row, category: str = "", *, train: float = 0.0) -> None:
        self._category = str(row["id"]).rpartition("_")[0]
        self._entry, self._answers = _entries(self._category)[row["id"]]
        self._requests: list[list[Message]] = self._entry["question"]
        self.problem = self._requests[0]
        later: Mapping[str, list[JsonObject]] = self._entry.get("missed_function", {})
        self._later = {int(turn): functions for turn, functions in later.items()}
        self._calls: list[dict[int, list[str]]] = [{}]
        self._valid = False

    @classmethod
    def rows(cls, split: str, category: str = "", *, train: float = 0.0) -> Sequence[Row]:
        """Return the ids of a split's entries; by default (`train` 0), all entries are for
        evaluation."""
        rows = list[Row]()
        for name in _categories(category or cls.category):
            ids = list(_entries(name))
            first = round(train * len(ids))
            rows += [{"id": id} for id in (ids[:first] if split == "train" else ids[first:])]
        if not rows:
            raise InputError(
                f"bfcl has no {split} rows with environment_args.train {train:g}: that is the "
                "share of its entries to train on; data.eval_path: environment has the others"
            )
        return rows

    def setup(self) -> None:
        backends = _module("constants.executable_backend_config")
        self._systems = dict[str, object]()
        for name in self._entry["involved_classes"]:
            module = importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name])
            system = getattr(module, name)()
            if name not in backends.STATELESS_CLASSES:
                beginning = deepcopy(self._entry["initial_config"].get(name, {}))
                load = internal(system, "_load_scenario")  # BFCL's own runs also call it
                load(beginning, long_context=_LONG in self._category)
            self._systems[name] = system
        by_request = [(0, self._entry["function"]), *self._later.items()]
        self.tools = [self._tool(f, request) for request, each in by_request for f in each]

    def step(self, message: Message) -> Sequence[Message] | None:
        request = len(self._calls)
        if request == len(self._requests):
            return None
        self._calls.append({})
        if request not in self._later:
            return self._requests[request]
        prompts = _module("constants.default_prompts")
        form: str = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
        functions = [_schema(function) for function in self._later[request]]
        return [{"role": "user", "content": form.format(functions=json.dumps(functions))}]

    def reward(self, trajectory: Trajectory) -> float:
        if len(self._calls) < len(self._answers):
            return 0.0
        checker = _module("eval_checker.multi_turn_eval.multi_turn_checker")
        name = f"turnwise_{uuid4().hex}"
        said = [list(request.values()) for request in self._calls]
        try:
            verdict = checker.multi_turn_checker(
                said, self._answers, deepcopy(self._entry), self._category, name
            )
        finally:  # the checker never frees its systems, which it keeps under that name
            kept = vars(_module("eval_checker.multi_turn_eval.multi_turn_utils"))
            # list(), because other threads may add their keys meanwhile.
            for key in [key for key in list(kept) if key.startswith(name)]:
                del kept[key]
        self._valid = bool(verdict["valid"])
        return float(self._valid)

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {self._category: float(self._valid)}

    def _tool(self, function: JsonObject, request: int) -> Tool:
        """Return a function of a system as a tool that can be called from request number `request`
        on; the function's result becomes a text, as in BFCL."""
        described, name = _schema(function), str(function["name"])
        limit: int = _module("constants.default_prompts").MAXIMUM_STEP_LIMIT

        def call(arguments: JsonObject) -> str:
            if len(self._calls) <= request:
                raise ValueError(f"there is no tool {name!r}")
            if not all(key.isidentifier() for key in arguments):
                raise ValueError(f"the arguments of {name} have names that it does not take")
            written = ",".join(f"{key}={value!r}" for key, value in arguments.items())
            steps = self._calls[-1]
            steps.setdefault(self.current_turn, []).append(f"{name}({written})")
            self.done = len(steps) > limit
            systems = reversed(self._systems.values())  # as in the checker, the last system wins
            method = next(getattr(system, name) for system in systems if hasattr(system, name))
            try:
                result = method(**arguments)
            except Exception as error:  # the simulated system's error, for the model
                return f"Error during execution: {error}"
            return json.dumps(result, default=str) if isinstance(result, dict) else str(result)

        what, parameters = str(described["description"]), described["parameters"]
        return Tool(name, what, parameters, call, in_order=True, hidden=request > 0)


at = adapter("bfcl", Bfcl, "category", lambda: [*_categories(_ALL), _ALL])


def _categories(name: str) -> list[str]:
    known: list[str] = _module("constants.category_mapping").MULTI_TURN_CATEGORY
    return known if name == _ALL else [name]


@lru_cache(maxsize=8)
def _entries(category: str) -> dict[str, tuple[JsonObject, list[list[str]]]]:
    """Return the entries of a category by id, each with its ground-truth calls; cached."""
    utils = _module("utils")
    answers = {a["id"]: a["ground_truth"] for a in utils.load_ground_truth_entry(category)}
    entries = utils.load_dataset_entry(category)
    return {entry["id"]: (entry, answers[entry["id"]]) for entry in entries}


def _schema(function: JsonObject) -> JsonObject:
    """Return a function's description with its parameters as JSON schema, and without `response`
    (the schema of its result)."""
    types: Mapping[str, str] = _module("constants.type_mappings").GORILLA_TO_OPENAPI

    def translated(part: object) -> object:
        if isinstance(part, list):
            return [translated(below) for below in part]
        if not isinstance(part, dict):
            return part
        return {
            key: types.get(value, "string")
            if key == "type" and isinstance(value, str)
            else translated(value)
            for key, value in part.items()
        }

    described = {key: value for key, value in function.items() if key != "response"}
    return {**described, "parameters": translated(function["parameters"])}


def _module(name: str) -> ModuleType:
    folder = Path(tempfile.gettempdir(), f"turnwise-bfcl-{os.getuid()}")
    os.environ.setdefault("BFCL_PROJECT_ROOT", str(folder))  # the import creates folders there
    return required(f"bfcl_eval.{name}", "--no-deps bfcl-eval mpmath", "environment: bfcl")
