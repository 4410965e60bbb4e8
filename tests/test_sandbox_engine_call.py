"""Calls of an engine's client, which are answered whatever happens."""

from __future__ import annotations

from python_process import run_python

# It takes over the process' SIGCHLD, and makes it a subreaper.
SCRIPT = """
import os, resource
from stockade.sandbox.children import Children
from stockade.sandbox.engine_call import AT_ONCE, Calls
from stockade.sandbox.loop import Loop

loop, answers = Loop(), []
calls = Calls(loop, Children(loop), {})
before = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def answered(answer):
    answers.append(answer)
    if len(answers) == 2 * AT_ONCE:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        calls.call(["/bin/echo", "on"], answered)
    elif len(answers) > 2 * AT_ONCE:
        loop.stop()

# Room for one of the two pipes.
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 1, hard))
for _ in range(2 * AT_ONCE):
    calls.call(["/bin/true"], answered)
loop.call_later(10, loop.stop)
loop.run()
assert [answer.status for answer in answers] == [None] * 2 * AT_ONCE + [0], answers
assert "Too many open files" in answers[0].error, answers[0]
assert answers[-1].output == "on\\n", answers[-1]
assert (calls.pending, len(os.listdir("/proc/self/fd"))) == (0, before)
"""


def test_calls_for_which_no_descriptor_is_left_are_answered_and_later_ones_made() -> None:
    run_python(SCRIPT)
