/* The functions that enqueue copies and memsets. */
#include "api.h"
#include "fake.h"

/* What may be wrong with one copy, found when it is submitted. The lock is held. */
static CUresult check(Entry *entry, bool pageable_allowed) {
    Place to = place_of(entry->to, entry->bytes), from = place_of(entry->from, entry->bytes);
    if (to == PLACE_BAD || from == PLACE_BAD) return INVALID_VALUE;
    size_t into;
    if (to == PLACE_REGISTERED && host_range_at(entry->to, &into)->flags & REGISTER_READ_ONLY)
        return INVALID_VALUE;
    entry->pageable = to == PLACE_PAGEABLE || from == PLACE_PAGEABLE;
    return entry->pageable && !pageable_allowed ? NOT_REGISTERED : SUCCESS;
}

static CUresult submit(Entry *entries, size_t count, CUstream handle, bool synchronous) {
    be_busy(count);
    await_driver();
    if (settings.instant) return SUCCESS;
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    CUresult result = stream ? SUCCESS : INVALID_HANDLE;
    for (size_t i = 0; i < count && !result; i++) result = check(&entries[i], synchronous);
    pthread_mutex_unlock(&lock);
    if (result) return result;
    Op *op = copy_op(stream, entries, count);
    pthread_mutex_lock(&lock);
    stream_push(stream, op);
    if (synchronous) result = stream_drain(stream);
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult submit_one(uint64_t to, uint64_t from, size_t bytes, CUstream handle,
                           bool synchronous) {
    if (bytes == 0) return SUCCESS;
    Entry entry = {.to = to, .from = from, .bytes = bytes, .order = ORDER_STREAM};
    return submit(&entry, 1, handle, synchronous);
}

static bool is_device(uint64_t address) {
    pthread_mutex_lock(&lock);
    bool found = region_pads(address);
    pthread_mutex_unlock(&lock);
    return found;
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    ENTER("cuMemcpyAsync", NEEDS_CONTEXT);
    return submit_one(to, from, bytes, handle, false);
}

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream handle) {
    ENTER("cuMemcpyHtoDAsync", NEEDS_CONTEXT);
    if (bytes && (!is_device(to) || is_device((uintptr_t)from))) return INVALID_VALUE;
    return submit_one(to, (uintptr_t)from, bytes, handle, false);
}

EXPORT CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream handle) {
    ENTER("cuMemcpyDtoHAsync", NEEDS_CONTEXT);
    if (bytes && (is_device((uintptr_t)to) || !is_device(from))) return INVALID_VALUE;
    return submit_one((uintptr_t)to, from, bytes, handle, false);
}

EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    ENTER("cuMemcpyDtoDAsync", NEEDS_CONTEXT);
    if (bytes && (!is_device(to) || !is_device(from))) return INVALID_VALUE;
    return submit_one(to, from, bytes, handle, false);
}

EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER("cuMemcpyHtoD", NEEDS_CONTEXT);
    if (bytes && (!is_device(to) || is_device((uintptr_t)from))) return INVALID_VALUE;
    return submit_one(to, (uintptr_t)from, bytes, NULL, true);
}

EXPORT CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    ENTER("cuMemcpyDtoH", NEEDS_CONTEXT);
    if (bytes && (is_device((uintptr_t)to) || !is_device(from))) return INVALID_VALUE;
    return submit_one((uintptr_t)to, from, bytes, NULL, true);
}

static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                      CUmemcpyAttributes *attributes, size_t *starts, size_t kinds,
                      CUstream handle) {
    if (!count || !kinds || kinds > count || !attributes || !starts || starts[0] != 0)
        return INVALID_VALUE;
    if (handle == NULL || handle == LEGACY_STREAM) return INVALID_VALUE; /* as the driver */
    for (size_t i = 0; i < kinds; i++)
        if (attributes[i].srcAccessOrder < ORDER_STREAM || attributes[i].srcAccessOrder > ORDER_ANY ||
            attributes[i].flags > OVERLAP ||
            starts[i] >= count || (i && starts[i] <= starts[i - 1]))
            return INVALID_VALUE;
    if (settings.instant) return submit(NULL, count, handle, false);
    Entry *entries = calloc(count, sizeof *entries);
    CUresult result = SUCCESS;
    for (size_t i = 0, kind = 0; i < count; i++) {
        if (kind + 1 < kinds && starts[kind + 1] == i) kind++;
        entries[i] = (Entry){.to = to[i], .from = from[i], .bytes = bytes[i],
                             .order = attributes[kind].srcAccessOrder};
        if (bytes[i] == 0 || !device_sees(to[i]) || !device_sees(from[i])) result = INVALID_VALUE;
    }
    if (!result) result = submit(entries, count, handle, false);
    free(entries);
    return result;
}

/* The form of CUDA 12.8, which also tells which copy was wrong. */
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *starts, size_t kinds,
                                   size_t *wrong, CUstream handle) {
    ENTER("cuMemcpyBatchAsync", NEEDS_CONTEXT);
    if (wrong) *wrong = SIZE_MAX;
    return batch(to, from, bytes, count, attributes, starts, kinds, handle);
}

/* The form since CUDA 13.0; failures and the log know both by the one name. */
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes,
                                      size_t count, CUmemcpyAttributes *attributes, size_t *starts,
                                      size_t kinds, CUstream handle) {
    ENTER("cuMemcpyBatchAsync", NEEDS_CONTEXT);
    return batch(to, from, bytes, count, attributes, starts, kinds, handle);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes,
                                CUstream handle) {
    ENTER("cuMemsetD8Async", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    CUresult result = stream ? SUCCESS : INVALID_HANDLE;
    Place place = place_of(address, bytes);
    if (place != PLACE_DEVICE && place != PLACE_REGISTERED) result = INVALID_VALUE;
    if (!result) {
        Op *op = op_make(OP_SET);
        op->address = address;
        op->value = value;
        op->bytes = bytes;
        stream_push(stream, op);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes) {
    ENTER("cuMemsetD8", NEEDS_CONTEXT);
    CUresult result = cuMemsetD8Async(address, value, bytes, NULL);
    return result ? result : cuStreamSynchronize(NULL);
}
