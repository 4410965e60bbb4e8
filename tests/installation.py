"""A copy of this Stockade in a virtual environment of its own, which a test can upgrade."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LAYERS = ("platform", "sandbox", "supervisor")
ROOT = Path(__file__).parent.parent


class Installation:
    """An installed Stockade that belongs to one test alone.

    Args:
        directory: where it is made.
        python: the interpreter.
    """

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        subprocess.run(
            [python, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=60
        )
        self.python = str(directory / "bin/python")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = directory / "lib" / version / "site-packages"
        # Dependencies and metadata come from where the tests have theirs.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.package = site / "stockade"
        for layer in LAYERS:
            shutil.copytree(
                ROOT / layer, self.package / layer,
                ignore=shutil.ignore_patterns("__pycache__"),
            )  # fmt: skip
        assert importlib.metadata.version("stockade")

    @property
    def command(self) -> tuple[str, ...]:
        return (self.python, "-m", "stockade.supervisor.cli.main")

    def replace(self, module: str, before: str, after: str) -> None:
        """What an upgrade does: other text in a module, in a new file as installers make it."""
        path = self.package / module
        text = path.read_text()
        assert before in text, f"{before!r} is not in {module}"
        changed = path.with_suffix(".new")
        changed.write_text(text.replace(before, after))
        os.replace(changed, path)
