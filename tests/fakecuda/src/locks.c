/* Locks between processes, on the library's own file: the driver's, and one of each device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "fake.h"

#define DRIVER MAX_DEVICES /* bytes of the file: a device's number, then the driver */

static pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER; /* of threads: they share the file's lock */
static int file = -1;

/* Lock or unlock a byte of the library's file; false where it would have to wait and may not. */
static bool set(int type, int byte, bool wait) {
    if (file < 0) {
        Dl_info found;
        if (!dladdr((void *)set, &found) ||
            (file = open(found.dli_fname, O_RDWR | O_CLOEXEC)) < 0) {
            fprintf(stderr, "fakecuda (a test double): cannot open its own file for a lock\n");
            _exit(70);
        }
    }
    struct flock range = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return !fcntl(file, wait ? F_OFD_SETLKW : F_OFD_SETLK, &range);
}

static void occupy(long microseconds) {
    pthread_mutex_lock(&own);
    set(F_WRLCK, DRIVER, true);
    nap(microseconds);
    set(F_UNLCK, DRIVER, true);
    pthread_mutex_unlock(&own);
}

void occupy_driver(size_t bytes, long ns_per_kib) {
    if (bytes && ns_per_kib > 0) occupy((long)(bytes / 1024) * ns_per_kib / 1000);
}

void await_driver(void) {
    if (settings.pin_ns > 0 || settings.unpin_ns > 0) occupy(0);
}

bool take_device(int number) {
    pthread_mutex_lock(&own);
    bool taken = set(F_WRLCK, number, false);
    pthread_mutex_unlock(&own);
    return taken;
}

void give_device(int number) {
    pthread_mutex_lock(&own);
    set(F_UNLCK, number, false);
    pthread_mutex_unlock(&own);
}

void locks_in_child(void) {
    pthread_mutex_init(&own, NULL);
    file = -1; /* the parent's stays the parent's */
}
