/*
 * The least that a start like Stockade's can cost on this machine: the same processes, the same
 * messages between them, the same cgroup and uid, and nothing else.
 *
 *     hops GROUP RECORD FD
 *
 * A message on the SOCK_SEQPACKET socket FD is a program's arguments, each ended by NUL. As the
 * spawner we write it to RECORD and let the launcher go that waits in a group of its own; it starts
 * the program in another group, as another uid, waits for it, writes to RECORD how it ended, and says
 * so. When that group is empty, which the kernel says, the wait status is the answer. Then the groups
 * are removed and the next launcher is made. GROUP, in a cgroup v2 hierarchy, is made here and removed.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MESSAGE_MAX = 4096, ARGUMENTS_MAX = 64, TASK_UID = 1877999999 };

struct slot {
    char group[512], init[520], task[520];
    int task_fd, events, channel;
    pid_t launcher;
};

static char *const environment[] = {"PATH=/usr/bin:/bin", "HOME=/nonexistent", NULL};
static int record;

static void require(int holds, const char *what) {
    if (!holds)
        err(1, "%s", what);
}

static int open_path(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC);
    require(fd >= 0, path);
    return fd;
}

static pid_t clone_into(int group) {
    struct clone_args arguments = {
        .flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (unsigned)group};
    pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    require(pid >= 0, "clone3");
    return pid;
}

static void run(char *message, size_t length) {
    char *arguments[ARGUMENTS_MAX + 1];
    size_t count = 0;
    for (char *at = message; at < message + length && count < ARGUMENTS_MAX; at += strlen(at) + 1)
        arguments[count++] = at;
    arguments[count] = NULL;
    setsid();
    require(setresgid(TASK_UID, TASK_UID, TASK_UID) == 0, "setresgid");
    require(setresuid(TASK_UID, TASK_UID, TASK_UID) == 0, "setresuid");
    execve(arguments[0], arguments, environment);
    _exit(127);
}

static void launch(int channel, int task_fd) {
    char message[MESSAGE_MAX];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ssize_t length = recv(channel, message, sizeof message, 0);
    if (length <= 0)
        _exit(0);
    pid_t pid = clone_into(task_fd);
    if (pid == 0)
        run(message, (size_t)length);
    int status;
    require(waitpid(pid, &status, 0) == pid, "waitpid");
    require(write(record, &status, sizeof status) == sizeof status, "write the record");
    require(send(channel, &status, sizeof status, MSG_NOSIGNAL) == sizeof status, "send");
    _exit(0);
}

static void make(struct slot *slot, const char *group) {
    static int number;
    int pair[2];
    snprintf(slot->group, sizeof slot->group, "%s/%d", group, ++number);
    snprintf(slot->init, sizeof slot->init, "%s/init", slot->group);
    snprintf(slot->task, sizeof slot->task, "%s/task", slot->group);
    require(mkdir(slot->group, 0755) == 0, slot->group);
    require(mkdir(slot->init, 0755) == 0, slot->init);
    require(mkdir(slot->task, 0755) == 0, slot->task);
    int init_fd = open_path(slot->init, O_RDONLY | O_DIRECTORY);
    slot->task_fd = open_path(slot->task, O_RDONLY | O_DIRECTORY);
    char events[540];
    snprintf(events, sizeof events, "%s/cgroup.events", slot->task);
    slot->events = open_path(events, O_RDONLY);
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    slot->channel = pair[0];
    slot->launcher = clone_into(init_fd);
    if (slot->launcher == 0) {
        close(pair[0]);
        launch(pair[1], slot->task_fd);
    }
    close(pair[1]);
    close(init_fd);
}

static void wait_until_empty(const struct slot *slot) {
    struct pollfd look = {slot->events, POLLPRI, 0};
    char text[128];
    for (;;) {
        ssize_t length = pread(slot->events, text, sizeof text - 1, 0);
        require(length > 0, "cgroup.events");
        text[length] = '\0';
        if (strstr(text, "populated 0"))
            return;
        require(poll(&look, 1, -1) >= 0, "poll");
    }
}

static void drop(struct slot *slot) {
    close(slot->channel); /* ends a launcher that had no message */
    require(waitpid(slot->launcher, NULL, 0) == slot->launcher, "waitpid");
    close(slot->events);
    close(slot->task_fd);
    require(rmdir(slot->init) == 0, slot->init);
    require(rmdir(slot->task) == 0, slot->task);
    require(rmdir(slot->group) == 0, slot->group);
}

int main(int argc, char **argv) {
    char message[MESSAGE_MAX];
    struct slot slot;
    if (argc != 4)
        errx(2, "usage: hops GROUP RECORD FD");
    int requests = atoi(argv[3]);
    record = open(argv[2], O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
    require(record >= 0, argv[2]);
    require(mkdir(argv[1], 0755) == 0, argv[1]);
    make(&slot, argv[1]);
    for (;;) {
        ssize_t length = recv(requests, message, sizeof message, 0);
        if (length <= 0)
            break;
        require(write(record, message, (size_t)length) == length, "write the record");
        require(send(slot.channel, message, (size_t)length, MSG_NOSIGNAL) == length, "send");
        int status;
        require(recv(slot.channel, &status, sizeof status, 0) == sizeof status, "the launcher");
        wait_until_empty(&slot);
        require(send(requests, &status, sizeof status, MSG_NOSIGNAL) == sizeof status, "answer");
        drop(&slot);
        make(&slot, argv[1]);
    }
    drop(&slot);
    unlink(argv[2]);
    require(rmdir(argv[1]) == 0, argv[1]);
    return 0;
}
