"""The conformance kit: judges a worker, any worker, by the wire alone.

    python tests/conformance.py --link http|grpc [--port PORT] [--deadline SECONDS]

It is a scheduler. Start it, start a worker that has it as its scheduler and runs shell tasks, and
it plays the sequences of the protocol with the first worker that registers: one line each, and the
status is 1 when one of them shows a fault. A rule is a function from the messages that came to
complaints; a sequence sends something, waits, and asks the rules.
"""

from __future__ import annotations

import argparse
import itertools
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from both_links import SCHEDULERS, make_scheduler
from recording_scheduler import TERMINAL, Answer, Message, RecordingScheduler

from stockade.supervisor.wire.messages import (
    ACK_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)

# The fields that every scheduler knows, by message, and their types. A worker may send more.
FIELDS: dict[str, dict[str, type]] = {
    REGISTER_PATH: {
        "worker_id": str, "hostname": str, "ip": str, "callback_url": str, "grpc_addr": str,
        "protocol": str, "max_concurrency": int, "labels": dict,
    },
    HEARTBEAT_PATH: {
        "worker_id": str, "current_load": int, "running_tasks": int, "report_unix_milli": int,
    },
    ACK_PATH: {"schedule_instance_id": str, "worker_id": str},
    REPORT_PATH: {
        "schedule_instance_id": str, "worker_id": str, "status": str, "error_code": str,
        "error_message": str,
    },
}  # fmt: skip
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)")
MESSAGE_BYTES_MAX = 65_535
ID_CHARACTERS_MAX = 64


# Rules.


def fields_are_spelt_right(messages: Iterable[Message]) -> list[str]:
    """Each message has the fields that schedulers read, under their names and with their types."""
    complaints = []
    for message in messages:
        for name, kind in FIELDS.get(message.path, {}).items():
            value = message.body.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                complaints.append(f"{message.kind}: {name} is {value!r}, not of {kind.__name__}")
        if len(str(message.body.get("worker_id"))) > ID_CHARACTERS_MAX:
            complaints.append(f"{message.kind}: worker_id is over {ID_CHARACTERS_MAX} characters")
        if len(str(message.body.get("error_message", "")).encode()) > MESSAGE_BYTES_MAX:
            complaints.append(f"{message.kind}: error_message is over {MESSAGE_BYTES_MAX} bytes")
    return complaints


def reports_say_what_their_status_asks(messages: Iterable[Message]) -> list[str]:
    """``running`` has neither errors nor times; a terminal report has both times, in UTC."""
    complaints = []
    for message in messages:
        body = message.body
        if message.path != REPORT_PATH:
            continue
        if message.kind == "running":
            complaints += [
                f"running: {name} is {body[name]!r}"
                for name in ("error_code", "error_message", "started_at", "finished_at")
                if body.get(name)
            ]
        elif message.kind in TERMINAL:
            complaints += [
                f"{message.kind}: {name} is {body.get(name)!r}, no time of RFC 3339 in UTC"
                for name in ("started_at", "finished_at")
                # What never ran has no times.
                if message.kind != "cancelled" and not RFC3339.fullmatch(str(body.get(name)))
            ]
        else:
            complaints.append(f"{message.kind!r} is no status")
    return complaints


def told_in_order(messages: Sequence[Message], instance_id: str) -> list[str]:
    """A task that ran is told as ack, running, one terminal report, and then nothing."""
    kinds = [message.kind for message in messages if message.id == instance_id]
    told = [kind if kind not in TERMINAL else "terminal" for kind in kinds]
    if told == ["ack", "running", "terminal"]:
        return []
    return [f"{instance_id} was told as {kinds}"]


def registered_then_beaten(messages: Sequence[Message]) -> list[str]:
    """Registration comes first, and a heartbeat at once after each."""
    kinds = [m.kind for m in messages if m.path in (REGISTER_PATH, HEARTBEAT_PATH)]
    complaints = []
    if kinds[:1] != ["register"]:
        complaints.append(f"the first was {kinds[:1]}, not a registration")
    if any(pair == ("register", "register") for pair in itertools.pairwise(kinds)):
        complaints.append("no heartbeat followed a registration")
    return complaints


# Sequences.


class Judge:
    """Plays with the first worker that registers.

    Args:
        scheduler: what the worker has for its scheduler.
        deadline_s: the longest that any answer of the worker may take.
    """

    def __init__(self, scheduler: RecordingScheduler, deadline_s: float = 30.0) -> None:
        self.scheduler = scheduler
        self.deadline_s = deadline_s
        registration = scheduler.wait_for(lambda s: s.workers, deadline_s)[0]
        self.worker = scheduler.callback(registration)
        # So that a worker can be judged again, which remembers the ids of before.
        self._run = secrets.token_hex(4)

    def id(self, name: str) -> str:
        return f"task-{name}-{self._run}"

    def send(self, instance_id: str, payload: str, **fields: Any) -> list[str]:
        """Dispatch: a complaint unless it is accepted."""
        status, answer = self.scheduler.dispatch(
            self.worker, schedule_instance_id=instance_id, payload=payload, **fields
        )
        return [] if status < 300 else [f"{instance_id} was answered {status}: {answer}"]

    def ended(self, instance_id: str, status: str, output: str | None = None) -> list[str]:
        """Wait for the terminal report: a complaint when it is another one."""
        report = self.scheduler.terminal_report(instance_id, self.deadline_s)
        complaints = []
        if report["status"] != status:
            complaints.append(f"{instance_id} ended as {report['status']}, not {status}")
        if output is not None and report["error_message"].strip() != output:
            complaints.append(f"{instance_id} has {report['error_message']!r}, not {output!r}")
        return complaints

    # What is played, each to complaints.

    def ack_running_and_end_come_in_this_order(self) -> list[str]:
        one, two = self.id("order-1"), self.id("order-2")
        complaints = self.send(one, "echo hello") + self.send(two, "exit 3")
        complaints += self.ended(one, "success", "hello") + self.ended(two, "failed")
        # What a worker tells too much, it has told by the end of another task.
        later = self.id("order-3")
        complaints += self.send(later, "sleep 1") + self.ended(later, "success")
        messages = self.scheduler.messages
        return complaints + told_in_order(messages, one) + told_in_order(messages, two)

    def fields_are_spelt_as_schedulers_read_them(self) -> list[str]:
        messages = self.scheduler.messages
        return fields_are_spelt_right(messages) + reports_say_what_their_status_asks(messages)

    def registration_comes_first_and_a_heartbeat_at_once(self) -> list[str]:
        self.scheduler.wait_for(
            lambda s: any(m.kind == "heartbeat" for m in s.messages), self.deadline_s
        )
        return registered_then_beaten(self.scheduler.messages)

    def absent_and_null_fields_mean_empty(self) -> list[str]:
        bare, null = self.id("absent"), self.id("null")
        empty = dict.fromkeys(
            ("image", "timeout_seconds", "retry_count", "shard_no", "shard_total",
             "idempotency_key", "scheduler_url", "task_id"),
        )  # fmt: skip
        complaints = self.send(bare, "echo bare") + self.send(null, "echo null", **empty)
        return (
            complaints + self.ended(bare, "success", "bare") + self.ended(null, "success", "null")
        )

    def a_timeout_of_zero_means_the_default(self) -> list[str]:
        task = self.id("zero")
        return self.send(task, "echo ran", timeout_seconds=0) + self.ended(task, "success", "ran")

    def task_types_are_trimmed_and_of_any_case(self) -> list[str]:
        complaints = []
        for number, task_type in enumerate(("SHELL", " Shell ")):
            task = self.id(f"case-{number}")
            complaints += self.send(task, "echo ran", task_type=task_type)
            complaints += self.ended(task, "success", "ran")
        return complaints

    def a_retry_is_taken_before_the_report_is_answered(self) -> list[str]:
        first, retry = self.id("7"), self.id("7-retry-1")
        # Longer than the retry may take, whatever the machine: who waits for it is found.
        self.scheduler.misbehave(
            Answer(delay_s=self.deadline_s + 1),
            path=REPORT_PATH,
            matching=lambda m: m.id == first and m.kind != "running",
            times=100,
        )
        complaints = self.send(first, "exit 1") + self.ended(first, "failed")
        # Its answer is still to come.
        complaints += self.send(retry, "echo again", retry_count=1)
        complaints += self.ended(retry, "success", "again")
        self.scheduler.behave()
        messages = self.scheduler.messages
        return complaints + told_in_order(messages, first) + told_in_order(messages, retry)

    def a_repeated_id_runs_once(self) -> list[str]:
        task, other = self.id("twice"), self.id("after-twice")
        complaints = []
        for _ in range(3):
            complaints += self.send(task, "sleep 0.3")
        complaints += self.ended(task, "success") + self.send(task, "sleep 0.3")
        # What a second run would tell, it would have told before the end of another task.
        complaints += self.send(other, "sleep 1") + self.ended(other, "success")
        return complaints + told_in_order(self.scheduler.messages, task)

    def a_cancel_ends_a_task_and_one_of_an_unknown_id_is_answered(self) -> list[str]:
        task = self.id("cancelled")
        complaints = self.send(task, "sleep 60")
        self.scheduler.wait_for(lambda s: "running" in s.kinds(task), self.deadline_s)
        status, answer = self.scheduler.cancel(self.worker, task)
        if (status, answer) != (200, {"status": "cancelled"}):
            complaints.append(f"the cancel was answered {status}: {answer}")
        complaints += self.ended(task, "cancelled")
        status, answer = self.scheduler.cancel(self.worker, self.id("unknown"))
        if status != 200 or "error" not in answer:
            complaints.append(f"the cancel of an unknown id was answered {status}: {answer}")
        return complaints

    def a_forgotten_worker_registers_again(self) -> list[str]:
        before = len(self.scheduler.workers)
        self.scheduler.forget_workers()
        self.scheduler.wait_for(lambda s: len(s.workers) > before, self.deadline_s)
        return registered_then_beaten(self.scheduler.messages)


SEQUENCES: tuple[Callable[[Judge], list[str]], ...] = (
    Judge.registration_comes_first_and_a_heartbeat_at_once,
    Judge.ack_running_and_end_come_in_this_order,
    Judge.absent_and_null_fields_mean_empty,
    Judge.a_timeout_of_zero_means_the_default,
    Judge.task_types_are_trimmed_and_of_any_case,
    Judge.a_retry_is_taken_before_the_report_is_answered,
    Judge.a_repeated_id_runs_once,
    Judge.a_cancel_ends_a_task_and_one_of_an_unknown_id_is_answered,
    Judge.a_forgotten_worker_registers_again,
    # Last: of all that the others brought.
    Judge.fields_are_spelt_as_schedulers_read_them,
)


def judged(judge: Judge, sequence: Callable[[Judge], list[str]]) -> list[str]:
    """The complaints of one sequence; an answer that never comes is one."""
    try:
        return sequence(judge)
    except AssertionError as error:
        return [str(error)]
    finally:
        judge.scheduler.behave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--link", choices=list(SCHEDULERS), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=60.0)
    arguments = parser.parse_args()
    faults = 0
    with make_scheduler(arguments.link, port=arguments.port) as scheduler:
        print(f"scheduler: {scheduler.url}", flush=True)
        judge = Judge(scheduler, arguments.deadline)
        print(f"worker:    {judge.worker}", flush=True)
        for sequence in SEQUENCES:
            complaints = judged(judge, sequence)
            faults += bool(complaints)
            title = sequence.__name__.replace("_", " ")
            print(f"{'fault' if complaints else 'good '}  {title}", flush=True)
            for complaint in complaints:
                print(f"         {complaint}", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
