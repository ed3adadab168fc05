/* The first process of the system in the emulator: runs each program that is named, one after the other, with its
 * argument, says how each ended, and switches off. There is no other process and no disk. */

#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>

static int status_of(const char *program, const char *argument)
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, argument, (char *)NULL);
        perror(program);
        _exit(127);
    }
    waitpid(child, &status, 0);
    return status;
}

int main(void)
{
    static const char *const programs[][2] = {PROGRAMS}; /* {"/program", "argument"}, … */
    mount("proc", "/proc", "proc", 0, NULL);             /* where the sanitizers look themselves up */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);         /* they were looked for outside already */
    for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++) {
        int status = status_of(programs[i][0], programs[i][1]);
        printf("%s ended with %d\n", programs[i][0], status);
    }
    fflush(stdout);
    sync();
    return reboot(RB_POWER_OFF);
}
