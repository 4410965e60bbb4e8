"""One virtual machine: its qemu process, its console, and the channel to its agent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from lab import channel, disks, parcel
from lab.channel import Kind
from lab.console import Console, Sign
from lab.errors import LabError, LabUnavailableError
from lab.hosts import Host
from lab.roots import Image, cache_directory

QEMU: Final = "qemu-system-x86_64"
# A panic ends qemu (-no-reboot), and an oops is a panic: a wounded kernel proves nothing.
KERNEL_COMMAND_LINE: Final = (
    "root=/dev/vda rw console=ttyS0 loglevel=4 panic=-1 oops=panic mitigations=off audit=0 "
    "systemd.show_status=0 no_timer_check tsc=reliable "
    # Nothing in a guest uses them, and each takes a while to load in emulation.
    "modprobe.blacklist=kvm_amd,kvm_intel,kvm,iTCO_wdt,lpc_ich,pcspkr,ccp,drm"
)
BOOT_DEADLINE_S: Final = 240.0
POWEROFF_DEADLINE_S: Final = 60.0
_POLL_S: Final = 0.5


class MachineEndedError(LabError):
    """The machine is not there any more; ``sign`` says what its console told, if anything."""

    def __init__(self, text: str, sign: Sign | None) -> None:
        super().__init__(text)
        self.sign = sign


class MachineHungError(LabError):
    """The machine did not answer before its deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine has.

    Attributes:
        accelerator: ``tcg`` (emulation) or ``kvm``; the latter only when asked for: /dev/kvm can
            be there and hang the guest.
    """

    memory_mib: int = 2048
    processors: int = 2
    accelerator: str = "tcg"


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """How a command in the guest ended; its status is subprocess's (negative: a signal)."""

    status: int
    files: dict[str, bytes]


def qemu_command(
    host: Host, image: Image, hardware: Hardware, *, disk: Path, parcel_file: Path,
    channel_path: Path, console: list[str], cache_mode: str,
) -> list[str]:  # fmt: skip
    """The command line of the machine."""
    accelerator = hardware.accelerator
    if accelerator == "tcg":
        accelerator += f",thread={host.tcg_thread},tb-size=512"
    # The machine dies with whoever runs the lab, however that dies.
    command = ["setpriv", "--pdeathsig", "KILL", QEMU, "-nodefaults", "-no-user-config"]
    command += [
        "-machine",
        "q35,usb=off,i8042=off,vmport=off,smbus=off,sata=off,hpet=off",
        "-accel",
        accelerator,
        "-cpu",
        "max",
    ]
    command += ["-smp", str(hardware.processors), "-m", str(hardware.memory_mib)]
    command += ["-display", "none", "-nic", "none", "-no-reboot"]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd)]
    command += ["-append", KERNEL_COMMAND_LINE]
    command += ["-drive", f"if=none,id=root,format=qcow2,cache={cache_mode},file={disk}"]
    command += ["-device", "virtio-blk-pci,drive=root,serial=root"]
    command += ["-drive", f"if=none,id=parcel,format=raw,readonly=on,file={parcel_file}"]
    command += ["-device", "virtio-blk-pci,drive=parcel,serial=parcel"]
    command += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
    command += ["-chardev", f"socket,id=lab,path={channel_path}"]
    command += ["-device", "virtserialport,chardev=lab,name=stockade-lab"]
    return [*command, *console]


class Machine:
    """A host that runs; a context manager that ends it.

    Attributes:
        hello: what the agent told when it was ready.
    """

    def __init__(
        self,
        host: Host,
        image: Image,
        *,
        hardware: Hardware | None = None,
        disk: Path | None = None,
        beside: Iterable[Path] = (),
        console_arguments: list[str] | None = None,
    ) -> None:
        """Prepares a machine; ``boot`` starts it.

        Args:
            disk: an overlay that outlives the machine; without one it gets a throwaway.
            beside: folders to have next to the checkout.
            console_arguments: qemu's, when the serial console shall not go to a file only.

        Raises:
            LabUnavailableError: qemu is not installed.
        """
        for program in (QEMU, "qemu-img", "setpriv"):
            if shutil.which(program) is None:
                raise LabUnavailableError(
                    f"cannot start {host.name}: {program} is not installed; "
                    "install what tests/lab/packages-machine.txt lists"
                )
        self.host = host
        self.hardware = hardware or Hardware()
        self.hello: dict[str, Any] = {}
        self._image = image
        self._exit = contextlib.ExitStack()
        # Short and in /tmp: a socket's path has 107 bytes.
        self._work = Path(
            self._exit.enter_context(tempfile.TemporaryDirectory(prefix="stockade-lab-"))
        )
        self.console = Console(self._work / "console.log")
        self._disk = disk
        self._console_arguments = console_arguments or [
            "-serial", f"file:{self.console.path}",
        ]  # fmt: skip
        parcel.write(self._work / "parcel.tar", cache_directory(), beside)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder = channel.Decoder()
        self._frames: list[tuple[Kind, bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pull_plug()
        self._exit.close()

    def boot(self, deadline_s: float = BOOT_DEADLINE_S) -> None:
        """Switches on, and returns when the checkout is installed and the agent ready.

        Raises:
            MachineEndedError, MachineHungError: it did not come up.
            LabError: the checkout cannot be installed.
        """
        assert self._process is None, "it runs already"
        self._switch_on()
        kind, payload = self._next_frame(time.monotonic() + deadline_s)
        if kind is Kind.FAILED:
            raise LabError(
                f"cannot install the checkout on {self.host.name}: "
                + payload.decode(errors="replace")
            )
        self.hello = json.loads(payload)

    def _switch_on(self) -> None:
        disk, cache_mode = self._disk, "writeback"
        if disk is None:
            disk, cache_mode = self._work / "disk.qcow2", "unsafe"
            if not disk.exists():
                disks.make_overlay(self._image, disk)
        path = self._work / "channel"
        path.unlink(missing_ok=True)
        self._decoder, self._frames = channel.Decoder(), []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(60)
            self._process = subprocess.Popen(
                qemu_command(
                    self.host, self._image, self.hardware, disk=disk, cache_mode=cache_mode,
                    parcel_file=self._work / "parcel.tar", channel_path=path,
                    console=self._console_arguments,
                ),
                stdin=None if "stdio" in " ".join(self._console_arguments) else subprocess.DEVNULL,
            )  # fmt: skip
            end = time.monotonic() + 60
            while not select.select([listener], [], [], _POLL_S)[0]:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise self._ended("did not start")
            self._socket, _ = listener.accept()
        if self._disk is not None:
            self._exit.enter_context(disks.in_use(self._disk, self._process.pid))

    def run(
        self,
        argv: list[str],
        *,
        deadline_s: float,
        output: Callable[[bytes], object],
        directory: str = parcel.GUEST_CHECKOUT,
        environment: dict[str, str] | None = None,
        files: Iterable[str] = (),
    ) -> Ran:
        """Runs a command in the guest as root, in a scope of its own.

        Args:
            output: gets what it prints, as it comes.
            files: paths in the guest to bring back afterwards; absent ones are left out.

        Raises:
            MachineEndedError: the guest is gone.
            MachineHungError: no end before the deadline; the guest lives and may be looked at.
        """
        job = {
            "argv": argv,
            "directory": directory,
            "environment": {**_ENVIRONMENT, **(environment or {})},
            "files": list(files),
        }
        assert self._socket is not None, "it does not run"
        self._socket.sendall(channel.json_frame(Kind.RUN, job))
        deadline = time.monotonic() + deadline_s
        brought: dict[str, bytes] = {}
        while True:
            kind, payload = self._next_frame(deadline)
            if kind is Kind.OUTPUT:
                output(payload)
            elif kind is Kind.FILE:
                path, _, content = payload.partition(b"\0")
                brought[os.fsdecode(path)] = content
            elif kind is Kind.EXIT:
                self.console.look()
                return Ran(json.loads(payload)["status"], brought)

    def power_off(self) -> None:
        """Lets the guest shut down as an operator would; kills it when it takes too long."""
        if self._process is None or self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.sendall(channel.frame(Kind.POWEROFF))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(POWEROFF_DEADLINE_S)
        self.pull_plug()

    def pull_plug(self) -> None:
        """Ends the machine at once. Its disk stays as it is; what was not written is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wait(self) -> None:
        """Returns when the guest has switched itself off."""
        assert self._process is not None, "it does not run"
        # Its agent may go on talking.
        while self._process.poll() is None:
            with contextlib.suppress(MachineHungError, MachineEndedError):
                self._next_frame(time.monotonic() + _POLL_S)

    def _next_frame(self, deadline: float) -> tuple[Kind, bytes]:
        assert self._socket is not None
        while not self._frames:
            if Sign.PANIC in self.console.look():
                raise self._ended("panicked")
            left = deadline - time.monotonic()
            if left <= 0:
                raise MachineHungError(f"{self.host.name} did not answer in time")
            if not select.select([self._socket], [], [], min(left, _POLL_S))[0]:
                continue
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                raise self._ended("is gone")
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    def _ended(self, what: str) -> MachineEndedError:
        # The console's last words may still be on their way.
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        signs = self.console.look()
        sign = next((sign for sign in Sign if sign in signs), None)
        reason = f": {signs[sign]}" if sign else ""
        return MachineEndedError(f"{self.host.name} {what}{reason}", sign)


_ENVIRONMENT: Final = {
    "PATH": "/opt/stockade/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "VIRTUAL_ENV": "/opt/stockade",
    "PYTHONUNBUFFERED": "1",
}
