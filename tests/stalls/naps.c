/* Naps around the calls by which processes hear of each other, in threads that run no Python, too.
 *
 * `make test-stalls` builds this as a library and preloads it into every process of the tests.
 * sitecustomize.py makes Python's own calls nap; ZeroMQ's threads call the C library only.
 * Now and then a thread is slow for a while, and others are not: then what was sent first by one
 * way arrives after what was sent later by another.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static uint64_t dice(void) /* 53 random bits, of xorshift64* */
{
    static _Thread_local uint64_t state;
    if (!state) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = (uint64_t)now.tv_nsec * 2654435761u ^ (uint64_t)getpid() << 32 ^ (uintptr_t)&state;
        state |= 1;
    }
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717u >> 11;
}

static double chance(void) { return (double)dice() / 9007199254740992.0; }

static void nap(void)
{
    static _Thread_local unsigned left, slow;
    if (!left--) {
        left = 200;
        slow = chance() < 0.15;
    }
    double p = chance() / (slow ? 8 : 1), seconds;
    if (p < 0.0001)
        seconds = 0.8 + 1.4 * chance();
    else if (p < 0.001)
        seconds = 0.05 + 0.35 * chance();
    else if (p < 0.1)
        seconds = 0.006 * chance();
    else
        return;
    int before = errno;
    struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    nanosleep(&time, NULL);
    errno = before;
}

#define DROWSY(type, name, parameters, arguments)             \
    type name parameters                                      \
    {                                                         \
        static type(*real) parameters;                        \
        if (!real)                                            \
            real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        nap();                                                \
        type result = real arguments;                         \
        nap();                                                \
        return result;                                        \
    }

DROWSY(ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
DROWSY(ssize_t, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))
DROWSY(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
DROWSY(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
DROWSY(int, connect, (int fd, const struct sockaddr *place, socklen_t size), (fd, place, size))
DROWSY(int, accept4, (int fd, struct sockaddr *place, socklen_t *size, int flags),
       (fd, place, size, flags))
DROWSY(int, poll, (struct pollfd *fds, nfds_t count, int patience), (fds, count, patience))
DROWSY(int, epoll_wait, (int fd, struct epoll_event *events, int count, int patience),
       (fd, events, count, patience))
