/* Registered host memory, and what a pointer points to. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "api.h"
#include "fake.h"

#define PAGE 4096ul

static HostRange *ranges;

HostRange *host_range_at(uint64_t address, size_t *into) {
    for (HostRange *range = ranges; range; range = range->next) {
        *into = address - range->base;
        if (address >= range->base && *into < range->bytes) return range;
        *into = address - range->device;
        if (address >= range->device && *into < range->bytes) return range;
    }
    return NULL;
}

bool device_sees(uint64_t address) {
    pthread_mutex_lock(&lock);
    bool seen = region_at(address) != NULL;
    for (HostRange *range = ranges; range && !seen; range = range->next)
        seen = address >= range->device && address - range->device < range->bytes;
    pthread_mutex_unlock(&lock);
    return seen;
}

static uintptr_t page_down(uintptr_t address) { return address / PAGE * PAGE; }
static uintptr_t page_up(uintptr_t address) { return (address + PAGE - 1) / PAGE * PAGE; }

/* msync tells whether every page is mapped, and does nothing else. */
static bool is_mapped_memory(uintptr_t base, size_t bytes) {
    return !msync((void *)page_down(base), page_up(base + bytes) - page_down(base), MS_ASYNC);
}

/* Pages are pinned, so ranges that share a page overlap. */
static bool overlaps(uintptr_t base, size_t bytes) {
    for (HostRange *range = ranges; range; range = range->next)
        if (page_down(base) < page_up(range->base + range->bytes) &&
            page_down(range->base) < page_up(base + bytes))
            return true;
    return false;
}

/* Whether pages lie one after another in one shared file. */
static bool is_one_file(uintptr_t base, uintptr_t end) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return false;
    char line[512], access[8];
    uint64_t start, stop, offset, inode, wanted_offset = 0, wanted_inode = 0;
    uintptr_t at = base;
    while (at < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %*s %" SCNu64, &start, &stop,
                   access, &offset, &inode) != 5 || stop <= at)
            continue;
        if (start > at || access[3] != 's' || access[1] != 'w') break;
        uint64_t here = offset + (at - start);
        if (at == base) {
            wanted_offset = here;
            wanted_inode = inode;
        }
        if (inode != wanted_inode || here != wanted_offset + (at - base)) break;
        at = stop;
    }
    fclose(maps);
    return at >= end;
}

/* The fake's own mapping of shared pages: pinned pages outlive the program's mapping.
 * NULL for private memory, which is reached where it is. */
static Backing *second_mapping(uintptr_t address, size_t bytes) {
    uintptr_t base = page_down(address), end = page_up(address + bytes);
    if (!is_one_file(base, end)) return NULL;
    void *alias = mremap((void *)base, 0, end - base, MREMAP_MAYMOVE); /* 0: leave the old one */
    if (alias == MAP_FAILED) return NULL;
    Backing *backing = calloc(1, sizeof *backing);
    *backing = (Backing){.fd = -1, .bytes = end - base, .alias = alias, .references = 1};
    return backing;
}

EXPORT CUresult cuMemHostRegister(void *address, size_t bytes, unsigned flags) {
    ENTER("cuMemHostRegister", NEEDS_CONTEXT);
    uintptr_t base = (uintptr_t)address;
    if (!address || bytes == 0 || flags & ~(REGISTER_PORTABLE | REGISTER_DEVICEMAP | REGISTER_READ_ONLY))
        return INVALID_VALUE;
    if (!is_mapped_memory(base, bytes)) return INVALID_VALUE;
    if (settings.max_pin && bytes > settings.max_pin) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    CUresult result = SUCCESS;
    for (uintptr_t at = page_down(base); at < base + bytes && !result; at += GRANULARITY)
        if (region_at(at)) result = INVALID_VALUE;
    if (!result && overlaps(base, bytes)) result = ALREADY_REGISTERED;
    size_t reserved = settings.elsewhere ? bytes + PAGE : 0;
    CUdeviceptr device = base;
    if (!result && reserved) {
        device = take_addresses(reserved);
        if (!device) result = OUT_OF_MEMORY;
        device += base % PAGE;
    }
    if (!result) {
        HostRange *made = calloc(1, sizeof *made);
        *made = (HostRange){base, device, reserved, bytes, flags, current,
                            second_mapping(base, bytes), ranges};
        ranges = made;
    }
    pthread_mutex_unlock(&lock);
    if (!result) occupy_driver(bytes, settings.pin_ns);
    return result;
}

static void drop(HostRange **link) {
    HostRange *range = *link;
    *link = range->next;
    if (range->pinned) backing_release(range->pinned);
    if (range->reserved) give_addresses(range->device - range->base % PAGE, range->reserved);
    free(range);
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    ENTER("cuMemHostUnregister", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = NOT_REGISTERED;
    size_t bytes = 0;
    for (HostRange **link = &ranges; *link; link = &(*link)->next)
        if ((*link)->base == (uintptr_t)address) {
            bytes = (*link)->bytes;
            drop(link); /* copies in flight will fault */
            result = SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    occupy_driver(bytes, settings.unpin_ns);
    return result;
}

size_t drop_registrations(struct Context *context) {
    size_t bytes = 0;
    for (HostRange **link = &ranges; *link;)
        if ((*link)->context == context) {
            bytes += (*link)->bytes;
            drop(link);
        } else link = &(*link)->next;
    return bytes;
}

void host_in_child(void) { ranges = NULL; }

/* What is still pinned when the process ends is unpinned then, in one go. */
__attribute__((destructor)) static void unpin_at_exit(void) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (HostRange *range = ranges; range; range = range->next) bytes += range->bytes;
    pthread_mutex_unlock(&lock);
    if (bytes) log_line("@pinned-at-exit");
    occupy_driver(bytes, settings.unpin_ns);
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *host, unsigned flags) {
    ENTER("cuMemHostGetDevicePointer", NEEDS_CONTEXT);
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    size_t into;
    HostRange *range = host_range_at((uintptr_t)host, &into);
    if (range) *address = range->device + into;
    pthread_mutex_unlock(&lock);
    return range ? SUCCESS : INVALID_VALUE;
}

Place place_of(uint64_t address, size_t bytes) {
    if (address + bytes < address) return PLACE_BAD;
    Region *region = region_at(address);
    if (region) {
        for (uint64_t at = address; at < address + bytes;) {
            region = region_at(at); /* neighbouring mappings of one reservation are one range */
            if (!region || !region->access || (region->kind != REGION_VMM && at != address))
                return PLACE_BAD;
            at = region->base + region->bytes;
        }
        return PLACE_DEVICE;
    }
    if (region_pads(address)) return PLACE_BAD;
    size_t into;
    HostRange *range = host_range_at(address, &into);
    if (range) return bytes <= range->bytes - into ? PLACE_REGISTERED : PLACE_BAD;
    for (range = ranges; range; range = range->next) /* a registered tail */
        if (address < range->base && range->base < address + bytes) return PLACE_BAD;
    return is_mapped_memory(address, bytes) ? PLACE_PAGEABLE : PLACE_BAD;
}

char *pin(uint64_t address, bool write, bool pageable, size_t *available, Backing **held) {
    char *reached = NULL;
    *held = NULL;
    pthread_mutex_lock(&lock);
    Region *region = region_at(address);
    size_t into = 0;
    HostRange *range = region ? NULL : host_range_at(address, &into);
    if (region && region->access == ACCESS_READWRITE) {
        into = address - region->base;
        reached = region->backing->alias + region->offset + into;
        *available = region->bytes - into;
        *held = region->backing;
        region->backing->references++;
    } else if (range && !(write && range->flags & REGISTER_READ_ONLY)) {
        reached = (char *)(range->base + into);
        *available = range->bytes - into;
        if (range->pinned) {
            reached = range->pinned->alias + (range->base + into - page_down(range->base));
            *held = range->pinned;
            range->pinned->references++;
        }
    } else if (!region && !range && pageable) {
        reached = (char *)(uintptr_t)address;
        *available = SIZE_MAX;
    }
    pthread_mutex_unlock(&lock);
    return reached;
}

/* --- attributes of pointers --------------------------------------------------------- */

static CUresult attribute_of(void *data, int attribute, CUdeviceptr address) {
    Region *region = region_at(address);
    size_t into = 0;
    HostRange *range = region ? NULL : host_range_at(address, &into);
    if (!region && !range) return INVALID_VALUE;
    struct Context *context = region ? region->context : range->context;
    bool exportable = region && region->kind == REGION_VMM;
    switch (attribute) {
    case 1: *(CUcontext *)data = context; break;
    case 2: *(unsigned *)data = region ? MEMORY_DEVICE : MEMORY_HOST; break;
    case 3: *(CUdeviceptr *)data = region ? address : range->device + into; break;
    case 4:
        if (region) return INVALID_VALUE;
        *(void **)data = (void *)(range->base + into);
        break;
    case 7: case 20: *(uint64_t *)data = region ? region->id : 0; break;
    case 8: *(int *)data = 0; break;
    case 9: *(int *)data = region ? region->backing->ordinal : context->ordinal; break;
    case 10: *(int *)data = region && region->kind == REGION_ALLOC; break;
    case 11: case 19: *(CUdeviceptr *)data = region ? region->base : range->base; break;
    case 12: case 18: *(size_t *)data = region ? region->bytes : range->bytes; break;
    case 13: *(int *)data = 1; break;
    case 14: *(uint64_t *)data = exportable ? (uint64_t)region->backing->handle_types : 0; break;
    case 16: *(int *)data = region ? region->access : ACCESS_READWRITE; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER("cuPointerGetAttribute", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = attribute_of(data, attribute, address);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Bytes of an attribute that is a pointer or a size, or of any other. */
static size_t size_of(int attribute) {
    switch (attribute) {
    case 1: case 3: case 4: case 7: case 11: case 12: case 14: case 17: case 18: case 19: case 20:
        return sizeof(uint64_t);
    default: return sizeof(int);
    }
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data,
                                       CUdeviceptr address) {
    ENTER("cuPointerGetAttributes", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < count; i++)
        if (attribute_of(data[i], attributes[i], address)) memset(data[i], 0, size_of(attributes[i]));
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
