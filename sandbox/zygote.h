/* What the launcher's program has of the zygote. */
#ifndef STOCKADE_ZYGOTE_H
#define STOCKADE_ZYGOTE_H

#include <linux/sched.h>

/* As long as the two arguments that the zygote is executed with: it is written over them. */
#define LAUNCHER_NAME "stockade-launcher"

/* clone3, or clone where a container's filter hides it: all but a start in a cgroup. The child's pid,
 * 0 in the child, -1 and errno. */
long clone_process(const struct clone_args *arguments);

/* Makes launchers until the spawner hangs up; returns in each of them, and never else.
 * name: argv[0], with argv[1] behind it room for LAUNCHER_NAME. */
void be_zygote(char *name);

#endif
