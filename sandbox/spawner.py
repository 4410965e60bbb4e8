"""The spawner: creates task children, is their parent, enforces deadlines, kills, and reports.

A small single-threaded process of its own that outlives a supervisor that crashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import select
import socket
from collections.abc import Sequence
from typing import Any, Final

from stockade.platform import prctl, sockets
from stockade.platform.errors import StockadeError
from stockade.sandbox import capabilities, protocol, recovery, slot, standby
from stockade.sandbox.attempts import Attempts
from stockade.sandbox.children import Children
from stockade.sandbox.cleaner import Cleaner
from stockade.sandbox.confiner import Confiner
from stockade.sandbox.connection import Connection
from stockade.sandbox.containers import Containers, client_limits
from stockade.sandbox.delegation import find_delegation
from stockade.sandbox.elders import Elders
from stockade.sandbox.engine import RunLine
from stockade.sandbox.engine_task import ContainerTask
from stockade.sandbox.errors import (
    ContainerRefusedError,
    NoEngineError,
    ProtocolError,
)
from stockade.sandbox.limits import Limits
from stockade.sandbox.loop import Loop, Timer
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.places import Places
from stockade.sandbox.pool import Pool
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, RecordFile, SlotRecord, StartedLine
from stockade.sandbox.renewal import Renewal
from stockade.sandbox.service_job import ServiceJobs
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.slot import Slot, SlotMaker
from stockade.sandbox.starting import Request, Starter, read_request
from stockade.sandbox.task import Phase, Task
from stockade.sandbox.tree import Tree
from stockade.sandbox.uid_sweep import UidSweeper
from stockade.sandbox.uids import UidPool
from stockade.sandbox.watchdog import Pace

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
        "CAP_SYS_ADMIN", "CAP_SYS_CHROOT",  # cgroups, mounts, and entering mount namespaces
        "CAP_MKNOD", "CAP_NET_ADMIN",  # a slot's /dev and its loopback
        "CAP_LINUX_IMMUTABLE",  # removes files that a task made immutable
    }
)  # fmt: skip


# How a task ends that is refused before it has a slot.
_REFUSALS: Final[dict[type[StockadeError], ErrorCode]] = {
    ContainerRefusedError: ErrorCode.INVALID_REQUEST,
    NoEngineError: ErrorCode.UNSUPPORTED_TASK_TYPE,
}


class Spawner:
    """One spawner in charge: its tasks, its supervisor's connection, its standby."""

    def __init__(
        self, settings: SpawnerSettings, places: Places, generation: int, code: str
    ) -> None:
        self.settings = settings
        self._code = code
        self.generation = generation
        self.loop = Loop()
        self.tasks: dict[int, Task] = {}
        # Over which connection a task's output pipe went: once is enough for each.
        self._holds_output: dict[int, Connection | None] = {}
        self.children = Children(self.loop)
        self.places = places
        if os.geteuid() == 0:
            prctl.drop_capabilities(CAPABILITIES)
        delegation = find_delegation()
        host = capabilities.probe(places.work_path, delegation)
        self.tree: Tree | None = None
        if host.cgroup_kill:
            self.tree = Tree.set_up(delegation, settings.worker_id, settings.ceilings, host.disk)
        self.controllers = self.tree.controllers if self.tree is not None else frozenset[str]()
        lacks = self.tree.lacks if self.tree is not None else host.lacks
        self.host = dataclasses.replace(host, controllers=self.controllers, lacks=lacks)
        self._degraded = functools.lru_cache(maxsize=64)(
            lambda profile, limits: capabilities.features(profile, limits, self.host, settings.view)
        )
        self.uids: UidPool | None = None
        self._sweeper: UidSweeper | None = None
        if host.root:
            self.uids = UidPool(settings.uid_min, settings.uid_max)
            self._sweeper = UidSweeper(self.loop, self.uids)
        self.elders = Elders(self.loop, places, self._elder_died)
        self.elders.find()
        if self.uids is not None:
            self.uids.before_take = self.elders.look
        self._confiner = confiner = Confiner(settings.view, self.host, places.work_path)
        self.cleaner = Cleaner(
            self.loop, self.places, self.uids, self.children.watch,
            on_set_aside=self._tell_set_aside,
        )  # fmt: skip
        self._attempts = Attempts()
        self._maker = SlotMaker(self.places, self.tree, self.uids, confiner, generation=generation)
        self._pool = Pool(
            self.loop, self._maker, settings.profile, settings.limits,
            discard=self._discard, watch_child=self.children.watch,
            least=settings.pool_min, most=settings.pool_max,
        )  # fmt: skip
        self._starter = Starter(self.places, self.uids, self.controllers, confiner)
        self.containers: Containers | None = None
        if settings.engine is not None:
            self.containers = Containers(
                self.loop, self.children, settings.engine, settings.worker_id,
                hidden=(settings.state_dir, settings.runtime_dir), in_use=self._containers_in_use,
                private_network=settings.view.private_network,
            )  # fmt: skip
        self._service_jobs = ServiceJobs(self.loop, self.children)
        self._standby = standby.Standby(self.loop, self.children, settings, generation)
        self._connection: Connection | None = None
        self._listener: socket.socket | None = None
        self._finishing = False
        self._stopping = False
        self._renewal: Renewal | None = None
        # The elders that were ours to inherit from before the renewal that is under way.
        self._left: tuple[int, ...] = ()
        # Another spawner is in charge by now; we only finish our own tasks.
        self._retired = False
        self._idle: Timer | None = None
        self._watching = False
        self._pace = Pace()

    @property
    def socket_name(self) -> str:
        return f"{self.generation}.{'old' if self._retired else 'sock'}"

    @property
    def socket_path(self) -> str:
        return os.path.join(self.places.spawner_path, self.socket_name)

    def degraded(self, profile: Profile, limits: Limits) -> tuple[str, ...]:
        """What this host cannot enforce of a task's profile and limits."""
        return self._degraded(profile, limits)

    def listen(self) -> None:
        """Opens the way in for supervisors and, where tasks outlive one, starts the standby."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_name, dir_fd=self.places.spawner)
        self._listener = sockets.listen_seqpacket(self.socket_path, 0o600)
        if os.geteuid() != self.settings.supervisor_uid:
            os.chown(self.socket_path, self.settings.supervisor_uid, self.settings.supervisor_gid)
        self._listener.setblocking(False)
        self.loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)
        if self.settings.lifetime is Lifetime.LASTING:
            self._standby.start()
        self._pool.fill()
        # For tasks that were taken over.
        self._watch_memory()
        if self.containers is not None:
            self.containers.sweep.start()
        self._check_idle()

    # The supervisor's connection.

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("cannot accept a supervisor: %s", error)
            return
        _, uid, _ = sockets.peer_credentials(sock)
        if uid not in (0, os.geteuid(), self.settings.supervisor_uid):
            log.warning("refused a connection by uid %d", uid)
            sock.close()
            return
        Connection(self.loop, sock, self._received, self._closed)

    def _closed(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if self.settings.lifetime is Lifetime.EPHEMERAL:
            self._finishing = True
            self._attempts.clear()
            for task in list(self.tasks.values()):
                if task.phase is Phase.OVER:
                    self._forget(task)
                else:
                    # Over at once, or later: it is forgotten by task_over.
                    task.kill(Cause.CANCELLED, "cancelled: the supervisor is gone")
        self._check_idle()

    def _received(self, connection: Connection, message: protocol.Message, fds: list[int]) -> None:
        try:
            if isinstance(message, protocol.Hello):
                self._hello(connection, message)
            elif connection is not self._connection:
                raise ProtocolError(f"cannot take {message.type} before hello")
            else:
                self._request(message, fds)
        except ProtocolError as error:
            log.error("%s", error)
            connection.send(protocol.Refused(str(error)))
            connection.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        if hello.version != protocol.PROTOCOL_VERSION:
            raise ProtocolError(
                f"cannot serve a supervisor of protocol version {hello.version}: this spawner has "
                f"{protocol.PROTOCOL_VERSION}; let its tasks end first, then restart the worker"
            )
        previous, self._connection = self._connection, connection
        if previous is not None:
            previous.close()
        self._finishing = False
        if not self._retired:
            # An end that was begun is taken back, and with it the emptying of the pool.
            self._pool.fill()
        self._check_idle()
        log.info("supervisor connected, version %s", hello.software)
        connection.send(
            protocol.Welcome(
                version=protocol.PROTOCOL_VERSION,
                code=self._code,
                tuning=self.settings.tuning,
                pid=os.getpid(),
                generation=self.generation,
                token=self.places.token,
                tasks=len(self.tasks),
                degraded=self.degraded(Profile.PROCESS, Limits()),
                elders=self.elders.generations,
            )
        )
        if self.cleaner.set_aside:
            self._tell_set_aside()

    def _tell_set_aside(self) -> None:
        names = self.cleaner.set_aside
        self._send(protocol.SetAside(len(names), tuple(names[: protocol.LIST_PAGE])))

    def _request(self, message: protocol.Message, fds: list[int]) -> None:
        match message:
            case protocol.Start():
                self._start(message, fds)
            case protocol.Cancel():
                self._cancel(message.seq)
            case protocol.Acknowledge():
                task = self.tasks.get(message.seq)
                if task is not None and task.phase is Phase.OVER:
                    self._forget(task)
            case protocol.List():
                self._list(message.after)
            case protocol.Job():
                self._tell_job()
            case protocol.Finish():
                self._finishing = True
                self._check_idle()
            case protocol.Renew():
                self._renew(message.tuning)
            case _:
                raise ProtocolError(f"cannot take {message.type} from a supervisor")

    def _tell_job(self) -> None:
        connection = self._connection
        assert connection is not None, "whoever asks is connected"
        self._service_jobs.ask(connection.peer_pid, connection.send)

    def _cancel(self, seq: int) -> None:
        task, attempt = self.tasks.get(seq), self._attempts.get(seq)
        if task is not None:
            task.terminate(Cause.CANCELLED, "cancelled")
        elif attempt is not None:
            self._not_started(attempt.start, ErrorCode.CANCELLED, "cancelled before it started")

    def _send(self, message: protocol.Message, fds: Sequence[int] = ()) -> None:
        if self._connection is not None:
            self._connection.send(message, fds)

    # Starting a task.

    def _start(self, start: protocol.Start, fds: list[int]) -> None:
        known = self.tasks.get(start.seq)
        if known is not None:
            self._tell(known)
            return
        if start.seq in self._attempts:
            return
        if self._retired:
            # Sent before Renewed was read. Whoever sent it asks all of us, and sends it again.
            log.info("not started, another spawner is in charge: task seq=%d", start.seq)
            return
        if not self._may_record(start.seq):
            log.error("not started, another spawner has it: task seq=%d", start.seq)
            return
        try:
            Profile(start.profile)
        except ValueError as error:
            raise ProtocolError(f"cannot start task {start.seq}: {error}") from error
        try:
            self._attempts.begin(start, read_request(start, fds))
        except OSError as error:
            self._not_started(start, ErrorCode.SPAWN_FAILED, f"cannot start the task: {error}")
            return
        self._try(start.seq)

    def _try(self, seq: int) -> None:
        attempt = self._attempts.get(seq)
        if attempt is None:
            return
        start, request = attempt.start, attempt.request
        profile = Profile(start.profile)
        degraded = self.degraded(profile, start.limits)
        line = None
        try:
            # Whatever spoiled a slot that waited may have spoiled the others.
            take = self._maker.make if attempt.tries else self._pool.take
            if start.container is None:
                made = take(profile, start.limits)
            else:
                line = self._container_line(start, request)
                made = take(Profile.PROCESS, client_limits())
        except StockadeError as error:
            if not self._try_again(seq, getattr(error.__cause__, "errno", None)):
                code = _REFUSALS.get(type(error), ErrorCode.SPAWN_FAILED)
                self._not_started(start, code, str(error))
            return
        header = SlotRecord(
            seq=start.seq, slot=made.name, boot_id=self.places.token.split()[0],
            launcher_pid=made.launcher_pid, launcher_start=made.launcher_start,
            cgroup=str(made.groups.path) if made.groups is not None else None,
            uid=made.uid, profile=start.profile, limits=start.limits, own_stdio=start.own_stdio,
            container=None if line is None else line.name,
        )  # fmt: skip
        # Before the launcher hears of the task: whoever comes next must be able to find it.
        record = RecordFile.create(self.places.record, start.seq)
        record.append_slot(header)
        task = self.make_task(made, record, header, degraded)
        self.tasks[start.seq] = task
        self.children.watch(made.launcher_pid, lambda _status: task.launcher_exited())
        task.follow()
        try:
            if line is None or self.containers is None:
                self._starter.hand_over(made, start, request, record.fd)
            else:
                with self.containers.client(self.places, made, line, start) as (client, run):
                    self._starter.hand_over(made, client, run, record.fd)
        except (BrokenPipeError, ConnectionResetError):
            # Its exit is told in a moment, and what it said by then.
            log.warning("the launcher of slot %s is gone before its task came", made.name)
        except (OSError, ValueError) as error:
            task.hear_launcher()
            task.kill(Cause.START_DEADLINE, f"cannot start the task: {error}")
        if not start.own_stdio and task.phase is not Phase.OVER:
            # Should we die now: until the supervisor holds the pipe the launcher stays for it.
            self._send_with_output(protocol.Prepared(start.seq), task)
        self._watch_memory()

    def _try_again(self, seq: int, failure: int | None) -> bool:
        """Whether the start that failed so will be tried again."""
        wait_s = self._attempts.wait_s(seq, failure)
        if wait_s is None:
            return False
        why = os.strerror(failure or 0)
        log.warning("cannot start task seq=%d: %s; trying another slot", seq, why)
        self.loop.call_later(wait_s, lambda: self._try(seq))
        return True

    def _not_started(self, start: protocol.Start, code: ErrorCode, reason: str) -> None:
        """Tells the outcome of a task that has no record."""
        self._attempts.forget(start.seq)
        status = Status.CANCELLED if code is ErrorCode.CANCELLED else Status.FAILED
        outcome = Outcome(
            status, code, reason, profile=start.profile,
            degraded=self.degraded(Profile(start.profile), start.limits),
        )  # fmt: skip
        self._send(protocol.Ended(start.seq, outcome))
        self._check_idle()

    def _container_line(self, start: protocol.Start, request: Request) -> RunLine:
        if self.containers is None:
            raise NoEngineError(
                "cannot run a container: this worker has no engine; install docker or podman,"
                " or set task.container.engine"
            )
        return self.containers.run_line(start, request)

    def make_task(
        self, made: Slot, record: RecordFile, header: SlotRecord, degraded: tuple[str, ...]
    ) -> Task:
        """The task in a slot: a program, or the client of a container."""
        more: dict[str, Any] = {
            "controllers": self.controllers,
            "degraded": degraded,
            "start_deadline_s": self.settings.start_deadline_s,
        }
        if header.container is None or self.containers is None:
            return Task(self.loop, self, made, record, header, **more)
        return ContainerTask(
            self.loop, self, made, record, header, **more,
            engine=self.containers.engine, calls=self.containers.calls,
        )  # fmt: skip

    def _containers_in_use(self) -> set[str]:
        return {
            task.header.container
            for task in self.tasks.values()
            if task.header.container is not None and task.phase is not Phase.OVER
        } | {
            theirs.container
            for theirs in recovery.records_of_others(self)
            if theirs.container is not None
        }

    def _may_record(self, seq: int) -> bool:
        """Whether nobody has the task. A record that says nothing is of one that died in between.

        Who sends us a Start has asked every living spawner first.
        """
        try:
            record = RecordFile.open(self.places.record, seq)
        except FileNotFoundError:
            return True
        if record.read().slot is not None:
            record.close()
            return False
        record.remove()
        return True

    # Renewal.

    def _renew(self, tuning: str) -> None:
        if self._renewal is not None or self._retired:
            self._send(protocol.Renewed("cannot renew the spawner: it is being done already"))
            return
        # Ours again if the other one does not want it. Nobody else does while our socket answers.
        # With the charge goes what elders leave: one alone may inherit it.
        self._left = self.elders.leave()
        self.places.give_up_charge()
        try:
            self._renewal = Renewal(
                self.loop, self.children, self.settings, self.generation + 1,
                tuning=tuning, done=self._renewed,
            )  # fmt: skip
        except OSError as error:
            self._renewed({"error": str(error)})

    def _renewed(self, answer: dict[str, Any]) -> None:
        self._renewal = None
        if "socket" not in answer:
            if not self.places.take_charge():
                log.error("another spawner has taken charge")
            self.elders.find()
            for generation in set(self._left) - set(self.elders.generations):
                recovery.inherit(self, generation)
            error = f"cannot renew the spawner: {answer.get('error')}"
            log.error("%s", error)
            self._send(protocol.Renewed(error))
            return
        log.info("another spawner is in charge now: %s", answer["socket"])
        os.rename(
            self.socket_name, f"{self.generation}.old",
            src_dir_fd=self.places.spawner, dst_dir_fd=self.places.spawner,
        )  # fmt: skip
        self._retired = True
        # Starts that were to be tried again are nobody's now; the supervisor sends them again.
        self._attempts.clear()
        self._pool.close()
        self._standby.dismiss(lambda: None)
        self._send(protocol.Renewed(""))
        self._check_idle()

    def _elder_died(self, generation: int) -> None:
        recovery.inherit(self, generation)
        self._check_idle()

    # What happens to tasks (task.Observer).

    def task_started(self, task: Task) -> None:
        """Tells the supervisor."""
        if task.started is not None:
            self._attempts.forget(task.seq)
            self._send(_started(task, task.started))

    def task_unstarted(self, task: Task) -> None:
        """Tries another slot. The start of an adopted task is the supervisor's to send again."""
        attempt = self._attempts.get(task.seq)
        self._forget(task)
        if attempt is None:
            log.warning("the launcher of slot %s was killed before its task ran", task.slot.name)
            self._send(protocol.Unstarted(task.seq))
        elif not self._try_again(task.seq, errno.ESRCH):
            reason = f"cannot start the task: its launcher was killed {attempt.tries + 1} times"
            self._not_started(attempt.start, ErrorCode.SPAWN_FAILED, reason)
        self._clean(task.slot)

    def launcher_gone(self, task: Task) -> None:
        """The slot can be cleaned up now."""
        self._clean(task.slot)

    def _clean(self, used: Slot) -> None:
        self.cleaner.clean(used.name, used.groups, used.uid, used.uid_lock)

    def task_over(self, task: Task) -> None:
        """Tells the supervisor the outcome and begins the clean-up of the slot."""
        assert task.outcome is not None
        if self._try_again(task.seq, task.start_failure):
            # Nothing of it ran: without a record it is a start that never was.
            self._forget(task)
        else:
            self._attempts.forget(task.seq)
            self._tell(task)
        if task.survivors:
            self.cleaner.put_aside(task.slot.name)
        elif task.lingers:
            self.cleaner.expect(task.slot.name)
        else:
            self._clean(task.slot)
        if isinstance(task, ContainerTask) and task.left_container and self.containers is not None:
            self.containers.sweep.start()
        if (
            self._connection is None
            and self.settings.lifetime is Lifetime.EPHEMERAL
            and task.seq in self.tasks
        ):
            self._forget(task)

    def _send_with_output(
        self, message: protocol.Prepared | protocol.Started | protocol.Ended, task: Task
    ) -> None:
        if (
            task.header.own_stdio
            or task.slot.output_fd < 0
            or self._holds_output.get(task.seq) is self._connection
        ):
            self._send(message)
            return
        try:
            fd = slot.open_output(self.places, task.slot.name)
        except OSError as error:
            log.error("cannot open the output of task seq=%d: %s", task.seq, error)
            self._send(message)
            return
        try:
            self._send(message, (fd,))
            self._holds_output[task.seq] = self._connection
        finally:
            os.close(fd)

    def _tell(self, task: Task) -> None:
        if task.phase is Phase.OVER:
            assert task.outcome is not None
            self._send_with_output(protocol.Ended(task.seq, task.outcome), task)
        elif task.started is not None:
            self._send_with_output(_started(task, task.started), task)

    def _forget(self, task: Task) -> None:
        """The outcome is safe with the supervisor: record and output pipe may go."""
        del self.tasks[task.seq]
        self._holds_output.pop(task.seq, None)
        if task.slot.output_fd >= 0:
            os.close(task.slot.output_fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(task.slot.name, dir_fd=self.places.output)
        task.record.remove()
        self._check_idle()

    def _list(self, after: int) -> None:
        found = sorted(seq for seq in self.tasks if seq > after)
        page = [self.tasks[seq] for seq in found[: protocol.LIST_PAGE]]
        listed: list[protocol.ListedTask] = []
        fds: list[int] = []
        size = 0
        for task in page:
            has_output = task.slot.output_fd >= 0 and not task.header.own_stdio
            entry = protocol.ListedTask(
                seq=task.seq,
                pid=task.started.pid if task.started is not None else 0,
                slot=task.slot.name,
                started_at=task.started.unix if task.started is not None else 0.0,
                has_output=has_output,
                outcome=task.outcome,
            )
            size += protocol.encoded_bytes(entry) + 1
            if size > protocol.MAX_MESSAGE_BYTES - 256 and listed:
                break
            if has_output:
                fds.append(slot.open_output(self.places, task.slot.name))
            listed.append(entry)
        try:
            self._send(protocol.Listed(tuple(listed), len(listed) < len(found)), fds)
        finally:
            for fd in fds:
                os.close(fd)

    # The watchdog, where the kernel does not count memory.

    def _watch_memory(self) -> None:
        if self._watching or all(task.sampler is None for task in self.tasks.values()):
            return
        self._watching = True
        self.loop.call_later(self._pace.delay_s, self._sample)

    def _sample(self) -> None:
        self._watching = False
        live = [task for task in self.tasks.values() if task.phase is not Phase.OVER]
        if live:
            self._watch_memory()
        with self._pace.round():
            for task in live:
                if task.sampler is not None and task.phase in (Phase.RUNNING, Phase.TERMINATING):
                    evidence = task.sampler.sample()
                    if evidence is not None:
                        task.kill(Cause.MEMORY, evidence)

    # Ending.

    def finish(self) -> None:
        """Ends as soon as no task is left."""
        self._finishing = True
        self._check_idle()

    def _check_idle(self) -> None:
        """Sets, or takes back, the end of a spawner that nobody needs."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        wanted = self._connection is not None and not self._finishing and not self._retired
        needed = wanted or bool(self.tasks or self._attempts or self.elders.generations)
        at_once = self._finishing or self._retired
        if not needed and not self._stopping:
            self._idle = self.loop.call_later(0.0 if at_once else IDLE_S, self._stop)

    def _discard(self, unused: Slot) -> None:
        """Takes back a slot that no task had: its launcher exits when its channel closes."""
        unused.let_go()
        os.close(unused.output_fd)
        os.unlink(unused.name, dir_fd=self.places.output)
        self._clean(unused)

    def _stop(self) -> None:
        self._idle = None
        self._pool.close()
        if self.containers is not None:
            self.containers.sweep.stop()
        calls = self.containers is not None and self.containers.calls.pending
        if self.cleaner.busy or calls or self._renewal is not None:
            self._idle = self.loop.call_later(0.02, self._stop)
            return
        self._stopping = True
        self._confiner.close()
        if self._sweeper is not None:
            self._sweeper.finish()
        self._standby.dismiss(self._remove_traces)

    def _remove_traces(self) -> None:
        if self._listener is not None:
            self.loop.unwatch(self._listener.fileno())
            self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_name, dir_fd=self.places.spawner)
        if self.tree is not None and not self._retired:
            self.tree.remove()
        if self._connection is not None:
            self._connection.close()
        log.info("the spawner ends: nothing is left to do")
        self.loop.stop()


def _started(task: Task, line: StartedLine) -> protocol.Started:
    return protocol.Started(task.seq, line.pid, task.slot.name, line.unix)
