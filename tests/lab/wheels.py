"""What a host's virtual environment is filled from: the project's dependencies as files.

Fetched on the machine with its own pip and package index, for the host's Python; installed in
the host without a network.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
import venv
from pathlib import Path
from typing import Final

from lab.errors import LabError
from lab.hosts import CHECKOUT, Host
from lab.locking import locked

# Published as source only, without dependencies; built inside the root.
SOURCE_ONLY: Final = frozenset(("cgroupspy", "python-prctl"))
# Development tools that no test imports.
NOT_IN_TESTS: Final = frozenset(("build", "mypy", "ruff", "types-psutil"))


def requirements(pyproject: Path = CHECKOUT / "pyproject.toml") -> list[str]:
    """What must be installed to build the checkout and run its tests, sorted."""
    with open(pyproject, "rb") as file:
        content = tomllib.load(file)
    project = content["project"]
    tests = project["optional-dependencies"]["dev"]
    found = {
        *content["build-system"]["requires"],
        *project["dependencies"],
        *(text for text in tests if name_of(text) not in NOT_IN_TESTS),
    }
    return sorted(found)


def name_of(requirement: str) -> str:
    """The project's name in a requirement such as ``aiohttp>=3.9``."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower().replace("_", "-")


def download_commands(pip: list[str], host: Host, target: Path) -> list[list[str]]:
    """The pip commands that fill ``target`` for ``host``."""
    wanted = requirements()
    binary = [text for text in wanted if name_of(text) not in SOURCE_ONLY]
    source = [text for text in wanted if name_of(text) in SOURCE_ONLY]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, host.glibc_minor + 1)]
    platforms += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    download = [*pip, "download", "-qq", "--dest", str(target)]
    for_host = ["--only-binary=:all:", "--python-version", host.python]
    for_host += [part for name in platforms for part in ("--platform", name)]
    return [
        [*download, *for_host, *binary],
        [*download, "--no-deps", "--no-binary=:all:", *source],
    ]


def download(host: Host, target: Path, cache: Path) -> None:
    """Fills ``target`` with wheels and source archives for ``host``.

    Raises:
        LabError: pip failed; its words are on stderr.
    """
    target.mkdir()
    cache.mkdir(parents=True, exist_ok=True)
    for command in download_commands(_pip(cache), host, target):
        ended = subprocess.run(command, check=False)
        if ended.returncode != 0:
            raise LabError(f"cannot fetch the dependencies: {' '.join(command[:4])} failed")


def build(source: Path, target: Path, cache: Path) -> Path:
    """Builds the wheel of the checkout in ``source``; its path in ``target``.

    Raises:
        LabError: with the build's words.
    """
    with open(source / "pyproject.toml", "rb") as file:
        tools: list[str] = tomllib.load(file)["build-system"]["requires"]
    pip = _pip(cache)
    stamp = cache / "pip" / "tools"
    if not stamp.exists() or stamp.read_text() != repr(tools):
        ended = subprocess.run([*pip, "install", "-qq", *tools], check=False)
        if ended.returncode != 0:
            raise LabError(f"cannot install {' '.join(tools)}, which building a wheel takes")
        stamp.write_text(repr(tools))
    # Without isolation: an environment made anew for each build would be fetched each time.
    options = ["-qq", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    ended = subprocess.run(
        [*pip, "wheel", *options, str(target), str(source)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        raise LabError(f"cannot build the checkout's wheel: {ended.stdout}")
    (wheel,) = target.glob("*.whl")
    return wheel


def _pip(cache: Path) -> list[str]:
    """The pip of an environment kept in ``cache``: the machine's Python may have none."""
    with locked(cache / "pip.lock"):
        python = cache / "pip" / "bin" / "python"
        # A link to a Python that was since removed does not exist.
        if not python.exists():
            venv.create(cache / "pip", with_pip=True, clear=True)
    return [str(python), "-m", "pip"]
