/* The functions about streams and events. */
#include "api.h"
#include "fake.h"

static struct Event *events;

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority", NEEDS_CONTEXT);
    if (flags & ~STREAM_NON_BLOCKING) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct Stream *made = stream_make(current, flags, priority);
    pthread_mutex_unlock(&lock);
    if (made) *stream = made;
    return made ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER("cuStreamCreate", NEEDS_CONTEXT);
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy(CUstream handle) {
    ENTER("cuStreamDestroy", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = handle ? stream_of(handle) : NULL;
    if (stream) stream->alive = false; /* what it holds is still done */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return stream ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    ENTER("cuStreamSynchronize", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    CUresult result = stream ? stream_drain(stream) : INVALID_HANDLE;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER("cuStreamQuery", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    CUresult result = !stream                                  ? INVALID_HANDLE
                      : stream->completed == stream->submitted ? SUCCESS
                                                               : NOT_READY;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    ENTER("cuStreamGetPriority", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    if (stream) *priority = stream->priority;
    pthread_mutex_unlock(&lock);
    return stream ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuStreamWriteValue64(CUstream handle, CUdeviceptr address, uint64_t value,
                                     unsigned flags) {
    ENTER("cuStreamWriteValue64", NEEDS_CONTEXT);
    if (!settings.mem_ops) return NOT_SUPPORTED;
    if (address % sizeof value || flags > 1) return INVALID_VALUE;
    await_driver();
    pthread_mutex_lock(&lock);
    struct Stream *stream = stream_of(handle);
    Place place = place_of(address, sizeof value);
    CUresult result = stream ? SUCCESS : INVALID_HANDLE;
    if (place != PLACE_DEVICE && place != PLACE_REGISTERED) result = INVALID_VALUE;
    if (!result) {
        Op *op = op_make(OP_VALUE);
        op->address = address;
        op->value = value;
        stream_push(stream, op);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The event that a handle names, or NULL. The lock is held. */
static struct Event *event_of(CUevent handle) {
    for (struct Event *event = events; event; event = event->next)
        if (event == handle) return event;
    return NULL;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER("cuEventCreate", NEEDS_CONTEXT);
    if (flags & ~(EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct Event *made = calloc(1, sizeof *made);
    *made = (struct Event){.flags = flags, .context = current, .next = events};
    events = made;
    pthread_mutex_unlock(&lock);
    *event = made;
    return SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent handle) {
    ENTER("cuEventDestroy", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event **link = &events;
    while (*link && *link != handle) link = &(*link)->next;
    struct Event *event = *link;
    if (event) {
        *link = event->next;
        record_release(event->latest);
        free(event);
    }
    pthread_mutex_unlock(&lock);
    return event ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    ENTER("cuEventRecord", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    struct Stream *stream = stream_of(stream_handle);
    CUresult result = event && stream && event->context == stream->context ? SUCCESS : INVALID_HANDLE;
    if (!result) {
        record_release(event->latest);
        event->latest = calloc(1, sizeof *event->latest);
        event->latest->references = settings.instant ? 1 : 2; /* the event and the operation */
        if (settings.instant) event->latest->done = true;
        else {
            Op *op = op_make(OP_RECORD);
            op->record = event->latest;
            stream_push(stream, op);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
    ENTER("cuStreamWaitEvent", NEEDS_CONTEXT);
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    struct Stream *stream = stream_of(stream_handle);
    if (event && stream && event->latest) { /* an event never recorded is done */
        Op *op = op_make(OP_WAIT);
        op->record = event->latest;
        op->record->references++;
        stream_push(stream, op);
    }
    pthread_mutex_unlock(&lock);
    return event && stream ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    ENTER("cuEventQuery", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    CUresult result = !event                                   ? INVALID_HANDLE
                      : !event->latest || event->latest->done ? SUCCESS
                                                               : NOT_READY;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    ENTER("cuEventSynchronize", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    struct Event *event = event_of(handle);
    CUresult result = event ? SUCCESS : INVALID_HANDLE;
    if (event && event->latest) {
        Record *record = event->latest;
        struct Context *context = event->context;
        record->references++;
        while (!record->done && !context->fault) pthread_cond_wait(&changed, &lock);
        result = record->done ? SUCCESS : context->fault;
        record_release(record);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
