/*
 * The zygote: makes launchers, as copies of itself.
 *
 * The spawner is a Python process of some 20 MB, and a copy of that for each slot would cost more
 * than everything else about a slot. This one has a few pages. It stands in the mount (and user)
 * namespace that slots are to start from, so that a copy of that is one flag of its clone3, and the
 * launchers that it makes are children of the spawner, as if that had made them.
 *
 * Descriptors at exec: 0, 1, 2 /dev/null; 3 a SOCK_SEQPACKET socket to the spawner. It says one byte
 * there, and then answers requests until the spawner hangs up. sandbox/zygote_message.py describes
 * them. They come from the spawner alone, so they are checked for mistakes, not for malice.
 */
#define _GNU_SOURCE
#include "zygote.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FD_SPAWNER = 3, FD_FIRST_FREE = 4 };
enum { DESCRIPTORS_MAX = 16, PROGRAM_MAX = 1 << 20 };

#define REQUEST_MAGIC 0x5a4b5453U /* "STKZ" */
#define CLONE_ALLOWED                                                                              \
    (CLONE_INTO_CGROUP | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET)

/* Little-endian and without padding, as is all that follows. */
struct request { uint32_t magic, channel; uint64_t clone_flags; };
/* The program, a memfd: this, the calls, then the text that their pointers point into; its last byte
 * is NUL. */
struct program { uint32_t magic, call_count, text_bytes, reserved; };
/* Bit i of pointers: argument i is an offset into the text. tolerated: errnos that are no failure. */
struct call { int64_t arguments[6]; uint32_t number, pointers, tolerated[2]; };
_Static_assert(sizeof(struct request) == 16 && sizeof(struct program) == 16 &&
                   sizeof(struct call) == 64, "no padding");

static _Alignas(4096) char bytes[PROGRAM_MAX];
static struct request request;
static int received[DESCRIPTORS_MAX]; /* the cgroup, if any, the program, the launcher's 0, 1, ... */
static size_t received_count;

/* How many of the descriptors are the cgroup to start in. */
static size_t count_cgroups(void)
{
    return request.clone_flags & CLONE_INTO_CGROUP ? 1 : 0;
}

/* False when the spawner hung up, or is mistaken. */
static bool receive_request(void)
{
    union {
        char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
        struct cmsghdr align;
    } ancillary;
    struct iovec vector = {.iov_base = &request, .iov_len = sizeof request};
    struct msghdr packet = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary.bytes,
                            .msg_controllen = sizeof ancillary.bytes};
    ssize_t length = recvmsg(FD_SPAWNER, &packet, MSG_CMSG_CLOEXEC);
    const struct cmsghdr *first = CMSG_FIRSTHDR(&packet);
    if (length != sizeof request || packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || !first ||
        first->cmsg_type != SCM_RIGHTS)
        return false;
    received_count = (first->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(received, CMSG_DATA(first), received_count * sizeof(int));
    return request.magic == REQUEST_MAGIC && !(request.clone_flags & ~(uint64_t)CLONE_ALLOWED) &&
           count_cgroups() + 1 + request.channel < received_count;
}

static void answer(int32_t result, int pidfd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } ancillary;
    struct iovec vector = {.iov_base = &result, .iov_len = sizeof result};
    struct msghdr packet = {.msg_iov = &vector, .msg_iovlen = 1};
    memset(&ancillary, 0, sizeof ancillary);
    if (result > 0) {
        packet.msg_control = ancillary.bytes;
        packet.msg_controllen = sizeof ancillary.bytes;
        ancillary.align = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
        memcpy(CMSG_DATA(&ancillary.align), &pidfd, sizeof pidfd);
    }
    if (sendmsg(FD_SPAWNER, &packet, MSG_NOSIGNAL) < 0)
        _exit(1);
}

/* In the copy, until the channel is in its place: nothing can be told. */
static void require(bool worked)
{
    if (!worked)
        _exit(1);
}

static const struct program *read_program(int fd)
{
    const struct program *program = (const void *)bytes;
    ssize_t size = pread(fd, bytes, sizeof bytes, 0);
    require(size >= (ssize_t)sizeof *program && program->magic == REQUEST_MAGIC &&
            program->call_count < PROGRAM_MAX / sizeof(struct call) && program->text_bytes > 0 &&
            sizeof *program + program->call_count * sizeof(struct call) + program->text_bytes ==
                (size_t)size && bytes[size - 1] == '\0');
    return program;
}

/* They become 0, 1, 2, ...; all else is closed. Above all numbers that are overwritten first, so that
 * none is lost on the way. */
static void place_descriptors(int *descriptors, size_t count)
{
    for (size_t i = 0; i < count; i++)
        require((descriptors[i] = fcntl(descriptors[i], F_DUPFD, DESCRIPTORS_MAX)) >= 0);
    for (size_t i = 0; i < count; i++)
        require(dup2(descriptors[i], (int)i) >= 0);
    syscall(SYS_close_range, (unsigned)count, ~0U, 0);
}

/* What the plan says. A failure is told on the channel: the call's number in the program, and errno. */
static void make_calls(const struct program *program)
{
    const struct call *calls = (const void *)(program + 1);
    const char *text = (const char *)(calls + program->call_count);
    for (uint32_t i = 0; i < program->call_count; i++) {
        int64_t a[6];
        for (int j = 0; j < 6; j++)
            a[j] = calls[i].arguments[j] +
                   (calls[i].pointers >> j & 1 ? (int64_t)(intptr_t)text : 0);
        if (syscall((long)calls[i].number, a[0], a[1], a[2], a[3], a[4], a[5]) < 0 &&
            errno != (int)calls[i].tolerated[0] && errno != (int)calls[i].tolerated[1]) {
            char line[32];
            int length = snprintf(line, sizeof line, "!%u %d", i, errno);
            (void)!send((int)request.channel, line, (size_t)length, MSG_NOSIGNAL);
            _exit(1);
        }
    }
}

static void be_copy(char *name)
{
    size_t first = count_cgroups();
    const struct program *program = read_program(received[first]);
    memcpy(name, LAUNCHER_NAME, sizeof LAUNCHER_NAME);
    prctl(PR_SET_NAME, LAUNCHER_NAME, 0, 0, 0);
    place_descriptors(received + first + 1, received_count - first - 1);
    setsid();
    make_calls(program);
}

long clone_process(const struct clone_args *arguments)
{
    long pid = syscall(SYS_clone3, arguments, sizeof *arguments);
    if (pid < 0 && errno == ENOSYS && !(arguments->flags & CLONE_INTO_CGROUP))
        pid = syscall(SYS_clone, arguments->flags | arguments->exit_signal, NULL,
                      (void *)(uintptr_t)arguments->pidfd, NULL, NULL);
    return pid;
}

void be_zygote(char *name)
{
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_NAME, "stockade-zygote", 0, 0, 0);
    syscall(SYS_close_range, (unsigned)FD_FIRST_FREE, ~0U, 0);
    (void)!send(FD_SPAWNER, ".", 1, MSG_NOSIGNAL);
    while (receive_request()) {
        int pidfd = -1;
        struct clone_args arguments = {
            /* With CLONE_PARENT the child's exit signal is ours, which is SIGCHLD. */
            .flags = request.clone_flags | CLONE_PARENT | CLONE_PIDFD,
            .pidfd = (uint64_t)(uintptr_t)&pidfd,
            .cgroup = count_cgroups() ? (uint64_t)(unsigned)received[0] : 0,
        };
        long pid = clone_process(&arguments);
        if (pid == 0) {
            be_copy(name);
            return;
        }
        answer(pid < 0 ? -errno : (int32_t)pid, pidfd);
        syscall(SYS_close_range, (unsigned)FD_FIRST_FREE, ~0U, 0);
    }
    _exit(0);
}
