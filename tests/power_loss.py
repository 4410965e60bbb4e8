"""Pulls the plug of a lab machine under load, again and again, and checks what its worker owed.

    python tests/power_loss.py debian12 [--times 50] [--seed N]

The machine's disk outlives it. All that a worker there answered "accepted" to is known out here,
and after the next boot each such task must have had a terminal report, its reports must agree, and
none may come of a task that nobody sent. Exit status 1 when that is broken, 77 without a lab.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from collections.abc import Callable

from lab import disks, roots
from lab.errors import LabError, LabUnavailableError
from lab.hosts import HOSTS
from lab.machine import Machine, MachineHungError

PYTHON = "/opt/stockade/bin/python"
LOAD = "tests/power_load.py"
# Generous: the machine is emulated, and other work may share its host.
BOOT_S = 600.0
SETTLE_S = 600.0
LOAD_S = (0.5, 8.0)
EXIT_UNAVAILABLE = 77


class Account:
    """What was said by all lives of the machine so far."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.accepted: set[str] = set()
        self.reports: dict[str, list[str]] = collections.defaultdict(list)
        self.faults: list[str] = []
        self.settled = False
        self._rest = b""

    def hear(self, data: bytes) -> None:
        """Takes in what the machine prints, in pieces as they come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match line.decode().split():
                case ["sent", name]:
                    self.sent.add(name)
                case ["accepted", name]:
                    self.accepted.add(name)
                case ["report", name, status, code]:
                    self.reports[name].append(f"{status}/{code}")
                case ["settled"]:
                    self.settled = True
                    self.check()
                case words:
                    self.faults.append(" ".join(words))

    def unplugged(self) -> None:
        """The machine is gone, and with it the half of a line."""
        self._rest = b""
        self.settled = False

    def check(self) -> None:
        """When a life has settled what was before it, and sent nothing of its own yet."""
        for name in sorted(self.accepted - set(self.reports)):
            self.faults.append(f"lost: {name} was accepted and never reported")
        for name, told in self.reports.items():
            if len(set(told)) > 1:
                self.faults.append(f"doubled: {name} was reported as {told}")
            if name not in self.sent:
                self.faults.append(f"invented: {name}")

    def ends(self) -> collections.Counter[str]:
        """How the tasks ended."""
        return collections.Counter(told[0] for told in self.reports.values())


def pull_plugs(
    host_name: str, times: int, chance: random.Random, say: Callable[[str], None]
) -> Account:
    """So many lives of one disk, each ended under load, and one more that only settles."""
    host = HOSTS[host_name]
    image = roots.image(host)
    name = f"power-{chance.randrange(2**32)}"
    disk = disks.named(host, image, name)
    account = Account()
    try:
        for life in range(times + 1):
            prefix = "end" if life == times else f"life{life}"
            with Machine(host, image, disk=disk) as machine:
                machine.boot(BOOT_S)
                _live(machine, account, prefix, 0.0 if life == times else chance.uniform(*LOAD_S))
                machine.pull_plug()
            account.unplugged()
            say(
                f"{host_name}: plug {life} of {times}: {len(account.accepted)} accepted, "
                f"{dict(account.ends())}, {len(account.faults)} faults"
            )
            if account.faults:
                break
    finally:
        disk.unlink(missing_ok=True)
    return account


def _live(machine: Machine, account: Account, prefix: str, load_s: float) -> None:
    """Lets one life settle what was before it, checks that, and load it for so long."""
    end = time.monotonic() + SETTLE_S
    unplug_at = float("inf")

    def hear(data: bytes) -> None:
        nonlocal unplug_at
        account.hear(data)
        if account.settled and unplug_at == float("inf"):
            unplug_at = time.monotonic() + load_s
        if time.monotonic() >= unplug_at and load_s:
            raise _EnoughError

    try:
        ran = machine.run([PYTHON, LOAD, prefix], deadline_s=end - time.monotonic(), output=hear)
    except _EnoughError:
        return
    except MachineHungError:
        account.faults.append(f"{prefix}: the worker did not settle in {SETTLE_S:.0f} s")
        return
    if not account.settled:
        account.faults.append(f"{prefix}: the load ended with {ran.status}")


class _EnoughError(Exception):
    """The machine was loaded for long enough."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("host", choices=sorted(HOSTS))
    parser.add_argument("--times", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    try:
        account = pull_plugs(
            given.host, given.times, random.Random(seed), lambda line: print(line, flush=True)
        )
    except LabUnavailableError as error:
        print(f"lab: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    for fault in account.faults:
        print(fault)
    print(f"{len(account.accepted)} accepted, {sum(account.ends().values())} reported: "
          f"{dict(account.ends())}; {time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if account.faults else 0


if __name__ == "__main__":
    sys.exit(main())
