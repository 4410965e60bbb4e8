"""Who may import whom, read from the sources: supervisor -> sandbox -> platform, never back.

The checks are functions from sources to complaints, so that each can be shown to complain.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("platform", "sandbox", "supervisor")
KERNEL_MODULES = ("ctypes", "_ctypes", "prctl", "_prctl", "cgroupspy")
ERRORS = "stockade.platform.errors"
STOCKADE_ERROR = f"{ERRORS}.StockadeError"


def sources() -> dict[str, str]:
    """Every module of the three layers: its dotted name and its text."""
    found = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            found[f"stockade.{name}"] = path.read_text()
    return found


def imports(text: str) -> Iterator[tuple[str, int]]:
    """Every name a module imports, at whatever depth, also under TYPE_CHECKING; and the line.

    ``from a import b`` gives ``a.b``: whether b is a module or something in one is the same here.
    A relative import gives ``.`` and its text.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = called.id if isinstance(called, ast.Name) else called
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value), node.lineno


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer_of(name: str) -> str | None:
    for layer in LAYERS:
        if is_within(name, f"stockade.{layer}"):
            return layer
    return None


def steps_back(modules: Mapping[str, str]) -> list[str]:
    """Imports of a higher layer, of the bare package (which has no layer), and relative ones."""
    complaints = []
    for module, text in modules.items():
        own = LAYERS.index(layer_of(module) or "")
        for name, line in imports(text):
            if name.startswith("."):
                complaints.append(f"{module}:{line} imports {name} relatively")
            elif is_within(name, "stockade"):
                layer = layer_of(name)
                if layer is None or LAYERS.index(layer) > own:
                    complaints.append(f"{module}:{line} imports {name}")
    return complaints


def kernel_outside_platform(modules: Mapping[str, str]) -> list[str]:
    """Imports of what makes system calls or writes cgroup files, outside platform/."""
    return [
        f"{module}:{line} imports {name}"
        for module, text in modules.items()
        if layer_of(module) != "platform"
        for name, line in imports(text)
        if any(is_within(name, kernel) for kernel in KERNEL_MODULES)
    ]


def wire_imports_ours(modules: Mapping[str, str]) -> list[str]:
    """supervisor/wire is only the format of messages: it imports nothing of ours but itself."""
    return beyond(modules, "stockade.supervisor.wire", ())


def scheduler_imports_more_than_wire(modules: Mapping[str, str]) -> list[str]:
    """The embedded scheduler could stand alone: it knows our messages and the root error."""
    return beyond(modules, "stockade.supervisor.scheduler", ("stockade.supervisor.wire",))


def beyond(modules: Mapping[str, str], package: str, allowed: tuple[str, ...]) -> list[str]:
    complaints = []
    for module, text in modules.items():
        if not is_within(module, package):
            continue
        for name, line in imports(text):
            if not is_within(name, "stockade"):
                continue
            is_allowed = any(is_within(name, one) for one in (package, *allowed))
            if not is_allowed and not (allowed and name == STOCKADE_ERROR):
                complaints.append(f"{module}:{line} imports {name}")
    return complaints


CHECKS = (
    steps_back,
    kernel_outside_platform,
    wire_imports_ours,
    scheduler_imports_more_than_wire,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sources_give_no_complaint(check):
    assert check(sources()) == []


def test_all_three_layers_are_read():
    names = set(sources())
    assert {"stockade.platform.errors", "stockade.sandbox", "stockade.supervisor.wire"} <= names


def test_platform_has_no_init():
    # With one, ``import platform`` from the repository's root would find it and not Python's own.
    assert not (ROOT / "platform" / "__init__.py").exists()


BAD = [
    (steps_back, "stockade.platform.proc", "import stockade.sandbox.plan"),
    (steps_back, "stockade.platform.proc", "from stockade.sandbox import plan"),
    (steps_back, "stockade.platform.proc", "from stockade import sandbox"),
    (steps_back, "stockade.platform.proc", "import stockade.supervisor"),
    (steps_back, "stockade.sandbox.plan", "from stockade.supervisor.errors import ConfigError"),
    (steps_back, "stockade.sandbox.plan", "def late():\n    import stockade.supervisor.states"),
    (
        steps_back,
        "stockade.sandbox.plan",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stockade import supervisor",
    ),
    (steps_back, "stockade.sandbox.plan", "import os, stockade.supervisor.states as states"),
    (steps_back, "stockade.sandbox.plan", "import stockade"),
    (steps_back, "stockade.sandbox.plan", "from ..supervisor import states"),
    (
        steps_back,
        "stockade.sandbox",
        "import importlib\nimportlib.import_module('stockade.supervisor')",
    ),
    (kernel_outside_platform, "stockade.sandbox.plan", "import ctypes"),
    (kernel_outside_platform, "stockade.sandbox.plan", "from ctypes import CDLL"),
    (kernel_outside_platform, "stockade.supervisor.slots", "import ctypes.util"),
    (
        kernel_outside_platform,
        "stockade.supervisor.slots",
        "try:\n    import prctl\nfinally:\n    pass",
    ),
    (kernel_outside_platform, "stockade.sandbox.spawner", "import _prctl as prctl"),
    (kernel_outside_platform, "stockade.sandbox.spawner", "from cgroupspy.trees import Tree"),
    (kernel_outside_platform, "stockade.sandbox.spawner", "__import__('ctypes')"),
    (wire_imports_ours, "stockade.supervisor.wire.messages", "import stockade.supervisor.states"),
    (wire_imports_ours, "stockade.supervisor.wire", "from stockade.platform import errors"),
    (wire_imports_ours, "stockade.supervisor.wire", f"from {ERRORS} import StockadeError"),
    (
        scheduler_imports_more_than_wire,
        "stockade.supervisor.scheduler.store",
        "from stockade.supervisor.journal import Journal",
    ),
    (
        scheduler_imports_more_than_wire,
        "stockade.supervisor.scheduler.store",
        f"from {ERRORS} import SyscallError",
    ),
    (
        scheduler_imports_more_than_wire,
        "stockade.supervisor.scheduler",
        "from stockade.supervisor import wire_of_another_name",
    ),
]


@pytest.mark.parametrize(("check", "module", "text"), BAD)
def test_each_check_complains_of_what_it_is_for(check, module, text):
    complaints = check({module: text})
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{module}:{text.count(chr(10)) + 1 - ('finally' in text) * 2}")


GOOD = [
    ("stockade.platform.proc", "import os, ctypes, prctl, cgroupspy.controllers"),
    ("stockade.platform.proc", "from stockade.platform._libc import libc"),
    ("stockade.sandbox.plan", "from stockade.platform import cgroup, prctl"),
    ("stockade.sandbox.plan", "import stockade.platform.prctl"),
    ("stockade.supervisor.slots", "from stockade.sandbox import protocol\nimport platform"),
    ("stockade.supervisor.wire.messages", "from stockade.supervisor.wire import limits\nimport os"),
    ("stockade.supervisor.scheduler.store", "from stockade.supervisor.wire import messages"),
    ("stockade.supervisor.scheduler.store", "from stockade.supervisor.scheduler import states"),
    ("stockade.supervisor.scheduler.store", f"from {ERRORS} import StockadeError"),
    ("stockade.supervisor.cli.scheduler", "from stockade.supervisor.scheduler import serve"),
]


@pytest.mark.parametrize(("module", "text"), GOOD)
def test_what_is_allowed_gives_no_complaint(module, text):
    assert [complaint for check in CHECKS for complaint in check({module: text})] == []
