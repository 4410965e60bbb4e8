"""The hostile tasks of ``stockade doctor --prove``, in the spirit of those that the tests run."""

from __future__ import annotations

from typing import Final

from stockade.platform import syscalls
from stockade.sandbox.outcome import ErrorCode
from stockade.sandbox.profiles import Feature, Profile
from stockade.supervisor.cli.hostile import END, REACHED, Hostile, python

_FORBIDDEN: Final = {
    "io_uring_setup": (8, 0), "keyctl": (0, -4, 1), "add_key": (0, 0, 0, 0, -4), "bpf": (5, 0, 0),
    "perf_event_open": (0, 0, -1, -1, 0), "userfaultfd": (0,), "mount": (0, 0, 0, 0, 0),
    "process_vm_readv": (1, 0, 0, 0, 0, 0), "setns": (-1, 0), "open_tree": (-1, 0, 0),
    "open_by_handle_at": (-1, 0, 0), "unshare": (0x10000000,),
}  # fmt: skip


def hostile_tasks(machine: str) -> tuple[Hostile, ...]:
    """The table, for a machine as ``os.uname().machine`` has it."""
    number = syscalls.numbers(machine) if machine in syscalls.MACHINES else {}
    calls = {name: (number[name], *given) for name, given in _FORBIDDEN.items() if name in number}
    found = [*_LIMITED, *_ALONE, *_BESIDE]
    found += [
        Hostile(
            "system-calls",
            f"make {len(calls)} dangerous system calls",
            python(f"""
import errno
libc = ctypes.CDLL(None, use_errno=True)
for name, call in {calls}.items():
    # A child: one of them may change what the next one finds.
    if os.fork() == 0:
        failed = libc.syscall(*call) < 0
        if not failed or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            print('{REACHED}' + name, flush=True)
        os._exit(0)
    os.wait()
print('{END}')
"""),
            by="the system call filter",
            held_by=(Feature.SECCOMP,),
            weakest=Profile.SEALED,
        )
    ]
    if machine == "x86_64":
        found.append(_FOREIGN)
    return tuple(found)


# What limits hold.
_LIMITED: Final = (
    Hostile(
        "endless-loop",
        "run past its deadline, ignoring SIGTERM",
        "trap '' TERM INT HUP; end=$((SECONDS+8)); while ((SECONDS<end)); do :; done\n"
        "echo REACHED its own end; echo end",
        by="runtime_max, then SIGKILL",
        held_by=("runtime_max",),
        ends=ErrorCode.TIMEOUT,
        limits={"runtime_max": 1.0, "timeout_stop": 0.5},
    ),
    Hostile(
        "cpu",
        "use more CPU than cpu_quota 5%",
        python("""
started = time.monotonic()
for _ in range(2):
    if os.fork() == 0:
        while time.monotonic() < started + 2: pass
        os._exit(0)
for _ in range(2): os.wait()
used = sum(os.times()[2:4])
share = used / (time.monotonic() - started)
if share > 0.12: print(f'REACHED {share:.0%} of a CPU')
print('end')
"""),
        by="cpu.max",
        held_by=("cpu_quota",),
        limits={"cpu_quota": 0.05},
    ),
    Hostile(
        "memory",
        "take 200M of memory with memory_max 64M",
        python("x = bytearray(200 << 20)\ntime.sleep(3)\nprint('REACHED 200M')\nprint('end')"),
        by="memory_max",
        held_by=("memory_max",),
        ends=ErrorCode.OOM_KILLED,
        has_coarser=True,
    ),
    Hostile(
        "memory-in-sum",
        "take 96M in four processes with memory_max 64M",
        python("""
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(24 << 20)
        time.sleep(3)
        os._exit(0)
for _ in range(4): os.wait()
print('REACHED 96M')
print('end')
"""),
        by="memory_max",
        held_by=("memory_max",),
        ends=ErrorCode.OOM_KILLED,
        has_coarser=True,
    ),
    Hostile(
        "processes",
        "start 60 processes with tasks_max 24",
        python("""
import signal
children = []
try:
    while len(children) < 60:
        pid = os.fork()
        if pid == 0:
            time.sleep(9)
            os._exit(0)
        children.append(pid)
    print('REACHED 60')
except BlockingIOError: pass
for pid in children: os.kill(pid, signal.SIGKILL)
print('end')
"""),
        by="tasks_max",
        held_by=("tasks_max",),
        has_coarser=True,
    ),
    Hostile(
        "sparse-file",
        "make a file of 1T with limit_fsize 12M",
        "truncate -s 1T f 2>/dev/null && echo REACHED 1T; rm -f f; echo end",
        by="limit_fsize",
        held_by=("limit_fsize",),
    ),
    Hostile(
        "disk",
        "write 40M to its work directory with workdir_max 16M",
        "n=0; for i in 1 2 3 4 5 6 7 8; do\n"
        "  head -c 5M /dev/zero >b$i && n=$((n+5)); done 2>/dev/null\n"
        "((n < 40)) || echo REACHED 40M; echo end",
        by="workdir_max",
        held_by=("workdir_max",),
    ),
    Hostile(
        "files",
        "make 2,000 files with workdir_inodes_max 1,000",
        python("""
try:
    for i in range(2000): open(f'f{i}', 'w').close()
    print('REACHED 2,000 files')
except OSError: pass
print('end')
"""),
        by="workdir_inodes_max",
        held_by=("workdir_max",),
    ),
)

# What any profile takes from a task.
_ALONE: Final = (
    Hostile(
        "daemon",
        "leave a daemon behind that has left its session",
        "setsid sleep 20 </dev/null >/dev/null 2>&1 &\nsleep 0.3; echo end",
        by="the kill of all that a task started",
        held_by=(Feature.CGROUP_KILL, Feature.NAMESPACES),
        has_coarser=True,
    ),
    Hostile(
        "runaway",
        "fork, exit and leave its session again and again",
        python("""
print('end', flush=True)
ends = time.monotonic() + 8
while time.monotonic() < ends:
    if os.fork(): os._exit(0)
    os.setsid()
"""),
        by="the kill of all that a task started",
        held_by=(Feature.CGROUP_KILL, Feature.NAMESPACES),
        has_coarser=True,
    ),
    Hostile(
        "untidy",
        "leave a work directory that is hard to remove",
        python("""
for name in (b'-rf', b'a\\nb', b'\\xff\\xfe', b'x' * 255): open(name, 'w').close()
os.makedirs('closed/inner')
os.chmod('closed/inner', 0)
os.chmod('closed', 0)
for _ in range(400):
    os.mkdir('d')
    os.chdir('d')
print('end')
"""),
        by="the clean-up",
    ),
    Hostile(
        "privileges",
        "have root's uid, a capability, or a program that gives them",
        "[[ $(id -u) != 0 ]] || echo REACHED uid 0\n"
        "while read -r key value; do case $key in\n"
        "  Cap[IPEA]*) ((16#$value == 0)) || echo REACHED $key $value;;\n"
        "  NoNewPrivs:) ((value)) || echo REACHED setuid programs;;\n"
        "esac; done </proc/self/status\n"
        "cp /bin/bash b; chmod 4755 b\n"
        "[[ $(./b -p -c 'id -u') = $(id -u) ]] || echo REACHED setuid\n"
        "echo end",
        by="no capabilities, no_new_privs",
    ),
    Hostile(
        "descriptors",
        "find a descriptor of the worker's",
        python("""
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        print('REACHED', os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass
print('end')
"""),
        by="close_range before the task runs",
    ),
    Hostile(
        "parent",
        "trace its parent, read its memory and environment",
        python("""
parent = os.getppid()
if ctypes.CDLL(None).ptrace(0x4206, parent, 0, 0) == 0: print('REACHED ptrace')
for name in ('mem', 'environ'):
    try:
        open(f'/proc/{parent}/{name}', 'rb').close()
        print('REACHED', name)
    except OSError: pass
print('end')
"""),
        by="a launcher that cannot be traced",
    ),
    Hostile(
        "kernel-settings",
        "write kernel settings and devices, raise its priority",
        "for f in /proc/sysrq-trigger /proc/sys/kernel/{core_pattern,hostname} "
        "/proc/sys/vm/drop_caches /dev/kmsg /dev/mem; do\n"
        "  [[ -e $f ]] && (: >>$f) 2>/dev/null && echo REACHED $f; done\n"
        "renice -n -5 $$ >/dev/null 2>&1 && echo REACHED a higher priority\n"
        "(echo -500 >/proc/self/oom_score_adj) 2>/dev/null && echo REACHED oom_score_adj\n"
        "echo end",
        by="no capabilities",
    ),
    Hostile(
        "own-limits",
        "raise its own limits in cgroup files, make a group",
        "mount=$(awk '$3 == \"cgroup2\" {print $2; exit}' /proc/mounts)\n"
        "own=$(sed -n 's/^0:://p' /proc/self/cgroup)\n"
        'for d in "$mount/" "$mount$own"; do [[ $mount ]] || break\n'
        "  for f in {memory,pids,cpu}.max cgroup.procs; do\n"
        '    [[ -e $d/$f ]] && (: >>"$d/$f") 2>/dev/null && echo REACHED $d/$f; done\n'
        '  mkdir "$d/$MARK" 2>/dev/null && { rmdir "$d/$MARK"; echo REACHED a group in $d; }\n'
        "done; echo end",
        by="another uid, hidden cgroup files",
        held_by=(Feature.OWN_UID, Feature.NAMESPACES),
    ),
)

# What reaches for others: the task beside it, the worker, the host, the network.
_BESIDE: Final = (
    Hostile(
        "signal-neighbour",
        "signal the task beside it",
        python("""
pid = int(os.environ['NEIGHBOUR_PID'])
try:
    os.kill(pid, 0)
    print('REACHED', pid)
except OSError: pass
print('end')
"""),
        by="another uid, another pid namespace",
        held_by=(Feature.OWN_UID, Feature.NAMESPACES),
    ),
    Hostile(
        "read-neighbour",
        "read memory, environment, files of the task beside it",
        python("""
proc = f"/proc/{os.environ['NEIGHBOUR_PID']}/"
mark = os.environ['NEIGHBOUR_MARK'].encode()
try:
    if b'MARK=' + mark + b'\\0' in open(proc + 'environ', 'rb').read():
        print('REACHED its environment', flush=True)
        open(proc + 'mem', 'rb').close()
        print('REACHED its memory')
except OSError: pass
try:
    open(os.environ['NEIGHBOUR_DIRECTORY'] + '/secret').close()
    print('REACHED its files')
except OSError: pass
print('end')
"""),
        by="another uid, namespaces",
        held_by=(Feature.OWN_UID, Feature.NAMESPACES),
    ),
    Hostile(
        "shared-memory",
        "find the shared memory of the task beside it",
        python("""
mark = os.environ['NEIGHBOUR_MARK']
if ctypes.CDLL(None).shmget(int(mark[-6:], 16), 0, 0) >= 0: print('REACHED System V memory')
if os.path.exists('/dev/shm/' + mark): print('REACHED POSIX memory')
print('end')
"""),
        by="an ipc namespace, a /dev/shm of its own",
        held_by=(Feature.NAMESPACES,),
        weakest=Profile.PRIVATE,
    ),
    Hostile(
        "host-processes",
        "see processes that are not its own",
        "for p in /proc/[0-9]*; do\n"
        "  [[ $(<$p/comm) = stockade-spawne* ]] && echo REACHED the spawner, ${p##*/}\n"
        "done 2>/dev/null; echo end",
        by="a pid namespace, a /proc of its own",
        held_by=(Feature.NAMESPACES,),
        weakest=Profile.PRIVATE,
    ),
    Hostile(
        "host-files",
        "find the worker's files, and what others have in /tmp",
        "ls -d \"$HOST_DIRECTORY\" /tmp/* /var/tmp/* 2>/dev/null |\n"
        "  head -n 3 | sed 's/^/REACHED /'; echo end",
        by="hidden directories, a /tmp of its own",
        held_by=(Feature.NAMESPACES,),
        weakest=Profile.PRIVATE,
    ),
    Hostile(
        "host-sockets",
        "connect to a socket that the host offers to all its users",
        python("""
try:
    socket.socket(socket.AF_UNIX).connect(os.environ['HOST_SOCKET'])
    print('REACHED', os.environ['HOST_SOCKET'])
except OSError: pass
print('end')
"""),
        by="a /run and a /tmp of its own",
        held_by=(Feature.NAMESPACES,),
        weakest=Profile.PRIVATE,
    ),
    Hostile(
        "devices",
        "find devices other than null, random and the like",
        "for d in $(find /dev -type b -o -type c); do case $d in\n"
        "  /dev/null|/dev/zero|/dev/full|/dev/random|/dev/urandom|/dev/tty|/dev/pts/*);;\n"
        "  *) echo REACHED $d;; esac; done 2>/dev/null | head -n 3; echo end",
        by="a /dev of its own",
        held_by=(Feature.NAMESPACES,),
        weakest=Profile.PRIVATE,
    ),
    Hostile(
        "network",
        "connect to the host, and to the task beside it",
        python("""
def reach(what, family, address):
    found = socket.socket(family)
    found.settimeout(3)
    try:
        found.connect(address)
        print('REACHED', what)
    except OSError: pass
reach('the host', socket.AF_INET, ('127.0.0.1', int(os.environ['HOST_PORT'])))
reach('its port', socket.AF_INET, ('127.0.0.1', int(os.environ['NEIGHBOUR_PORT'])))
reach('its abstract socket', socket.AF_UNIX, '\\0' + os.environ['NEIGHBOUR_MARK'])
print('end')
"""),
        by="a network of its own",
        held_by=(Feature.PRIVATE_NETWORK,),
        weakest=Profile.SEALED,
    ),
    Hostile(
        "sockets",
        "open raw, packet, vsock, netlink and crypto sockets",
        python("""
for name, given in (('raw', (2, 3, 1)), ('packet', (17, 3, 0)), ('vsock', (40, 1, 0)),
                    ('kernel events', (16, 3, 15)), ('crypto', (38, 5, 0))):
    try:
        socket.socket(*given).close()
        print('REACHED', name)
    except OSError: pass
print('end')
"""),
        by="the system call filter",
        held_by=(Feature.SECCOMP,),
        weakest=Profile.SEALED,
    ),
)  # fmt: skip

# mov eax, 20 (getpid); int 0x80; ret: the 32-bit way into the kernel, past filters that only look
# at numbers.
_FOREIGN: Final = Hostile(
    "foreign-calls",
    "make a 32-bit system call",
    python("""
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
if call() > 0: print('REACHED the kernel')
print('end')
"""),
    by="the system call filter",
    held_by=(Feature.SECCOMP,),
    weakest=Profile.SEALED,
    ends=ErrorCode.SIGNALED,
)
