"""Where Debian packages come from: the machine's own apt configuration, for any suite."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Final

from lab.errors import LabUnavailableError

APT: Final = Path("/etc/apt")
OS_RELEASE: Final = Path("/etc/os-release")
MIRROR_VARIABLE: Final = "STOCKADE_LAB_MIRROR"
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_ONE_LINE: Final = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s*)?(?P<uri>\S+)\s+(?P<suite>\S+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One suite of one archive."""

    uri: str
    suite: str
    keyring: str

    def line(self) -> str:
        """As sources.list(5) has it."""
        return f"deb [signed-by={self.keyring}] {self.uri} {self.suite} main"


def parse_deb822(text: str) -> list[Source]:
    """The binary package sources of a ``.sources`` file; disabled ones are left out."""
    found = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n", "", text)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields[name] += " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled") == "no":
            continue
        # A key may stand in the file itself; only a keyring's path is of use to us.
        keyring = fields.get("signed-by", "")
        keyring = keyring if keyring.startswith("/") else KEYRING
        found += [
            Source(uri, suite, keyring)
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return found


def parse_list(text: str) -> list[Source]:
    """The binary package sources of a one-line-style file."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.strip())
        if match is None:
            continue
        signed_by = re.search(r"signed-by=(/\S+)", match["options"] or "")
        found.append(Source(match["uri"], match["suite"], signed_by[1] if signed_by else KEYRING))
    return found


def configured(directory: Path = APT) -> list[Source]:
    """Every source that apt on this machine uses."""
    found = []
    for path in [directory / "sources.list", *sorted(directory.glob("sources.list.d/*"))]:
        if not path.is_file():
            continue
        if path.suffix == ".sources":
            found += parse_deb822(path.read_text())
        elif path.suffix == ".list":
            found += parse_list(path.read_text())
    return found


def sources_for(suite: str, directory: Path = APT, os_release: Path = OS_RELEASE) -> list[Source]:
    """The sources of Debian ``suite``, by this machine's own mirrors.

    A Debian machine has its own suite (and -updates, -security) configured; another suite is
    found at the same places. ``STOCKADE_LAB_MIRROR`` names a mirror for machines that are not
    Debian.

    Raises:
        LabUnavailableError: no mirror of Debian is known here.
    """
    mirror = os.environ.get(MIRROR_VARIABLE)
    if mirror:
        return [Source(mirror, suite, KEYRING)]
    facts = dict(
        line.replace('"', "").split("=", 1)
        for line in os_release.read_text().splitlines()
        if "=" in line
    )
    own = facts.get("VERSION_CODENAME", "")
    found = [
        dataclasses.replace(source, suite=suite + source.suite.removeprefix(own))
        for source in configured(directory)
        if source.suite in (own, f"{own}-updates", f"{own}-security")
    ]
    if facts.get("ID") != "debian" or not found:
        raise LabUnavailableError(
            f"cannot find packages of Debian {suite}: apt here has no Debian mirror configured; "
            f"set {MIRROR_VARIABLE} to the URL of one"
        )
    return found


def transport_options() -> list[str]:
    """This machine's settings of how archives are fetched (proxies, dates), for another apt."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    wanted = ("Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries")
    return [
        line
        for line in dump.stdout.splitlines()
        if line.startswith(wanted) and not line.endswith('"";')
    ]
