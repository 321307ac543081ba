"""The rules of the house as numbers and code: budgets, the import ladder, how both are measured.

Reads the sources as text and imports nothing of the package, so a broken tree can still be
measured.  `scripts/size` prints what is measured here; tests/pure/test_house.py holds it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stepahead"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_MEDIAN_FUNCTION_LINES = 8
MAX_OPTIONS = 60
MAX_PUBLIC_NAMES = 8

# Top to bottom: a room may import only rooms above it.
LADDER = (
    *("errors", "wire", "sync", "structured", "bans", "types", "machine", "config", "plan"),
    *("observe", "text", "parse", "grammar", "kernels", "device", "cache", "scheduler", "loop"),
    *("model", "parallel", "runner", "executor", "disagg", "watch"),
    *("engine", "assemble", "llm", "sim", "doctor", "serve", "trace", "top", "explain", "cli"),
)
# The package's own __init__ and __main__ stand below every room.
FACE = "stepahead"

# Above, and forbidden all the same: what a room must not know.
BLIND = {
    "device": {"plan", "kernels"},
    "scheduler": {"device", "kernels"},
    # of the nouns a loop knows plans, errors and the `Outputs` it hands on; no options, no text
    "loop": {"wire", "config", "text", "kernels", "device", "cache", "scheduler"},
    "runner": {"scheduler", "loop"},
}

# What must import without torch: these rooms but for the files that hold device memory, and,
# of rooms that do use torch, these files.
TORCH_FREE_ROOMS = {
    *("errors", "wire", "sync", "structured", "bans", "types", "machine", "config", "plan", FACE),
    *("observe", "text", "parse", "grammar", "cache", "scheduler", "loop"),
    *("watch", "top", "explain", "serve"),
}
NEEDS_TORCH = {"cache/pools.py", "cache/tiers.py"}
TORCH_FREE_FILES = {
    *("device/__init__.py", "device/base.py"),
    *("executor/virtual.py", "sim/virtual.py", "sim/shapes.py"),
    *("cli/__init__.py", "cli/main.py", "cli/options.py", "cli/explain.py", "cli/top.py"),
}


@dataclass(frozen=True)
class Function:
    """One `def`, nested ones included; `lines` runs from the `def` to its last line."""

    where: str
    name: str
    lines: int


@dataclass(frozen=True)
class File:
    """One source file of the package."""

    path: str
    room: str
    lines: int
    functions: tuple[Function, ...]


@dataclass(frozen=True)
class Import:
    """`where` (file:line, in `room`) names a module of the room `target`."""

    where: str
    room: str
    target: str


def sources(package: Path = PACKAGE) -> list[Path]:
    """Every Python file of the package, in a fixed order."""
    return sorted(package.rglob("*.py"))


def room_of(relative: Path) -> str:
    """The room of a file, by its path inside the package."""
    first = relative.parts[0].removesuffix(".py")
    return FACE if first in ("__init__", "__main__") else first


def measure(path: Path, package: Path = PACKAGE) -> File:
    """Line counts of one file and of its functions."""
    relative = path.relative_to(package)
    text = path.read_text(encoding="utf-8")
    functions = tuple(
        Function(f"{relative}:{node.lineno}", node.name, _length(node))
        for node in ast.walk(ast.parse(text, str(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return File(str(relative), room_of(relative), len(text.splitlines()), functions)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def over_budget(files: list[File]) -> list[str]:
    """One line for each broken budget, each saying where and by how much."""
    functions = [function for file in files for function in file.functions]
    broken = [
        f"{file.path}: {file.lines} lines, {MAX_FILE_LINES} allowed; split it by idea"
        for file in files
        if file.lines > MAX_FILE_LINES
    ]
    broken += [
        f"{function.where}: {function.name} has {function.lines} lines, "
        f"{MAX_FUNCTION_LINES} allowed; name its parts"
        for function in functions
        if function.lines > MAX_FUNCTION_LINES
    ]
    middle = median(function.lines for function in functions) if functions else 0
    if middle > MAX_MEDIAN_FUNCTION_LINES:
        broken.append(f"median function: {middle} lines, {MAX_MEDIAN_FUNCTION_LINES} allowed")
    return broken


def options(source: str) -> list[str]:
    """Names of the user's options: the fields of every `...Config` class in `source`."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [
        f"{node.name}.{field.target.id}"
        for node in classes
        if node.name.endswith("Config")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def package_imports(source: str, relative: Path) -> Iterator[Import]:
    """Every way a file can name a module of the package: at the top, in a function, for the type
    checker only, relative, or as a string that is resolved later ("stepahead.room.module:name")."""
    room = room_of(relative)
    for node in ast.walk(ast.parse(source, str(relative))):
        for target in _targets(node, relative):
            yield Import(f"{relative}:{getattr(node, 'lineno', 0)}", room, target)


def _targets(node: ast.AST, relative: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [room for alias in node.names if (room := _room_named(alias.name))]
    if isinstance(node, ast.ImportFrom):
        return _from_targets(node, relative)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        match = re.fullmatch(r"(stepahead\.\w+)(\.\w+)*(:\w+)?", node.value)
        return [room for room in [_room_named(match[1])] if room in LADDER] if match else []
    return []


def _from_targets(node: ast.ImportFrom, relative: Path) -> list[str]:
    module = node.module or ""
    if node.level:
        home = (FACE, *relative.parts[:-1])
        module = ".".join([*home[: len(home) - node.level + 1], *filter(None, [module])])
    if module != FACE:
        return [room for room in [_room_named(module)] if room]
    # `from stepahead import plan` names a room; any other name is the public face
    names = [alias.name for alias in node.names if alias.name != "__version__"]
    return [name if name in LADDER else FACE for name in names]


def _room_named(module: str) -> str | None:
    first, _, rest = module.partition(".")
    if first != FACE:
        return None
    return rest.partition(".")[0] or FACE


def off_the_ladder(imports: list[Import]) -> list[str]:
    """One line for each import that goes down or sideways, or that its room is blind to."""
    rung = {room: number for number, room in enumerate((*LADDER, FACE))}
    broken: list[str] = []
    for item in imports:
        if item.room == item.target:
            continue
        if item.room not in rung or item.target not in rung:
            unknown = item.room if item.room not in rung else item.target
            broken.append(f"{item.where}: {unknown} has no place on the ladder")
        elif rung[item.target] > rung[item.room]:
            broken.append(f"{item.where}: {item.room} imports {item.target}, which is below it")
        elif item.target in BLIND.get(item.room, ()):
            broken.append(f"{item.where}: {item.room} must not know {item.target}")
    return broken


def torch_free_modules(package: Path = PACKAGE) -> list[str]:
    """Dotted names of the modules that must import without torch, as far as they exist."""
    paths = [path.relative_to(package) for path in sources(package)]
    names = [
        ".".join((FACE, *path.with_suffix("").parts)) for path in paths if _is_torch_free(path)
    ]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def _is_torch_free(relative: Path) -> bool:
    name = relative.as_posix()
    return name in TORCH_FREE_FILES or (
        room_of(relative) in TORCH_FREE_ROOMS and name not in NEEDS_TORCH
    )
