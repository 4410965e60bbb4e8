"""In a lab machine: a worker under load, until the plug is pulled. tests/power_loss.py runs it.

Says one line for each thing that the other side, outside of the machine, must know:

    damaged NAME            the journal was set aside
    report ID STATUS CODE   a terminal report arrived
    settled                 nothing is owed any more of what was before
    sent ID, accepted ID    a dispatch is on its way, and was answered so
    doubled ID              a task was executed more than once
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from recording_scheduler import TERMINAL, Answer, RecordingScheduler
from worker_process import STOCKADE, eventually

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.wire.messages import REPORT_PATH

# On the disk that outlives the machine, and in memory that does not.
STATE = Path("/var/lib/stockade-power")
RUNTIME = Path("/run/stockade-power")
SCHEDULER_PORT = 18080
WORKER = "http://127.0.0.1:18081"
IN_FLIGHT = 6
START_S = 300.0
# A report counts for us when its line is out of the machine: only then is it answered.
ANSWER_DELAY_S = 0.5

_lock = threading.Lock()


def say(*words: str) -> None:
    """One line, out at once."""
    with _lock:
        os.write(1, (" ".join(words) + "\n").encode())


def start_worker() -> None:
    """Start it and return when it serves."""
    for directory in (STATE, RUNTIME, STATE / "runs"):
        directory.mkdir(parents=True, exist_ok=True)
    (STATE / "runs").chmod(0o1777)
    STATE.chmod(0o711)
    (STATE / "stockade.toml").write_text(
        f"""
        [worker]
        id = "power"
        state_dir = "{STATE}/state"
        runtime_dir = "{RUNTIME}"
        on_unsupported = "degrade"
        [http]
        listen = "127.0.0.1:18081"
        scheduler = "http://127.0.0.1:{SCHEDULER_PORT}"
        [profile]
        name = "process"
        [report]
        retry_min = "50ms"
        retry_max = "500ms"
        """
    )
    with open(STATE / "worker.log", "ab") as log:
        subprocess.Popen(
            [*STOCKADE, "worker", "--config", str(STATE / "stockade.toml")], stdout=log, stderr=log
        )

    def serves() -> bool:
        try:
            return bool(ControlClient(RUNTIME / "control.sock").get("/v1/status"))
        except StockadeError:
            return False

    eventually(serves, START_S)


def settle() -> None:
    """Until nothing is owed of what the last life left, and say what was not in order."""

    def idle() -> bool:
        status = ControlClient(RUNTIME / "control.sock").get("/v1/status")
        return not (status["unfinished_tasks"] or status["undelivered_reports"])

    eventually(idle, START_S)
    for path in (STATE / "state" / "worker").glob("*damaged*"):
        say("damaged", path.name)
    # Each execution leaves a file, whichever uid it has.
    runs = [path.name.partition(".")[0] for path in (STATE / "runs").iterdir()]
    for name in {name for name in runs if runs.count(name) > 1}:
        say("doubled", name)
    say("settled")


def tell_reports(scheduler: RecordingScheduler) -> None:
    """One line for each terminal report, as it comes."""
    told = 0
    while True:
        messages = scheduler.messages
        for message in messages[told:]:
            if message.kind in TERMINAL:
                say("report", message.id, message.kind, message.body["error_code"] or "-")
        told = len(messages)
        time.sleep(0.02)


def dispatch_for_ever(scheduler: RecordingScheduler, prefix: str, sender: int) -> None:
    """Tasks of all lengths up to some seconds, one after the other."""
    for number in itertools.count():
        name = f"{prefix}-{sender}-{number}"
        pause_s = (number * 37 + sender * 11) % 100 / 50
        mark = f"{STATE}/runs/{name}.$EPOCHREALTIME"
        script = f"run={mark}; : > $run; sync $run; sleep {pause_s}"
        say("sent", name)
        status, _ = scheduler.dispatch(WORKER, schedule_instance_id=name, payload=script)
        if status == 202:
            say("accepted", name)
        time.sleep(0.1)


def main(prefix: str) -> None:
    with RecordingScheduler(SCHEDULER_PORT) as scheduler:
        scheduler.misbehave(Answer(delay_s=ANSWER_DELAY_S), path=REPORT_PATH)
        threading.Thread(target=tell_reports, args=(scheduler,), daemon=True).start()
        start_worker()
        settle()
        if prefix == "end":
            return
        for sender in range(IN_FLIGHT):
            threading.Thread(
                target=dispatch_for_ever, args=(scheduler, prefix, sender), daemon=True
            ).start()
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
    # The worker and its tasks go with the machine.
    os._exit(0)
