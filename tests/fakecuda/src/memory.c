/* Device memory: allocations, handles between processes, virtual memory management.
 *
 * The bytes of an allocation are a memfd. What a program gets is an address at which
 * nothing is mapped (PROT_NONE), so that host code which touches device memory crashes;
 * the fake itself reaches the bytes through a second mapping.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api.h"
#include "fake.h"

#define HANDLE_MAGIC 0x66616b65u
#define FIRST_DESCRIPTOR 500 /* out of the way of a program's own */

typedef struct {
    uint32_t magic;
    int32_t pid, fd;
    uint32_t user;             /* effective */
    uint64_t inode, bytes;
    unsigned char uuid[16];
    int32_t code, sticky;      /* how opening it fails */
} IpcHandle;

typedef struct Reservation {
    CUdeviceptr base;
    size_t bytes;
    struct Reservation *next;
} Reservation;

static Region *regions;
static Reservation *reservations;
static uint64_t next_id = 1;

static size_t rounded(size_t bytes) { return (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }

/* 2 MiB aligned. */
CUdeviceptr take_addresses(size_t bytes) {
    size_t wide = rounded(bytes) + GRANULARITY;
    char *start = mmap(NULL, wide, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    uintptr_t base = ((uintptr_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    if (base > (uintptr_t)start) munmap(start, base - (uintptr_t)start);
    uintptr_t end = base + rounded(bytes), all = (uintptr_t)start + wide;
    if (all > end) munmap((void *)end, all - end);
    return base;
}

void give_addresses(CUdeviceptr base, size_t bytes) { munmap((void *)base, rounded(bytes)); }

static Backing *backing_of_file(int fd, size_t bytes, int ordinal) {
    void *alias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) return NULL;
    Backing *backing = calloc(1, sizeof *backing);
    *backing = (Backing){.fd = fd, .bytes = bytes, .alias = alias, .references = 1,
                         .ordinal = ordinal};
    return backing;
}

static Backing *backing_make(size_t bytes, int ordinal, const char *name) {
    int low = memfd_create(name, MFD_CLOEXEC);
    if (low < 0) return NULL;
    int fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR);
    if (fd < 0) fd = low;
    else close(low);
    Backing *backing = ftruncate(fd, (off_t)bytes) ? NULL : backing_of_file(fd, bytes, ordinal);
    if (!backing) close(fd);
    return backing;
}

void backing_release(Backing *backing) {
    if (--backing->references) return;
    munmap(backing->alias, backing->bytes);
    if (backing->fd >= 0) close(backing->fd);
    free(backing);
}

void unpin(Backing *backing) {
    if (!backing) return;
    pthread_mutex_lock(&lock);
    backing_release(backing);
    pthread_mutex_unlock(&lock);
}

Region *region_at(CUdeviceptr address) {
    for (Region *region = regions; region; region = region->next)
        if (address >= region->base && address - region->base < region->bytes) return region;
    return NULL;
}

bool region_pads(CUdeviceptr address) {
    for (Region *region = regions; region; region = region->next)
        if (address >= region->base && address - region->base < rounded(region->bytes)) return true;
    for (Reservation *place = reservations; place; place = place->next)
        if (address >= place->base && address - place->base < place->bytes) return true;
    return false;
}

static Region *region_add(CUdeviceptr base, size_t bytes, Backing *backing, RegionKind kind) {
    Region *region = calloc(1, sizeof *region);
    *region = (Region){.base = base, .bytes = bytes, .backing = backing, .kind = kind,
                       .access = ACCESS_READWRITE, .id = next_id++, .context = current,
                       .next = regions};
    regions = region;
    return region;
}

static void region_drop(Region *region) {
    Region **link = &regions;
    while (*link != region) link = &(*link)->next;
    *link = region->next;
    if (region->kind != REGION_VMM) give_addresses(region->base, region->bytes);
    if (region->kind == REGION_ALLOC) region->context->used -= rounded(region->bytes);
    backing_release(region->backing);
    free(region);
}

void drop_memory(struct Context *context) {
    for (Region *region = regions, *next; region; region = next) {
        next = region->next;
        if (region->context == context) region_drop(region);
    }
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    ENTER("cuMemAlloc", NEEDS_CONTEXT);
    if (bytes == 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = OUT_OF_MEMORY;
    if (rounded(bytes) <= DEVICE_BYTES && current->used <= DEVICE_BYTES - rounded(bytes)) {
        CUdeviceptr base = take_addresses(bytes);
        Backing *backing = base ? backing_make(bytes, current->ordinal, "fakecuda-memory") : NULL;
        if (backing) {
            /* Fresh device memory holds whatever was there before, not zeros. */
            if (!settings.instant) memset(backing->alias, 0xd5, bytes);
            region_add(base, bytes, backing, REGION_ALLOC);
            current->used += rounded(bytes);
            *address = base;
            result = SUCCESS;
        } else if (base) give_addresses(base, bytes);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
    ENTER("cuMemFree", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = context_drain(current); /* as the driver does: free waits */
    Region *region = region_at(address);
    if (!result && (!region || region->base != address || region->kind != REGION_ALLOC))
        result = INVALID_VALUE;
    if (!result) region_drop(region);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    ENTER("cuMemGetAddressRange", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    Region *region = region_at(address);
    if (region && region->kind == REGION_VMM && !(region->access && settings.vmm_ranges))
        region = NULL; /* not before cuMemSetAccess */
    if (region && base) *base = region->base;
    if (region && bytes) *bytes = region->bytes;
    pthread_mutex_unlock(&lock);
    return region ? SUCCESS : NOT_FOUND;
}

EXPORT CUresult cuMemGetInfo(size_t *left, size_t *total) {
    ENTER("cuMemGetInfo", NEEDS_CONTEXT);
    *total = DEVICE_BYTES;
    *left = DEVICE_BYTES - current->used;
    return SUCCESS;
}

/* --- handles between processes ------------------------------------------------------ */

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER("cuIpcGetMemHandle", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    Region *region = region_at(address);
    CUresult result = INVALID_VALUE;
    struct stat file;
    if (region && region->base == address && region->kind == REGION_ALLOC &&
        !fstat(region->backing->fd, &file)) {
        IpcHandle made = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = region->backing->fd,
                          .user = geteuid(), .inode = file.st_ino, .bytes = region->bytes,
                          .code = settings.handle_code, .sticky = settings.handle_sticky};
        device_uuid(region->backing->ordinal, made.uuid);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &made, sizeof made);
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The exporter's memory, through its descriptor; -1 once it is dead or has freed it. */
static int open_exported(const IpcHandle *handle) {
    char path[64];
    struct stat file;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int low = open(path, O_RDWR | O_CLOEXEC);
    if (low < 0) return -1;
    int fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR);
    close(low);
    if (fd >= 0 && !fstat(fd, &file) && file.st_ino == handle->inode &&
        (uint64_t)file.st_size == handle->bytes)
        return fd;
    if (fd >= 0) close(fd);
    return -1;
}

static CUresult open_handle(CUdeviceptr *address, const IpcHandle *handle) {
    unsigned char uuid[16];
    device_uuid(current->ordinal, uuid);
    if (handle->magic != HANDLE_MAGIC) return INVALID_VALUE;
    if (handle->pid == getpid()) return INVALID_CONTEXT; /* as the driver: not at home */
    if (handle->code) {
        if (handle->sticky) poison(current, handle->code);
        return handle->code;
    }
    if (memcmp(uuid, handle->uuid, sizeof uuid)) return MAP_FAILED_;
    if (handle->user != geteuid()) return NOT_PERMITTED;
    int fd = open_exported(handle);
    if (fd < 0) return INVALID_HANDLE;
    for (Region *region = regions; region; region = region->next)
        if (region->kind == REGION_IPC && region->inode == handle->inode &&
            region->context == current) {
            region->opened++; /* one mapping, counted */
            *address = region->base;
            close(fd);
            return SUCCESS;
        }
    CUdeviceptr base = take_addresses(handle->bytes);
    Backing *backing = base ? backing_of_file(fd, handle->bytes, current->ordinal) : NULL;
    if (!backing) {
        if (base) give_addresses(base, handle->bytes);
        close(fd);
        return MAP_FAILED_;
    }
    Region *region = region_add(base, handle->bytes, backing, REGION_IPC);
    region->opened = 1;
    region->inode = handle->inode;
    *address = base;
    return SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTER("cuIpcOpenMemHandle", NEEDS_CONTEXT);
    if (flags != IPC_LAZY_PEER_ACCESS) return INVALID_VALUE;
    IpcHandle wanted;
    memcpy(&wanted, &handle, sizeof wanted);
    pthread_mutex_lock(&lock);
    CUresult result = open_handle(address, &wanted);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER("cuIpcCloseMemHandle", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = context_drain(current); /* closing waits, as cuMemFree does */
    Region *region = region_at(address);
    if (!result && (!region || region->base != address || region->kind != REGION_IPC))
        result = INVALID_VALUE;
    if (!result && --region->opened == 0) region_drop(region);
    pthread_mutex_unlock(&lock);
    return result;
}

/* --- virtual memory management ------------------------------------------------------ */

static CUresult check_properties(const CUmemAllocationProp *wanted) {
    if (!wanted || wanted->type != ALLOCATION_PINNED || wanted->location.type != LOCATION_DEVICE)
        return INVALID_VALUE;
    if (wanted->requestedHandleTypes & ~(HANDLE_POSIX_FD | HANDLE_FABRIC)) return NOT_SUPPORTED;
    return context_of(wanted->location.id) ? SUCCESS : INVALID_DEVICE;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              int option) {
    ENTER("cuMemGetAllocationGranularity", NEEDS_INIT);
    CUresult result = check_properties(properties);
    if (result) return result;
    if (option != 0 && option != 1) return INVALID_VALUE;
    *bytes = GRANULARITY;
    return SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *properties, uint64_t flags) {
    ENTER("cuMemCreate", NEEDS_INIT);
    CUresult result = check_properties(properties);
    if (result) return result;
    if (bytes == 0 || bytes % GRANULARITY || flags) return INVALID_VALUE;
    if (bytes > DEVICE_BYTES) return OUT_OF_MEMORY;
    char name[32];
    snprintf(name, sizeof name, "fakecuda-vmm-%d", properties->location.id);
    Backing *backing = backing_make(bytes, properties->location.id, name);
    if (!backing) return OUT_OF_MEMORY;
    memset(backing->alias, 0xd5, bytes);
    backing->handle_types = properties->requestedHandleTypes;
    *handle = (uintptr_t)backing;
    return SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER("cuMemRelease", NEEDS_INIT);
    if (!handle) return INVALID_VALUE;
    unpin((Backing *)(uintptr_t)handle);
    return SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER("cuMemRetainAllocationHandle", NEEDS_INIT);
    pthread_mutex_lock(&lock);
    Region *region = region_at((uintptr_t)address);
    CUresult result = INVALID_VALUE; /* also for memory that cuMemCreate did not make */
    if (region && region->kind == REGION_VMM) {
        region->backing->references++;
        *handle = (uintptr_t)region->backing;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                             int type, uint64_t flags) {
    ENTER("cuMemExportToShareableHandle", NEEDS_INIT);
    Backing *backing = (Backing *)(uintptr_t)handle;
    if (!backing || type != HANDLE_POSIX_FD || flags) return INVALID_VALUE;
    if (!(backing->handle_types & HANDLE_POSIX_FD)) return NOT_SUPPORTED;
    int fd = fcntl(backing->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return UNKNOWN;
    *(int *)out = fd;
    return SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                               int type) {
    ENTER("cuMemImportFromShareableHandle", NEEDS_INIT);
    if (type != HANDLE_POSIX_FD) return NOT_SUPPORTED;
    char link[64], name[96] = "";
    struct stat file;
    int given = (int)(intptr_t)from, number = -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", given);
    if (readlink(link, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:fakecuda-vmm-%d", &number) != 1 || !context_of(number))
        return INVALID_VALUE;
    int fd = fcntl(given, F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR);
    if (fd < 0 || fstat(fd, &file)) return INVALID_VALUE;
    Backing *backing = backing_of_file(fd, (size_t)file.st_size, number);
    if (!backing) {
        close(fd);
        return MAP_FAILED_;
    }
    backing->handle_types = HANDLE_POSIX_FD;
    *handle = (uintptr_t)backing;
    return SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                    CUdeviceptr hint, uint64_t flags) {
    (void)hint;
    ENTER("cuMemAddressReserve", NEEDS_INIT);
    if (bytes == 0 || bytes % GRANULARITY || alignment > GRANULARITY || flags) return INVALID_VALUE;
    CUdeviceptr base = take_addresses(bytes);
    if (!base) return OUT_OF_MEMORY;
    Reservation *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (Reservation){base, bytes, reservations};
    reservations = made;
    pthread_mutex_unlock(&lock);
    *address = base;
    return SUCCESS;
}

/* Whether a mapping touches these addresses; the lock is held. */
static bool is_mapped(CUdeviceptr base, size_t bytes) {
    for (Region *region = regions; region; region = region->next)
        if (region->base < base + bytes && base < region->base + region->bytes) return true;
    return false;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER("cuMemAddressFree", NEEDS_INIT);
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Reservation **link = &reservations; *link; link = &(*link)->next) {
        Reservation *found = *link;
        if (found->base != address || found->bytes != bytes || is_mapped(address, bytes)) continue;
        *link = found->next;
        give_addresses(address, bytes);
        free(found);
        result = SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                         CUmemGenericAllocationHandle handle, uint64_t flags) {
    ENTER("cuMemMap", NEEDS_INIT);
    Backing *backing = (Backing *)(uintptr_t)handle;
    if (!backing || flags || offset || bytes == 0 || bytes % GRANULARITY || address % GRANULARITY ||
        bytes > backing->bytes)
        return INVALID_VALUE;
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Reservation *place = reservations; place; place = place->next) {
        if (address < place->base || address + bytes > place->base + place->bytes) continue;
        if (is_mapped(address, bytes)) break;
        backing->references++;
        Region *region = region_add(address, bytes, backing, REGION_VMM);
        region->access = 0; /* until cuMemSetAccess */
        region->context = context_of(backing->ordinal);
        result = SUCCESS;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER("cuMemUnmap", NEEDS_INIT);
    pthread_mutex_lock(&lock);
    CUdeviceptr at = address, end = address + bytes;
    while (at < end) { /* whole mappings only */
        Region *region = region_at(at);
        if (!region || region->kind != REGION_VMM || region->base != at ||
            region->base + region->bytes > end)
            break;
        at += region->bytes;
    }
    CUresult result = at == end && bytes ? SUCCESS : INVALID_VALUE;
    if (!result)
        for (Region *region = regions, *next; region; region = next) {
            next = region->next;
            if (region->base >= address && region->base < end) region_drop(region);
        }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *wanted,
                               size_t count) {
    ENTER("cuMemSetAccess", NEEDS_INIT);
    if (count != 1 || !wanted || wanted->location.type != LOCATION_DEVICE ||
        !context_of(wanted->location.id))
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = bytes ? SUCCESS : INVALID_VALUE;
    for (CUdeviceptr at = address; at < address + bytes;) {
        Region *region = region_at(at);
        if (!region || region->kind != REGION_VMM || region->base != at ||
            region->backing->ordinal != wanted->location.id) {
            result = INVALID_VALUE;
            break;
        }
        region->access = wanted->flags;
        at += region->bytes;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
