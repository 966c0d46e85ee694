/* A wall clock that jumps, for a process started with this library in LD_PRELOAD.

   Seconds to add are a 64-bit number in the file that KVD_CHAOS_CLOCK names; whoever
   writes it moves the clock of all who run under this. Only the wall clock: clocks
   that count from the machine's start cannot jump, and do not here. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shared;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("KVD_CHAOS_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        shared = page;
}

int clock_gettime(clockid_t id, struct timespec *at)
{
    int failed = (int)syscall(SYS_clock_gettime, id, at);
    if (!failed && shared && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        at->tv_sec += *shared;
    return failed;
}

time_t time(time_t *result)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (result)
        *result = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    at->tv_sec = fine.tv_sec;
    at->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
