"""docs/architecture.md names every module that is there, on the path of a task or beside it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"\b(?:platform|sandbox|supervisor)/[\w/]+\.(?:py|c|proto)\b")
FOLDERS = ("sandbox", "supervisor", "supervisor/links", "supervisor/task_types")


def named() -> set[str]:
    return set(NAMED.findall((ROOT / "docs" / "architecture.md").read_text()))


def test_every_module_it_names_exists():
    assert [name for name in sorted(named()) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_of_the_way_is_named(folder):
    there = {
        str(path.relative_to(ROOT))
        for kind in ("*.py", "*.c")
        for path in (ROOT / folder).glob(kind)
        if path.name != "__init__.py"
    }
    assert there
    assert sorted(there - named()) == []
