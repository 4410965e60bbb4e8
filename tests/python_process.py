"""Scripts that assert by themselves, each in a Python process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_python(script: str, *arguments: str) -> str:
    """What the script printed. It can import what the tests can."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=False, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
