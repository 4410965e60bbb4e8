"""The spawner's children, each told of once."""

from __future__ import annotations

from python_process import run_python

# It takes over the process' SIGCHLD, and makes it a subreaper.
SCRIPT = """
import os, time
from stockade.sandbox.children import Children
from stockade.sandbox.loop import Loop

loop, told = Loop(), []
children = Children(loop)

def ended(status):
    told.append(status)
    if len(told) == 1:
        raise OSError("cannot write down how it ended")
    loop.stop()

for _ in range(2):
    children.watch(os.posix_spawn("/bin/true", ["true"], {}), ended)
for pid in list(children._callbacks):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
loop.call_later(10, loop.stop)
loop.run()
assert told == [0, 0], told
"""


def test_all_that_end_at_once_are_told_of_also_when_the_first_is_not_taken_well() -> None:
    run_python(SCRIPT)
