"""The spawner: creates task children, is their parent, enforces deadlines, kills, and reports.

A small single-threaded process of its own that outlives a supervisor that crashes. Here are its
parts, what the supervisor may ask of them, and how it ends.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from stockade.platform import prctl
from stockade.sandbox import protocol, recovery
from stockade.sandbox.attempts import Attempts
from stockade.sandbox.charge import Charge
from stockade.sandbox.equipment import Equipment
from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.limits import Limits
from stockade.sandbox.loop import Timer
from stockade.sandbox.places import Places
from stockade.sandbox.profiles import Profile
from stockade.sandbox.recovery import Succession
from stockade.sandbox.service_job import ServiceJobs
from stockade.sandbox.serving import Serving
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.standby import Standby
from stockade.sandbox.starts import Starts
from stockade.sandbox.tasks import Tasks
from stockade.sandbox.telling import Telling
from stockade.sandbox.uid_sweep import UidSweeper

log = logging.getLogger(__name__)

# Without a task, an unread record and a supervisor for this long, the spawner ends.
IDLE_S: Final = 60.0
# What a root spawner needs, and why; everything else is dropped at its start.
CAPABILITIES: Final = frozenset(
    {
        "CAP_KILL",  # ends tasks that run as other uids
        "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP",  # gives tasks their uid, takes capabilities away
        "CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE",  # work directories of other uids
        "CAP_SYS_RESOURCE",  # raises limits, resets oom_score_adj
        "CAP_SYS_PTRACE",  # reads the memory use of tasks where no controller counts it
        "CAP_SYS_ADMIN",  # cgroups, mounts, namespaces
        "CAP_MKNOD", "CAP_NET_ADMIN",  # a slot's /dev and its loopback
        "CAP_LINUX_IMMUTABLE",  # removes files that a task made immutable
    }
)  # fmt: skip
# How often the end looks whether the clean-up is done.
_END_LOOK_S: Final = 0.02


class Spawner:
    """One spawner in charge.

    Args:
        code: fingerprint of the code that it runs.
    """

    def __init__(
        self, settings: SpawnerSettings, places: Places, generation: int, code: str
    ) -> None:
        self._settings = settings
        self._code = code
        if os.geteuid() == 0:
            prctl.drop_capabilities(CAPABILITIES)
        self._equipment = equipment = Equipment(settings, places, generation)
        self._sweeper: UidSweeper | None = None
        if equipment.uids is not None:
            self._sweeper = UidSweeper(equipment.loop, equipment.uids)
        self._telling = Telling()
        self._attempts = Attempts(
            equipment.loop,
            lambda seq: self._starts.attempt(seq),  # noqa: PLW0108 -- they come after
        )
        self._tasks = Tasks(equipment, self._telling, self._attempts, self._check_idle)
        self._starts = Starts(self._tasks, self._attempts, self._telling)
        self._charge = Charge(
            self._tasks, self._telling, retire=self._retire, changed=self._check_idle
        )
        self._serving = Serving(equipment, self._telling, self)
        self._service_jobs = ServiceJobs(equipment.loop, equipment.children)
        self._standby = Standby(equipment.loop, equipment.children, settings, generation)
        self._finishing = False
        self._stopping = False
        self._idle: Timer | None = None

    @property
    def socket_path(self) -> str:
        """Where it listens."""
        return self._serving.path

    def recover(self, succession: Succession) -> None:
        """Takes over, or ends, what spawners before it left."""
        recovery.recover(self._tasks, self._charge.elders, succession)
        if self._sweeper is not None:
            self._sweeper.take_up()

    def listen(self) -> None:
        """Opens the way in for supervisors and, where tasks outlive one, starts the standby."""
        self._serving.listen()
        if self._settings.lifetime is Lifetime.LASTING:
            self._standby.start()
        self._starts.pool.fill()
        # For tasks that were taken over.
        self._tasks.watch_memory()
        if self._tasks.containers is not None:
            self._tasks.containers.sweep.start()
        self._check_idle()

    def run(self) -> None:
        """Serves until nobody needs it."""
        self._equipment.loop.run()

    # What the supervisor asks (serving.Served).

    def connected(self) -> None:
        """Answers Hello."""
        self._finishing = False
        if not self._charge.is_retired:
            # An end that was begun is taken back, and with it the emptying of the pool.
            self._starts.pool.fill()
        self._check_idle()
        self._telling.send(
            protocol.Welcome(
                version=protocol.PROTOCOL_VERSION,
                code=self._code,
                tuning=self._settings.tuning,
                pid=os.getpid(),
                generation=self._equipment.generation,
                token=self._equipment.places.token,
                tasks=len(self._tasks.by_seq),
                degraded=self._equipment.degraded(Profile.PROCESS, Limits()),
                elders=self._charge.elders.generations,
            )
        )
        if self._tasks.cleaner.set_aside:
            self._tasks.tell_set_aside()

    def disconnected(self) -> None:
        """Goes on; where tasks do not outlive their supervisor, ends them and itself."""
        if self._settings.lifetime is Lifetime.EPHEMERAL:
            self._finishing = True
            self._tasks.end_all()
        self._check_idle()

    def request(self, message: protocol.Message, fds: list[int]) -> None:
        """Does what one message asks.

        Raises:
            ProtocolError: that is not to be done.
        """
        match message:
            case protocol.Start():
                self._starts.start(message, fds)
            case protocol.Cancel():
                self._tasks.cancel(message.seq)
            case protocol.Acknowledge():
                self._tasks.acknowledge(message.seq)
            case protocol.List():
                self._telling.page(self._tasks.by_seq, message.after)
            case protocol.Job():
                self._tell_job()
            case protocol.Finish():
                self.finish()
            case protocol.Renew():
                self._charge.renew(message.tuning)
            case _:
                raise ProtocolError(f"cannot take {message.type} from a supervisor")

    def _tell_job(self) -> None:
        connection = self._telling.connection
        assert connection is not None, "whoever asks is connected"
        self._service_jobs.ask(connection.peer_pid, connection.send)

    # Ending.

    def _retire(self) -> None:
        self._serving.step_back()
        self._starts.close()
        self._standby.dismiss(lambda: None)

    def finish(self) -> None:
        """Ends as soon as no task is left."""
        self._finishing = True
        self._check_idle()

    def _check_idle(self) -> None:
        """Sets, or takes back, the end of a spawner that nobody needs."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        at_once = self._finishing or self._charge.is_retired
        wanted = self._telling.connection is not None and not at_once
        left = self._tasks.by_seq or self._attempts or self._charge.elders.generations
        if not (wanted or left or self._stopping):
            self._idle = self._equipment.loop.call_later(0.0 if at_once else IDLE_S, self._stop)

    def _stop(self) -> None:
        self._idle = None
        self._starts.pool.close()
        containers = self._tasks.containers
        if containers is not None:
            containers.sweep.stop()
        calls = containers is not None and containers.calls.pending
        if self._tasks.cleaner.busy or calls or self._charge.is_renewing:
            self._idle = self._equipment.loop.call_later(_END_LOOK_S, self._stop)
            return
        self._stopping = True
        self._equipment.confiner.close()
        if self._sweeper is not None:
            self._sweeper.finish()
        self._standby.dismiss(self._remove_traces)

    def _remove_traces(self) -> None:
        self._serving.stop_listening()
        if self._equipment.tree is not None and not self._charge.is_retired:
            self._equipment.tree.remove()
        if self._telling.connection is not None:
            self._telling.connection.close()
        log.info("the spawner ends: nothing is left to do")
        self._equipment.loop.stop()
