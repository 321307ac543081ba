"""The house stands as designed: ladder, budgets, rooms without torch, a small public face."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import house
import stepahead

TESTS = house.ROOT / "tests"


def imports_of_the_package() -> list[house.Import]:
    return [
        item
        for path in house.sources()
        for item in house.package_imports(
            path.read_text(encoding="utf-8"), path.relative_to(house.PACKAGE)
        )
    ]


def test_every_import_goes_up_the_ladder() -> None:
    imports = imports_of_the_package()
    assert any(item.room == "plan" and item.target == "types" for item in imports)
    assert house.off_the_ladder(imports) == []


def test_every_file_stands_in_a_room() -> None:
    rooms = {house.room_of(path.relative_to(house.PACKAGE)) for path in house.sources()}
    assert rooms <= {*house.LADDER, house.FACE}


def test_contributors_are_shown_the_rooms_there_are_in_the_order_of_the_ladder() -> None:
    guide = (house.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = guide.partition("**The ladder.**")[2].split("```")[1].split()
    rooms = {house.room_of(path.relative_to(house.PACKAGE)) for path in house.sources()}
    assert shown == [room for room in house.LADDER if room in rooms]


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("plan.py", "from stepahead.scheduler.table import Table", "plan imports scheduler, which"),
        ("scheduler/a.py", "import stepahead.device.base", "scheduler must not know device"),
        ("scheduler/a.py", "from ..device import base", "scheduler must not know device"),
        (
            "scheduler/a.py",
            "from stepahead import model",
            "scheduler imports model, which",
        ),
        (
            "scheduler/a.py",
            "if TYPE_CHECKING:\n    from stepahead.model.llama import Llama",
            "scheduler imports model, which",
        ),
        (
            "loop/a.py",
            "def f():\n    from stepahead.cache import pages",
            "loop must not know cache",
        ),
        ("loop/a.py", "from stepahead.config import Resolved", "loop must not know config"),
        ("loop/deep/a.py", "from ...scheduler import table", "loop must not know scheduler"),
        ("device/a.py", "from stepahead.plan import Plan", "device must not know plan"),
        ("runner/a.py", 'HOMES = {"x": "stepahead.loop.serial:Serial"}', "runner must not know"),
        ("engine.py", "from stepahead import LLM", "engine imports stepahead, which is below"),
        ("plan.py", "from stepahead.attic import dust", "attic has no place on the ladder"),
        ("attic/a.py", "import stepahead.plan", "attic has no place on the ladder"),
    ],
)
def test_the_ladder_sees_every_way_down(file: str, source: str, complaint: str) -> None:
    found = house.off_the_ladder(list(house.package_imports(source, Path(file))))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("scheduler/a.py", "from .table import Table\nfrom ..plan import Plan"),
        ("scheduler/a.py", "from stepahead.cache.pages import Pages\nimport numpy as np"),
        ("loop/a.py", "from stepahead.plan import Plan\nfrom stepahead.observe import books"),
        ("cli/a.py", 'from stepahead import __version__\nCOMMAND = "stepahead.cli.chat:chat"'),
        ("__init__.py", "from stepahead.llm import LLM"),
        ("cli/a.py", '"""Prose may say stepahead.scheduler as it likes."""'),
    ],
)
def test_the_ladder_lets_every_way_up_pass(file: str, source: str) -> None:
    assert house.off_the_ladder(list(house.package_imports(source, Path(file)))) == []


def test_files_and_functions_stay_within_budget() -> None:
    files = [house.measure(path) for path in house.sources()]
    assert sum(len(file.functions) for file in files) > 30
    assert house.over_budget(files) == []


def test_the_budgets_are_held_to_the_line(tmp_path: Path) -> None:
    def function(name: str, lines: int) -> str:
        return f"def {name}():\n" + "    pass\n" * (lines - 1)

    def complaints(source: str) -> list[str]:
        path = tmp_path / "plan.py"
        path.write_text(source, encoding="utf-8")
        return house.over_budget([house.measure(path, tmp_path)])

    assert complaints("x = 1\n" * 500) == []
    assert len(complaints("x = 1\n" * 501)) == 1
    short = function("a", 8) + function("b", 8)
    assert complaints(short + function("long", 70)) == []
    assert complaints(short + function("long", 71)) == [
        "plan.py:17: long has 71 lines, 70 allowed; name its parts"
    ]
    assert complaints(function("a", 9)) == ["median function: 9 lines, 8 allowed"]


def test_options_stay_within_budget() -> None:
    files = [house.PACKAGE / "config.py", house.PACKAGE / "serve" / "options.py"]
    options = [name for file in files for name in house.options(file.read_text(encoding="utf-8"))]
    assert {"EngineConfig.loop", "ServeConfig.port"} <= set(options)
    assert len(options) <= house.MAX_OPTIONS


def test_rooms_without_torch_import_without_it() -> None:
    modules = house.torch_free_modules()
    assert {"stepahead", "stepahead.plan", "stepahead.config"} <= set(modules)
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} loads torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        env=os.environ | {"PYTHONPATH": str(house.PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_pure_tests_name_no_torch() -> None:
    named = {
        f"{path.name}: {name}"
        for path in (TESTS / "pure").rglob("*.py")
        for name in outside_imports(path)
        if name in ("torch", "transformers")
    }
    assert named == set()


def test_the_package_imports_only_what_it_declares() -> None:
    project = tomllib.loads((house.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # what an extra brings is imported by the files that need it, and these only when asked for
    needs = project["dependencies"] + project["optional-dependencies"]["otel"]
    declared = {re.split(r"[<>=\[ ]", need)[0] for need in needs}
    known_as = {
        "zmq": "pyzmq",
        "prometheus_client": "prometheus-client",
        "opentelemetry": "opentelemetry-sdk",
    }
    used = {known_as.get(name, name) for path in house.sources() for name in outside_imports(path)}
    assert used - set(sys.stdlib_module_names) - {"stepahead"} <= declared


def outside_imports(path: Path) -> set[str]:
    """First parts of the absolute imports of a file, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_the_public_face_is_small_and_all_of_it_is_visible() -> None:
    face = stepahead.__all__
    assert len(face) == len(set(face)) <= house.MAX_PUBLIC_NAMES
    assert set(dir(stepahead)) == set(face)
    # loaded already: nothing public beside what is exported (submodules and typing helpers aside)
    loaded = {
        name
        for name, value in vars(stepahead).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert loaded - {"annotations", "Any", "TYPE_CHECKING"} <= set(face)
    # not loaded yet: what type checkers and editors are shown is what is exported
    source = Path(stepahead.__file__).read_text(encoding="utf-8")
    shown = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stepahead.")
        for alias in node.names
    }
    assert shown == set(face) - {"__version__"}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Foresight'"):
        _ = stepahead.Foresight
