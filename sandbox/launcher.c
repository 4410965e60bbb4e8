/*
 * The launcher: starts one task, stays as its parent, and writes down how it ended.
 *
 * There is one launcher for each slot before a task is there, a copy of the zygote (zygote.c). It
 * waits on a socket, all done that does not depend on the task, and then does what one message says.
 * All policy is in Python; sandbox/launch_message.py describes message, packets and record.
 *
 * Descriptors at first, all of them open; whatever is above is closed:
 *   0 /dev/null; 1, 2 the slot's output pipe; 3 the channel, a SOCK_SEQPACKET socket; 4 a memfd
 *   with the message, once it is announced; 5 the task's cgroup directory, or /dev/null; 6 the slot's
 *   Landlock ruleset, or /dev/null; 7 the read end of the output pipe, so that the task gets no
 *   SIGPIPE when its reader is restarted; 8 the lock of the slot's uid, which is ours while we live.
 *
 * The task is hostile, and we are its parent, possibly as root until just before it runs:
 *   - nothing that the task can influence is read or executed by us after its start, but signals;
 *   - we are not dumpable, so that a process of our uid can neither trace us nor read our memory;
 *   - we give up root before the task's program runs, and keep CAP_KILL alone, to signal it;
 *   - every signal but SIGKILL and SIGSTOP stays blocked, so none ends us;
 *   - no heap: the message is read once, into one static buffer where nobody else can change it,
 *     and checked as a whole before a single field is acted upon.
 */
#define _GNU_SOURCE
#include "zygote.h"
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FD_CHANNEL = 3, FD_MESSAGE = 4, FD_CGROUP = 5, FD_RULESET = 6, FD_OUTPUT = 7,
       FD_FIRST_FREE = 9 };
enum { RECEIVED_MAX = 4 }; /* with 'G': the record, three for stdio */

/* ---- The message: keep in step with launch_message.py, a test compares the two. ---- */

#define MESSAGE_MAGIC 0x4c4b5453U /* "STKL" */
#define MESSAGE_VERSION 1U
#define MESSAGE_MAX (8U << 20) /* execve(2) takes 6 MiB at most */
#define RLIMITS_MAX 16U
#define FILTER_MAX 4096U /* BPF_MAXINSNS */
#define GROUPS_MAX 1024U
#define STRINGS_MAX (1U << 18) /* for the arguments, and again for the environment */

enum {
    FLAG_CGROUP = 1,      /* descriptor 5 is the cgroup to start the task in */
    FLAG_STDIO = 2,       /* three descriptors came for the task's 0, 1 and 2 */
    FLAG_LANDLOCK = 4,    /* descriptor 6 is the ruleset to put the task under */
    FLAG_CHANGE_USER = 8, /* we are root: run the task as uid, ourselves as init_uid */
    FLAG_SAME_USER = 16,  /* the opposite, said on purpose: neither flag, or both, is an error */
    FLAG_CGROUP_NAMESPACE = 32, /* the task sees its own cgroup as the root; we are root */
    FLAGS_KNOWN = 63
};
/* Little-endian and without padding. After it come, in this order: rlimits, filter, groups, then
 * strings_bytes of strings, each ended by NUL: program, directory, arguments, environment. */
struct header {
    uint32_t magic, version, total_bytes, flags;
    uint32_t uid, gid, init_uid, init_gid;
    uint32_t umask, group_count, rlimit_count, filter_count;
    uint32_t argc, envc, strings_bytes, reserved;
};
struct wire_rlimit { uint64_t resource, soft, hard; };
_Static_assert(sizeof(struct header) == 64 && sizeof(struct wire_rlimit) == 24 &&
                   sizeof(struct sock_filter) == 8, "no padding");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the message is read in place");

/* What can fail, by the names that the record uses. */
#define STEPS(X) \
    X(message) X(clone) X(setsid) X(namespace) X(stdio) X(rlimit) X(groups) X(gid) X(uid) X(capabilities) \
    X(pdeathsig) X(directory) X(descriptors) X(record) X(landlock) X(seccomp) X(exec)
#define STEP_CONSTANT(name) STEP_##name,
#define STEP_TEXT(name) #name,
enum step { STEPS(STEP_CONSTANT) STEP_COUNT };
static const char *const step_names[] = {STEPS(STEP_TEXT)};

/* ---- State. One launcher starts one task, so there is one of each. ---- */

static _Alignas(4096) char message_bytes[MESSAGE_MAX + 1]; /* a full read means: too long */
static struct header header;
static const char *rlimits, *filter, *groups;
static char *strings[2 + 2 * STRINGS_MAX + 2]; /* program, directory, argv, NULL, envp, NULL */

static int received[RECEIVED_MAX];
static size_t received_count;
static int signals_fd; /* a signalfd of SIGCHLD and SIGTERM */
static int control[2]; /* parent's and child's end; see start_task() */
static pid_t launcher; /* ourselves */
static pid_t task;     /* 0 before it is started and once it is reaped: never signalled then */
static bool is_root, is_child, bounding_set_is_empty, relieved;

/* ---- The record and the channel ---- */

/* Tries once, so that no reader sees half a line; gives what is left to write, errno says why. */
static size_t write_record(const char *text, size_t length)
{
    ssize_t written = received_count ? write(received[0], text, length) : 0;
    if (written >= 0)
        errno = ENOSPC; /* why a write to a file stops half-way */
    return length - (written > 0 ? (size_t)written : 0);
}

/* Whoever listens wants to hear at once; whoever does not must not stop us. The record counts. */
static void tell_spawner(char what)
{
    (void)!send(FD_CHANNEL, &what, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static long long nanoseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

#define MICROSECONDS(time) ((time).tv_sec * 1000000LL + (time).tv_usec)
struct child_report { uint32_t step; int32_t error; };

/* The task cannot be started. The child tells its parent and ends. In the parent, a child that
 * exists has not run its program: it is killed, and gets EOF in case that we may not kill it. */
static _Noreturn void fail(enum step step, int error)
{
    struct child_report report = {.step = step, .error = error};
    char line[64];
    int length = snprintf(line, sizeof line, "failed %s %d\n", step_names[step], error);
    if (is_child) {
        (void)!send(control[1], &report, sizeof report, MSG_NOSIGNAL);
        _exit(127);
    }
    (void)write_record(line, (size_t)length);
    tell_spawner('f');
    if (task > 0) {
        kill(task, SIGKILL);
        close(control[0]);
        waitpid(task, NULL, 0);
    }
    _exit(step == STEP_message ? 1 : 0);
}

static void require(bool worked, enum step step)
{
    if (!worked)
        fail(step, errno);
}

/* ---- Before the task is known: all that can be early is, for 'G' to exec is what is felt ---- */

static void set_signal_mask(uint64_t mask)
{
    /* Raw, for the C library hides signals 32 and 33, and those could end us. */
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, sizeof mask);
}

/* Once, for copies of a zygote inherit it, and so do their children. */
static void disarm(void)
{
    static const uint64_t default_action[8]; /* struct sigaction as the kernel has it, all zero */
    set_signal_mask(~UINT64_C(0));
    /* Python leaves SIGPIPE and SIGXFSZ ignored, and what is ignored stays so over exec. For us, who
     * block every signal, these defaults change nothing. */
    for (int number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, default_action, NULL, sizeof(uint64_t));
    /* No process of ours may ever gain a capability by exec. This takes nothing from those we have
     * and still need. EINVAL: past the last one that this kernel knows. */
    for (unsigned long number = 0; prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0; number++);
    bounding_set_is_empty = errno == EINVAL;
}

static void prepare(void)
{
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    /* The child inherits no_new_privs, before any step of its own. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        syscall(SYS_close_range, (unsigned)FD_FIRST_FREE, ~0U, 0) < 0 ||
        (signals_fd = signalfd(-1, &watched, SFD_CLOEXEC)) < FD_FIRST_FREE)
        _exit(1); /* a lower number is one that should have been open: the spawner is mistaken */
    launcher = getpid();
    is_root = geteuid() == 0;
}

/* ---- Waiting for 'G' and reading the message ---- */

static void wait_for_packet(void)
{
    struct pollfd polled[] = {{.fd = FD_CHANNEL, .events = POLLIN},
                              {.fd = signals_fd, .events = POLLIN}};
    struct signalfd_siginfo ignored;
    /* The channel first: a SIGTERM sent after 'G' is meant for the task, and stays pending. One
     * that comes with no task to terminate must not hit a task that starts much later. */
    while (poll(polled, 2, -1) > 0 && !polled[0].revents)
        (void)!read(signals_fd, &ignored, sizeof ignored);
}

/* True if the packet is 'G' with descriptors. Those that came are kept even if it is not, so that
 * the record can say so. Does not return when the spawner has gone without a word. */
static bool receive_go(void)
{
    char data[2]; /* one more than allowed, so that a longer packet shows */
    union {
        char bytes[CMSG_SPACE(RECEIVED_MAX * sizeof(int))];
        struct cmsghdr align;
    } ancillary;
    struct iovec vector = {.iov_base = data, .iov_len = sizeof data};
    struct msghdr packet = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary.bytes,
                            .msg_controllen = sizeof ancillary.bytes};
    ssize_t length = recvmsg(FD_CHANNEL, &packet, MSG_CMSG_CLOEXEC);
    const struct cmsghdr *first = CMSG_FIRSTHDR(&packet);
    if (length < 0)
        _exit(1);
    if (length == 0 && !first)
        _exit(0);
    if (!first || first->cmsg_level != SOL_SOCKET || first->cmsg_type != SCM_RIGHTS)
        return false;
    /* CMSG_SPACE rounds up: one descriptor more than we take may have come, and is ours to see. */
    size_t count = (first->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    received_count = count < RECEIVED_MAX ? count : RECEIVED_MAX;
    memcpy(received, CMSG_DATA(first), received_count * sizeof(int));
    return length == 1 && data[0] == 'G' && count == received_count &&
           !(packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
}

/* An id of -1 means "leave it" to the set*id calls, and 0 would be root: neither can be meant. */
static bool are_ordinary_ids(const char *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t id;
        memcpy(&id, ids + i * sizeof id, sizeof id);
        if (id == 0 || id == UINT32_MAX)
            return false;
    }
    return true;
}

/* The error number of the first thing wrong with the message, 0 if it can be acted upon. Counts are
 * bounded before they are multiplied, so no sum overflows. */
static int read_message(void)
{
    ssize_t size = pread(FD_MESSAGE, message_bytes, sizeof message_bytes, 0);
    if (size < (ssize_t)sizeof header || size > (ssize_t)MESSAGE_MAX)
        return EINVAL;
    memcpy(&header, message_bytes, sizeof header);
    if (header.magic != MESSAGE_MAGIC || header.version != MESSAGE_VERSION ||
        header.total_bytes != (size_t)size || header.flags & ~(uint32_t)FLAGS_KNOWN ||
        header.reserved != 0 || header.umask > 0777 || header.argc < 1 ||
        header.argc > STRINGS_MAX || header.envc > STRINGS_MAX ||
        header.rlimit_count > RLIMITS_MAX || header.filter_count > FILTER_MAX ||
        header.group_count > GROUPS_MAX || header.strings_bytes > MESSAGE_MAX)
        return EINVAL;
    size_t rlimit_bytes = header.rlimit_count * sizeof(struct wire_rlimit);
    size_t filter_bytes = header.filter_count * sizeof(struct sock_filter);
    size_t group_bytes = header.group_count * sizeof(uint32_t);
    rlimits = message_bytes + sizeof header;
    filter = rlimits + rlimit_bytes;
    groups = filter + filter_bytes;
    if (sizeof header + rlimit_bytes + filter_bytes + group_bytes + header.strings_bytes !=
        (size_t)size)
        return EINVAL;

    /* argc and envc are bounded: the table holds them. Its NULLs are there, for it is static. */
    char *text = message_bytes + size - header.strings_bytes;
    size_t before_environment = 2 + header.argc, count = before_environment + header.envc;
    for (size_t i = 0; i < count; i++) {
        char *end = memchr(text, '\0', (size_t)(message_bytes + size - text));
        if (!end)
            return EINVAL;
        strings[i < before_environment ? i : i + 1] = text;
        text = end + 1;
    }
    if (text != message_bytes + size)
        return EINVAL;

    size_t expected = header.flags & FLAG_STDIO ? 4U : 1U;
    bool change_user = header.flags & FLAG_CHANGE_USER;
    if (received_count != expected || change_user == !!(header.flags & FLAG_SAME_USER))
        return EINVAL;
    if (!change_user)
        return header.group_count ? EINVAL : 0;
    if (!is_root)
        return EPERM;
    /* With one uid for both, the task's kill(-1) would end us and its outcome would be lost. */
    bool apart = header.uid != header.init_uid;
    return apart && are_ordinary_ids(message_bytes + offsetof(struct header, uid), 4) &&
           are_ordinary_ids(groups, header.group_count) ? 0 : EINVAL;
}

/* ---- Changing who we are; the same calls in both processes, in the one order that works ---- */

/* Permitted and effective; inheritable becomes empty, and with it the ambient set. */
static bool keep_capabilities(uint32_t kept)
{
    struct __user_cap_header_struct version = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2] = {{.effective = kept, .permitted = kept}};
    return syscall(SYS_capset, &version, sets) == 0;
}

/* The launcher's half. Groups and gid go before the uid, for changing them needs the rights that go
 * with it; real, effective and saved id, else they could be taken back. */
static void become_init(void)
{
    bool change_user = header.flags & FLAG_CHANGE_USER;
    if (change_user) {
        errno = EPERM;
        require(bounding_set_is_empty, STEP_capabilities);
        require(setgroups(0, NULL) == 0, STEP_groups);
        require(setresgid(header.init_gid, header.init_gid, header.init_gid) == 0, STEP_gid);
        require(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0, STEP_capabilities);
        require(setresuid(header.init_uid, header.init_uid, header.init_uid) == 0, STEP_uid);
    }
    require(keep_capabilities(change_user ? 1U << CAP_KILL : 0), STEP_capabilities);
    /* A change of ids resets this to the sysctl fs.suid_dumpable, which may be 1. */
    require(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, STEP_uid);
}

/* ---- The child ---- */
static _Noreturn void become_task(void)
{
    char released;
    is_child = true;
    /* Ours is the only other copy of the parent's end: without it, read() sees the parent die. */
    close(control[0]);
    require(setsid() >= 0, STEP_setsid);
    /* Only now that the child is in its group: the namespace's root is the group one is in. */
    if (header.flags & FLAG_CGROUP_NAMESPACE)
        require(syscall(SYS_unshare, CLONE_NEWCGROUP) == 0, STEP_namespace);
    for (int i = 0; header.flags & FLAG_STDIO && i < 3; i++)
        require(dup2(received[1 + i], i) >= 0, STEP_stdio);
    /* While we are root: raising a hard limit takes CAP_SYS_RESOURCE. */
    for (size_t i = 0; i < header.rlimit_count; i++) {
        struct wire_rlimit wire;
        memcpy(&wire, rlimits + i * sizeof wire, sizeof wire);
        errno = EINVAL; /* for a resource that would not fit the call */
        require(wire.resource < RLIM_NLIMITS &&
                syscall(SYS_prlimit64, 0, wire.resource, &wire.soft, NULL) == 0, STEP_rlimit);
    }
    umask(header.umask);
    if (header.flags & FLAG_CHANGE_USER) {
        const void *aligned = groups;
        require(setgroups(header.group_count, aligned) == 0, STEP_groups);
        require(setresgid(header.gid, header.gid, header.gid) == 0, STEP_gid);
        require(setresuid(header.uid, header.uid, header.uid) == 0, STEP_uid);
    }
    /* Leaving root clears most sets, but not the inheritable one, nor any under some securebits. */
    require(keep_capabilities(0), STEP_capabilities);
    /* After the change of ids, which clears it. The parent may have died before: then it is not our
     * parent any more. It outlasts exec: a task whose launcher is killed dies with it. */
    require(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0, STEP_pdeathsig);
    if (getppid() != launcher)
        _exit(127);
    /* As the task's user: its own rights decide where it may start. */
    require(chdir(strings[1]) == 0, STEP_directory);
    /* All but 0, 1 and 2 closes itself at exec, control[1] too: that is how success shows. */
    require(syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC) == 0, STEP_descriptors);
    /* Not before the parent has given up root and written down that we live. */
    if (read(control[1], &released, 1) != 1)
        _exit(127);
    set_signal_mask(0);
    if (header.flags & FLAG_LANDLOCK)
        require(syscall(SYS_landlock_restrict_self, FD_RULESET, 0) == 0, STEP_landlock);
    /* Last, for it need not allow any call above; no_new_privs, set in prepare(), lets us. */
    if (header.filter_count) {
        struct sock_fprog code = {.len = (unsigned short)header.filter_count,
                                  .filter = (struct sock_filter *)(void *)(uintptr_t)filter};
        require(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &code) == 0, STEP_seccomp);
    }
    execve(strings[0], strings + 2, strings + 2 + header.argc + 1);
    fail(STEP_exec, errno);
}

/* ---- The parent ---- */

/* control[] is one socket pair for both directions. To the child: one byte, "go on to exec". From
 * it: a child_report, or EOF when exec closed its end. The child gets ready while we drop root. */
static void start_task(void)
{
    struct clone_args arguments = {.exit_signal = SIGCHLD, .cgroup = FD_CGROUP};
    struct child_report report;
    char line[64];
    /* Born in its cgroup: none of its forks can escape, and its account starts with it. */
    if (header.flags & FLAG_CGROUP)
        arguments.flags = CLONE_INTO_CGROUP;
    /* A stream gives us a report even when the child ends with its byte unread (ECONNRESET). */
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control) == 0, STEP_clone);
    task = (pid_t)clone_process(&arguments);
    require(task >= 0, STEP_clone);
    if (task == 0)
        become_task();
    become_init();
    int length = snprintf(line, sizeof line, "started %d %lld %lld\n", (int)task,
                          nanoseconds(CLOCK_MONOTONIC), nanoseconds(CLOCK_REALTIME));
    /* A task that nobody could find again must not run. */
    require(write_record(line, (size_t)length) == 0, STEP_record);
    (void)!send(control[0], "", 1, MSG_NOSIGNAL);
    /* While the child is in exec: let go of what is the task's, so that its pipes see their EOF,
     * and of the message's pages. The channel, 7, 8 and the record are kept. */
    close(control[1]);
    syscall(SYS_close_range, 0U, 2U, 0);
    syscall(SYS_close_range, (unsigned)FD_MESSAGE, (unsigned)FD_RULESET, 0);
    for (size_t i = 1; i < received_count; i++)
        close(received[i]);
    madvise(message_bytes, sizeof message_bytes, MADV_DONTNEED);

    /* EOF or an error: it runs, or it was killed first, and then it is reaped like any other. */
    if (recv(control[0], &report, sizeof report, MSG_WAITALL) == sizeof report)
        fail(report.step < STEP_COUNT ? (enum step)report.step : STEP_exec, report.error);
    close(control[0]);
    tell_spawner('s');
}

/* The record is the one copy of the outcome: a full disk makes it late, not lost. */
static void record_end(int status, const struct rusage *usage)
{
    static const struct timespec pause = {.tv_nsec = 100000000};
    char line[256];
    int length = snprintf(line, sizeof line, "ended %d %lld %lld %ld %ld %ld %lld %lld\n", status,
                          MICROSECONDS(usage->ru_utime), MICROSECONDS(usage->ru_stime),
                          usage->ru_maxrss, usage->ru_inblock, usage->ru_oublock,
                          nanoseconds(CLOCK_MONOTONIC), nanoseconds(CLOCK_REALTIME));
    size_t left = (size_t)length;
    while ((left = write_record(line + length - left, left)) > 0 &&
           (errno == ENOSPC || errno == EDQUOT))
        nanosleep(&pause, NULL);
}

/* What was printed lasts while somebody holds its pipe. Once the spawner has hung up that is perhaps
 * only us: we stay until it is read, until a SIGTERM says that it is held, or for five minutes. */
static _Noreturn void leave(void)
{
    struct pollfd spawner = {.fd = FD_CHANNEL}, term = {.fd = signals_fd, .events = POLLIN};
    for (int unread, tenths = 0; tenths < 3000 && !relieved; tenths++)
        if (ioctl(FD_OUTPUT, FIONREAD, &unread) < 0 || unread == 0 || poll(&spawner, 1, 0) != 1 ||
            !(spawner.revents & POLLHUP) || poll(&term, 1, 100) != 0)
            break;
    _exit(0);
}

/* Reaps the task and orphans of its that ended; exits when there is no child left. */
static void reap(void)
{
    struct rusage usage;
    pid_t pid;
    int status;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        if (pid != task)
            continue;
        task = 0; /* from here on its number may be anybody's */
        record_end(status, &usage);
        tell_spawner('e');
    }
    if (pid < 0)
        leave(); /* ECHILD: the task was the last or is reaped already */
}

int main(int argc, char **argv)
{
    disarm();
    if (argc == 2)
        be_zygote(argv[0]); /* returns in each copy */
    prepare();
    wait_for_packet();
    int error = receive_go() ? read_message() : EINVAL;
    if (error)
        fail(STEP_message, error);
    start_task();
    for (;;) {
        struct signalfd_siginfo signal;
        if (read(signals_fd, &signal, sizeof signal) != sizeof signal)
            _exit(1);
        if (signal.ssi_signo == SIGCHLD)
            reap();
        else if (task > 0) {
            /* The task leads its process group, and its number is its own until it is reaped. One
             * that is stopped gets the first signal only with the second. */
            kill(-task, SIGTERM);
            kill(-task, SIGCONT);
        } else
            relieved = true;
    }
}
