"""The filter of ``sealed``: what it stops, and that ordinary programs work under it."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from stockade.platform import clone, seccomp, syscalls
from stockade.sandbox import seccomp_policy
from stockade.sandbox.profiles import Profile

MACHINE = os.uname().machine
pytestmark = pytest.mark.skipif(
    MACHINE not in syscalls.MACHINES, reason=f"no table of system calls for {MACHINE}"
)
# An error that no kernel gives for these calls: it can only be the filter's.
MARK = errno.ENOTNAM

UNDER_FILTER = """
import os, sys
from stockade.platform import prctl, seccomp
from stockade.sandbox.profiles import Profile
from stockade.sandbox.seccomp_policy import filter_of
prctl.set_no_new_privs()
seccomp.install(filter_of(Profile(sys.argv.pop(1)), os.uname().machine))
os.execvp(sys.argv[1], sys.argv[1:])
"""

# Makes the calls given as [[number, arguments]...]; prints their errors.
CALLER = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
found = []
for number, arguments in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    result = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    found.append(ctypes.get_errno() if result == -1 else 0)
print(json.dumps(found))
"""


def under_filter(
    *command: str, cwd: Path, profile: Profile = Profile.SEALED, **options
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", UNDER_FILTER, profile, *command],
        check=False, capture_output=True, text=True, timeout=60, cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), "TMPDIR": str(cwd), "LANG": "C.UTF-8"},
        **options,
    )  # fmt: skip


def errors_under_filter(
    calls: list[tuple[str, list[int]]], cwd: Path, profile: Profile = Profile.SEALED
) -> list[int]:
    numbers = syscalls.numbers(MACHINE)
    text = json.dumps([[numbers[name], arguments] for name, arguments in calls])
    done = under_filter(sys.executable, "-c", CALLER, text, cwd=cwd, profile=profile)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def marked() -> seccomp.Policy:
    """The policy with MARK in the place of EPERM."""
    policy = seccomp_policy.sealed()
    deny = seccomp.fail_with(errno.EPERM)
    rules = tuple(
        dataclasses.replace(rule, action=seccomp.fail_with(MARK)) if rule.action == deny else rule
        for rule in policy.rules
    )
    return dataclasses.replace(policy, rules=rules)


def test_every_forbidden_call_is_stopped_by_the_filter_itself(tmp_path):
    names = [
        name
        for names in seccomp_policy.FORBIDDEN.values()
        for name in names
        if name in syscalls.numbers(MACHINE)
    ]
    program = tmp_path / "filter"
    program.write_bytes(seccomp.compile_filter(marked(), MACHINE))
    # As nobody and with arguments that are nothing: were one let through, it could do no harm.
    script = (
        # Imported before the change of user, which may not read the interpreter's files.
        "import ctypes, json, os, sys\nfrom pathlib import Path\n"
        "from stockade.platform import prctl, seccomp\n"
        f"code = Path({str(program)!r}).read_bytes()\n"
        "if os.getuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "prctl.set_no_new_privs()\n"
        "seccomp.install(code)\n"
    )
    numbers = syscalls.numbers(MACHINE)
    text = json.dumps([[numbers[name], [-1] * 6] for name in names])
    done = subprocess.run(
        [sys.executable, "-c", script + CALLER, text],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert dict(zip(names, json.loads(done.stdout), strict=True)) == dict.fromkeys(names, MARK)


def test_what_is_forbidden_by_argument_gets_eperm_and_the_rest_passes(tmp_path):
    high = 0xDEAD << 32
    denied = [
        ("ioctl", [0, seccomp_policy.TIOCSTI, 0]),
        ("ioctl", [0, seccomp_policy.TIOCSTI | high, 0]),
        ("ioctl", [0, seccomp_policy.TIOCLINUX, 0]),
        ("ioctl", [0, seccomp_policy.TIOCLINUX | high, 0]),
        ("personality", [0x0040000]),
        ("personality", [0x0040000 | high]),
        ("socket", [40, 1, 0]),
        ("socket", [40 | high, 1, 0]),
        ("socket", [17, 3, 0]),
        ("socket", [2, 3, 1]),
        ("socket", [2 | high, 3 | high | 0o2000000, 1]),
        ("socket", [10, 3, 58]),
        ("socket", [2, 10, 0]),
        ("socket", [38, 5, 0]),
        ("socket", [16, 3, 12]),
        ("socket", [2, 1, 132]),
        ("socket", [10, 5, 132 | high]),
        ("socket", [2, 6, 33]),
        ("socket", [2, 2, 115]),
        ("socketpair", [30, 5, 0, 0]),
    ]
    for name in vars(clone):
        if name.startswith("CLONE_NEW"):
            denied.append(("unshare", [getattr(clone, name)]))
            if name != "CLONE_NEWTIME":
                denied.append(("clone", [getattr(clone, name) | signal.SIGCHLD, 0, 0, 0, 0]))
    got = errors_under_filter(denied, tmp_path)
    assert list(zip(denied, got, strict=True)) == [(call, errno.EPERM) for call in denied]
    passing = [
        ("personality", [0]),
        ("personality", [0xFFFFFFFF]),
        ("socket", [1, 1, 0]),
        ("socket", [2, 1, 0]),
        ("socket", [2, 1, 262]),
        ("socket", [16, 3, 0]),
        ("unshare", [0x400]),
    ]
    assert errors_under_filter(passing, tmp_path) == [0] * len(passing)
    assert errors_under_filter([("ioctl", [-1, 0x5401, 0])], tmp_path) == [errno.EBADF]


def test_clone3_and_calls_newer_than_the_table_seem_absent(tmp_path):
    text = json.dumps([[syscalls.numbers(MACHINE)["clone3"], [0, 0]], [999, []], [-1, []]])
    done = under_filter(sys.executable, "-c", CALLER, text, cwd=tmp_path)
    assert json.loads(done.stdout) == [errno.ENOSYS] * 3


def build(tmp_path: Path, source: str, *options: str) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler on this host")
    (tmp_path / "program.c").write_text(source)
    program = tmp_path / "program"
    subprocess.run(["gcc", *options, "-o", program, tmp_path / "program.c"], check=True, timeout=60)
    return program


@pytest.mark.skipif(MACHINE != "x86_64", reason="i386 calls exist on x86-64 only")
def test_i386_call_from_a_64_bit_program_is_killed(tmp_path):
    program = build(
        tmp_path,
        'int main(void) { int r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20));'
        " return r > 0 ? 0 : 1; }\n",
    )
    alone = subprocess.run([program], check=False, timeout=10)
    if alone.returncode != 0:
        pytest.skip("this kernel takes no i386 calls")
    assert under_filter(str(program), cwd=tmp_path).returncode == -signal.SIGSYS


FOREIGN_ATTRIBUTES = r"""
#include <fcntl.h>
#include <stdio.h>
static int i386(int number, int first, int second) {
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(first), "c"(second), "d"(0),
                     "S"(0), "D"(0) : "memory");
    return result;
}
int main(void) {
    int fd = open(".", O_RDONLY | O_DIRECTORY);
    /* getpid; FSSETXATTR, SETFLAGS of 64 and of 32 bits; file_setattr; ptrace(PTRACE_SEIZE) */
    printf("%d %d %d %d %d %d\n", i386(20, 0, 0) > 0, i386(54, fd, 0x401C5820),
           i386(54, fd, 0x40086602), i386(54, fd, 0x40046602), i386(469, fd, 0),
           i386(26, 0x4206, 1));
    return 0;
}
"""


@pytest.mark.skipif(MACHINE != "x86_64", reason="i386 calls exist on x86-64 only")
@pytest.mark.parametrize("profile", [Profile.PROCESS, Profile.PRIVATE])
def test_i386_calls_are_under_the_same_rules_where_they_are_allowed(tmp_path, profile):
    program = build(tmp_path, FOREIGN_ATTRIBUTES)
    alone = subprocess.run([program], check=False, timeout=10, capture_output=True, text=True)
    if not alone.stdout.startswith("1 "):
        pytest.skip("this kernel takes no i386 calls")
    done = under_filter(str(program), cwd=tmp_path, profile=profile)
    assert done.stdout.split() == ["1", *[str(-errno.EPERM)] * 5]


@pytest.mark.parametrize("profile", Profile)
def test_attributes_of_files_cannot_be_changed_in_any_profile(tmp_path, profile):
    high = 0xDEAD << 32
    denied = [("file_setattr", [-100, 0, 0, 0, 0])]
    for command in (0x401C5820, 0x40086602, 0x40046602):
        denied += [("ioctl", [0, command, 0]), ("ioctl", [0, command | high, 0])]
    got = errors_under_filter(denied, tmp_path, profile)
    assert list(zip(denied, got, strict=True)) == [(call, errno.EPERM) for call in denied]
    # What reads them passes the filter.
    reads = [("ioctl", [-1, command, 0]) for command in (0x801C581F, 0x80086601)]
    assert errors_under_filter(reads, tmp_path, profile) == [errno.EBADF] * 2


@pytest.mark.skipif(MACHINE != "x86_64", reason="x32 calls exist on x86-64 only")
def test_x32_call_is_killed(tmp_path):
    program = build(
        tmp_path,
        "#include <unistd.h>\nint main(void) { syscall(0x40000000 | 39); return 0; }\n",
    )
    assert subprocess.run([program], check=False, timeout=10).returncode == 0
    assert under_filter(str(program), cwd=tmp_path).returncode == -signal.SIGSYS


@pytest.mark.parametrize("machine", sorted(syscalls.MACHINES))
def test_filter_fits_the_launchers_message_and_is_short(machine):
    program = seccomp_policy.filter_of(Profile.SEALED, machine)
    assert len(program) % struct.calcsize("=HBBI") == 0
    assert len(program) // 8 < 300


BASH = """
set -e
x=$(printf 'b\\na\\n' | sort | tr '\\n' ' ')
diff <(echo same) <(echo same)
( exit 3 ) || y=$?
sleep 0 & wait $!
echo "$x$y"
"""

PYTHON = """
import concurrent.futures, multiprocessing, socket, subprocess, threading
def double(n):
    return 2 * n
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(double, range(100))) == 9900
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert sum(pool.map(double, range(10))) == 90
assert subprocess.run("echo hi | cat", shell=True, capture_output=True).stdout == b"hi\\n"
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        client.sendall(b"x")
        assert peer.recv(1) == b"x"
        peer.close()
assert socket.getaddrinfo("localhost", 80)
assert socket.if_nameindex()
print("python works")
"""

NODE = """
const { Worker } = require("worker_threads");
const { execSync } = require("child_process");
const http = require("http");
const os = require("os");
if (!Object.keys(os.networkInterfaces())) throw 1;
const server = http.createServer((_, answer) => answer.end("ok")).listen(0, "127.0.0.1", () => {
  http.get({ port: server.address().port, host: "127.0.0.1" }, (answer) => {
    answer.resume().on("end", () => {
      server.close();
      new Worker("require('worker_threads').parentPort.postMessage(1)", { eval: true })
        .on("message", () => console.log("node works", execSync("echo there").toString().trim()));
    });
  });
});
"""

JAVA = """
public class Hello {
  public static void main(String[] arguments) throws Exception {
    Thread thread = new Thread(() -> System.out.print("java "));
    thread.start();
    thread.join();
    Process child = new ProcessBuilder("echo", "works").inheritIO().start();
    System.out.flush();
    System.exit(child.waitFor());
  }
}
"""


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this host")


def output_of(*command: str, cwd: Path) -> str:
    done = under_filter(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_bash_works(tmp_path):
    assert output_of("bash", "-c", BASH, cwd=tmp_path) == "a b 3"


def test_python_works(tmp_path):
    assert output_of(sys.executable, "-c", PYTHON, cwd=tmp_path) == "python works"


def test_node_works(tmp_path):
    needs("node")
    assert output_of("node", "-e", NODE, cwd=tmp_path) == "node works there"


def test_java_works(tmp_path):
    needs("javac")
    (tmp_path / "Hello.java").write_text(JAVA)
    subprocess.run(["javac", "Hello.java"], cwd=tmp_path, check=True, timeout=60)
    command = ("java", "-XX:+UseG1GC", "-Xmx64m", "-cp", ".", "Hello")
    assert output_of(*command, cwd=tmp_path) == "java works"


def test_git_works(tmp_path):
    needs("git")
    script = """
set -e
git init -q . && echo x > file && git add file
git -c user.name=x -c user.email=x@example.org commit -qm one
git clone -q . copy && git gc -q && git -C copy log --format=%s
"""
    assert output_of("bash", "-c", script, cwd=tmp_path) == "one"


def test_curl_works_with_a_server_of_the_task(tmp_path):
    needs("curl")
    script = """
import functools, http.server, subprocess, threading
class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://localhost:{server.server_address[1]}/"
print(subprocess.run(["curl", "-sS", "--noproxy", "*", url], capture_output=True, text=True).stdout)
server.shutdown(); server.server_close()
"""
    assert output_of(sys.executable, "-c", script, cwd=tmp_path) == "ok"


def test_gcc_works(tmp_path):
    needs("gcc")
    (tmp_path / "a.c").write_text('#include <stdio.h>\nint main(void) { return !puts("built"); }\n')
    assert output_of("bash", "-c", "gcc -pipe -o a a.c && ./a", cwd=tmp_path) == "built"
