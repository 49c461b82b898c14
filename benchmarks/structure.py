"""Measure how much a reader of `src/turnwise` has to keep in mind.

    python -m benchmarks.structure [SOURCE]

SOURCE is the package's folder, `src/turnwise` by default. Prints one line for each figure. The
figures come from the syntax trees alone: nothing is imported. With --prose it prints a sample of
sentences of docstrings and comments instead, each with its place, for a reader to judge whether
it can be understood without the code.
"""

import argparse
import ast
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FOREIGN = ("vllm", "ray", "torch", "transformers", "peft", "uvicorn", "fastapi", "multiprocessing")
"""Packages whose internals the project may touch, but only in the folder `internals`."""
_PROCESSES = (
    "Popen",
    "subprocess_exec",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "fork",
    "get_context",
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A source file: its dotted name, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module


def read(source: Path) -> list[Module]:
    """Return the modules of a package's folder in the order of their names.

    Example:
        modules = read(Path("src/turnwise"))
    """
    modules = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, text, ast.parse(text)))
    return modules


def figures(modules: Sequence[Module]) -> dict[str, str]:
    """Return the figures as texts, by name."""
    nodes = [node for module in modules for node in ast.walk(module.tree)]
    functions = [node for node in nodes if isinstance(node, _Function)]
    circles = import_cycles(modules)
    once, private = called_once(modules)
    reaches = [each for module in modules for each in foreign_internals(module)]
    starts = Counter(
        module.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in _PROCESSES
    )
    return {
        "lines": f"{sum(len(module.text.splitlines()) for module in modules):,}",
        "files": f"{len(modules)}",
        "classes": f"{sum(isinstance(node, ast.ClassDef) for node in nodes)}",
        "functions": f"{len(functions):,}",
        "functions of over 60 lines": f"{sum(_length(function) > 60 for function in functions)}",
        "import circles": f"{len(circles)}, their files {[len(circle) for circle in circles]}",
        "internals of others": f"{len(reaches)}, in {len({one for one, _ in reaches})} files",
        "files that start processes": f"{len(starts)}",
        "private functions called once": f"{once} of {private}, {once / max(1, private):.0%}",
    }


def _length(function: _Function) -> int:
    """Return the number of a function's lines without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def import_cycles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the groups of modules that import one another, the largest first.

    Imports inside functions and for type checkers count, because a reader also follows them. A
    package's `__init__` does not count if it only re-exports names of its modules.
    """
    names = {module.name for module in modules}
    packages = {
        module.name
        for module in modules
        if any(each.startswith(f"{module.name}.") for each in names) and not _defines(module)
    }
    imports = {
        module.name: {name for name in _imported(module, names) if name not in packages}
        for module in modules
        if module.name not in packages
    }
    return sorted((each for each in _components(imports) if len(each) > 1), key=len, reverse=True)


def _defines(module: Module) -> bool:
    return any(isinstance(node, ast.ClassDef | _Function) for node in ast.walk(module.tree))


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module


def _components(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of a graph (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name] & edges.keys()):
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            yield sorted(stack[place:])
            del stack[place:]

    for name in sorted(edges):
        if name not in index:
            yield from visit(name)


def called_once(modules: Sequence[Module]) -> tuple[int, int]:
    """Return the number of private functions whose name is used exactly once, and the number of all
    private functions."""
    once = private = 0
    for module in modules:
        used = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in ast.walk(module.tree):
            if isinstance(node, _Function) and node.name.startswith("_") and node.name[1] != "_":
                private += 1
                once += used[node.name] == 1
    return once, private


def foreign_internals(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the module's name and each use of an internal of another package.

    A use of an internal is a private name that is imported or read from another package's module,
    or an assignment to an attribute or item of another package's object. Such objects are imported
    from the package or from the folder `internals`, are parameters of such a type, or are variables
    made from these. Uses in the folder `internals` itself do not count.
    """
    if ".internals" in module.name:
        return
    foreign = set[str]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            home = (node.module or "").split(".")
            if home[0] in _FOREIGN:
                foreign |= {alias.asname or alias.name for alias in node.names}
                private = [alias.name for alias in node.names if _is_private(alias.name)]
                yield from ((module.name, f"{node.module}.{name}") for name in private)
                if any(map(_is_private, home)):
                    yield module.name, node.module or ""
            elif "internals" in home:
                foreign |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _FOREIGN:
                    foreign.add(alias.asname or alias.name.split(".")[0])
    yield from ((module.name, use) for use in sorted(_uses(module.tree, foreign)))


def _uses(scope: ast.AST, known: set[str]) -> set[str]:
    """Return the internals that a module or function uses of the `known` names in it."""
    foreign, found = set(known), set[str]()
    if isinstance(scope, _Function):
        given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
        foreign -= {each.arg for each in given}
        foreign |= {each.arg for each in given if _mentions(each.annotation, known)}
    own, inner, pending = list[ast.AST](), list[ast.AST](), [*ast.iter_child_nodes(scope)]
    while pending:
        node = pending.pop()
        (inner if isinstance(node, _Function) else own).append(node)
        pending += [] if isinstance(node, _Function) else ast.iter_child_nodes(node)
    made = dict(pair for node in own for pair in _assigned(node))
    while more := {name for name, value in made.items() if _root(value) in foreign} - foreign:
        foreign |= more
    for node in own:
        if isinstance(node, ast.Attribute | ast.Subscript) and _root(node) in foreign:
            is_attribute = isinstance(node, ast.Attribute)
            # An item of a variable is data; an item of an attribute is part of the foreign object.
            stored = isinstance(node.ctx, ast.Store) and (
                is_attribute or isinstance(node.value, ast.Attribute)
            )
            if stored or (isinstance(node, ast.Attribute) and _is_private(node.attr)):
                found.add(ast.unparse(node))
    return found.union(*(_uses(each, foreign) for each in inner))


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each variable that a statement assigns, with its value."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        if isinstance(node.target, ast.Name):
            yield node.target.id, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(name, ast.Name):
                        yield name.id, value


def _root(node: ast.AST | None) -> str:
    """Return the variable that an expression reads attributes, items or results of; "" if none."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _mentions(annotation: ast.expr | None, names: set[str]) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return annotation is not None and _root(annotation) in names


def sentences(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a module's docstrings and comments, each with the line at which its
    docstring or comment begins; code examples are left out."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for paragraph in re.split(r"\n\s*\n", text):
                    if not re.match(r"\s*(Example:|>>>| {8,})", paragraph):
                        yield from ((node.lineno, one) for one in _split(paragraph))
    comment, began = "", 0
    for number, line in enumerate([*module.text.splitlines(), ""], start=1):
        if found := re.match(r"\s*# (?!noqa|type:|pragma)(.*)", line):
            comment, began = f"{comment} {found[1]}", began or number
        elif comment:
            yield from ((began, one) for one in _split(comment))
            comment, began = "", 0


def _split(paragraph: str) -> list[str]:
    whole = " ".join(paragraph.split())
    return [one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", whole) if " " in one]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(__file__).parent.parent / "src" / "turnwise"
    parser.add_argument("source", metavar="SOURCE", type=Path, nargs="?", default=default)
    parser.add_argument("--names", action="store_true", help="Name circles and internals, too.")
    parser.add_argument("--prose", action="store_true", help="Print a sample of sentences.")
    parser.add_argument("--count", type=int, default=200, help="Number of sentences.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sample.")
    options = parser.parse_args(arguments)
    modules = read(options.source)
    if options.prose:
        found = [(module.name, *one) for module in modules for one in sentences(module)]
        count = min(options.count, len(found))
        for name, line, sentence in random.Random(options.seed).sample(found, count):
            sys.stdout.write(f"{name}:{line}: {sentence}\n")
        return
    for what, figure in figures(modules).items():
        sys.stdout.write(f"{what:32} {figure}\n")
    if options.names:
        for circle in import_cycles(modules):
            sys.stdout.write(f"circle: {' '.join(circle)}\n")
        by_file = defaultdict(set)
        for module in modules:
            for file, name in foreign_internals(module):
                by_file[file].add(name)
        for file, names in by_file.items():
            sys.stdout.write(f"{file}: {' '.join(sorted(names))}\n")


if __name__ == "__main__":
    main()
