"""What RQ and Celery run for a task: the command, as somebody who uses them would have it run."""

from __future__ import annotations

import subprocess


def run_command(argv: list[str]) -> str:
    """Its output; fails when it does."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(
        argv, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode()
