"""Running tests on a lab host: from a host's name and pytest's arguments to an exit status."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lab import disks, roots
from lab.console import Sign
from lab.errors import LabError
from lab.hosts import Host
from lab.machine import Hardware, Machine, MachineEndedError, MachineHungError, Ran

# Beyond pytest's own 0 to 5. 77 is what test drivers know as "skipped".
EXIT_UNAVAILABLE: Final = 77
EXIT_LAB_FAILED: Final = 90
EXIT_PANIC: Final = 91
EXIT_GUEST_OOM: Final = 92
EXIT_HUNG: Final = 93
EXIT_GONE: Final = 94

RESULTS: Final = "/run/stockade-lab"
JUNIT: Final = f"{RESULTS}/junit.xml"
SKIPPED: Final = f"{RESULTS}/skipped"
# One test; pyproject.toml's is for a machine that is not emulated.
TEST_TIMEOUT_S: Final = 600


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What to run and what to bring back.

    Attributes:
        timeout_s: from the machine's start; a run that takes longer is ended.
        junit: where the JUnit XML file goes.
        skipped: where the node ids go that this host, too, had to skip.
        console: where the machine's console goes.
        disk: name of a kept disk; without one the disk is thrown away.
    """

    host: Host
    arguments: list[str]
    timeout_s: float
    junit: Path | None = None
    skipped: Path | None = None
    console: Path | None = None
    disk: str | None = None
    beside: tuple[Path, ...] = ()
    hardware: Hardware = dataclasses.field(default_factory=Hardware)


def expand(arguments: list[str]) -> list[str]:
    """``@FILE`` becomes the file's lines, as pytest has it: the guest does not have the file."""
    expanded = []
    for argument in arguments:
        if argument.startswith("@"):
            try:
                lines = Path(argument[1:]).read_text().splitlines()
            except OSError as error:
                raise LabError(f"cannot read {argument[1:]}: {error.strerror}") from error
            expanded += [line for line in lines if line]
        else:
            expanded.append(argument)
    return expanded


def pytest_command(request: Request) -> list[str]:
    """The command that the guest runs."""
    command = ["/opt/stockade/bin/pytest", "-p", "no:cacheprovider", "--color=no"]
    command += [f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={JUNIT}", f"--lab-list={SKIPPED}"]
    return [*command, *expand(request.arguments)]


def run_tests(request: Request) -> int:
    """Boots the host, runs pytest in it, brings the results here; pytest's exit status or ours."""

    def work(machine: Machine, left_s: float) -> Ran:
        ran = machine.run(
            # The results' folder is on a tmpfs and made per boot.
            ["/bin/sh", "-c", f'mkdir -p {RESULTS} && exec "$@"', "sh", *pytest_command(request)],
            deadline_s=left_s,
            output=_to_stdout,
            environment={"STOCKADE_LAB_HOST": request.host.name},
            files=[JUNIT, SKIPPED],
        )
        for wanted, path in ((request.junit, JUNIT), (request.skipped, SKIPPED)):
            if wanted is not None and path in ran.files:
                wanted.write_bytes(ran.files[path])
        return ran

    return with_machine(request, work)


def run_command(request: Request) -> int:
    """Boots the host and runs the arguments as a command; its exit status or ours."""

    def work(machine: Machine, left_s: float) -> Ran:
        return machine.run(request.arguments, deadline_s=left_s, output=_to_stdout)

    return with_machine(request, work)


def with_machine(request: Request, work: Callable[[Machine, float], Ran]) -> int:
    """Does ``work`` on a booted machine and turns every way that can end into a status."""
    host = request.host
    started = time.monotonic()
    expand(request.arguments)  # refused before minutes go by
    image = roots.image(host)
    disk = None if request.disk is None else disks.named(host, image, request.disk)
    with Machine(
        host, image, hardware=request.hardware, disk=disk, beside=request.beside
    ) as machine:
        powered_on = time.monotonic()
        try:
            machine.boot(min(request.timeout_s, 300))
            say(
                f"{host.name}: kernel {machine.hello['kernel']}, booted in "
                f"{machine.hello['booted_s']:.0f} s, checkout installed in "
                f"{machine.hello['installed_s']:.0f} s"
            )
            began = time.monotonic()
            ran = work(machine, request.timeout_s - (began - powered_on))
        except MachineHungError:
            say_tail(machine)
            say(f"{host.name}: HUNG: not done after {request.timeout_s:.0f} s; ended")
            return EXIT_HUNG
        except MachineEndedError as ended:
            say_tail(machine)
            say(str(ended))
            return {Sign.PANIC: EXIT_PANIC, Sign.GUEST_OOM: EXIT_GUEST_OOM}.get(
                ended.sign, EXIT_GONE
            )
        finally:
            if request.console is not None and machine.console.path.exists():
                request.console.write_bytes(machine.console.path.read_bytes())
        finished = time.monotonic()
        signs = machine.console.signs
        if request.disk is not None:
            machine.power_off()
    say(f"{host.name}: ran {finished - began:.0f} s, {finished - started:.0f} s with everything")
    if Sign.GUEST_OOM in signs:
        # Whatever the tests said: a limit that held would have kept this from the guest.
        say(f"{host.name}: GUEST OUT OF MEMORY: {signs[Sign.GUEST_OOM]}")
        return EXIT_GUEST_OOM
    return ran.status if ran.status >= 0 else 128 - ran.status


def say(text: str) -> None:
    """The lab's own words, apart from the tests' output."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def say_tail(machine: Machine) -> None:
    """The console's last lines."""
    print(f"--- console of {machine.host.name}\n{machine.console.tail()}\n---", file=sys.stderr)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
