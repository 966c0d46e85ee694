/* Streams: each a thread that does its operations in order; copies in pieces.
 *
 * With a seed, the pieces of one operation go in any order with pauses between them,
 * so operations of different streams interleave, and completion is seen late.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <time.h>

#include "fake.h"

#define MOST_PIECES 4 /* of one copy */
#define MOST_PAUSES 4 /* of one operation */
#define LONGEST_PAUSE_US 300

static struct Stream *streams; /* never freed, so that operations may name them */
static uint64_t stream_number;
static __thread struct Stream *own_stream;

double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static uint64_t chance(struct Stream *stream) {
    pthread_mutex_lock(&lock);
    uint64_t value = draw(&stream->random);
    pthread_mutex_unlock(&lock);
    return value;
}

Op *op_make(OpKind kind) {
    Op *op = calloc(1, sizeof *op);
    op->kind = kind;
    return op;
}

static void op_free(Op *op) {
    for (size_t i = 0; i < op->count; i++) free(op->pieces[i].early);
    free(op->pieces);
    free(op);
}

void record_release(Record *record) {
    if (record && --record->references == 0) free(record);
}

/* --- copies ------------------------------------------------------------------------- */

/* Move bytes between memory, or from a buffer; an error that the device would report. */
static CUresult move(uint64_t to, uint64_t from, const char *buffer, size_t bytes, bool pageable) {
    while (bytes) {
        size_t can_write = 0, can_read = bytes;
        Backing *written = NULL, *read = NULL;
        char *target = pin(to, true, pageable, &can_write, &written);
        const char *source = buffer ? buffer : pin(from, false, pageable, &can_read, &read);
        size_t now = bytes < can_write ? bytes : can_write;
        if (can_read < now) now = can_read;
        if (target && source) memmove(target, source, now);
        unpin(written);
        unpin(read);
        if (!target || !source) return ILLEGAL_ADDRESS;
        to += now;
        from += now;
        if (buffer) buffer += now;
        bytes -= now;
    }
    return SUCCESS;
}

static char *read_early(const Piece *piece) {
    char *buffer = malloc(piece->bytes ? piece->bytes : 1);
    for (size_t done = 0; done < piece->bytes;) {
        size_t can = 0;
        Backing *held;
        const char *source = pin(piece->from + done, false, piece->pageable, &can, &held);
        if (!source) {
            free(buffer);
            return NULL; /* reported at its turn */
        }
        if (can > piece->bytes - done) can = piece->bytes - done;
        memcpy(buffer + done, source, can);
        unpin(held);
        done += can;
    }
    return buffer;
}

static bool reads_early(struct Stream *stream, int order) {
    if (order == ORDER_DURING_API_CALL) return true;
    if (order != ORDER_ANY) return false;
    return settings.any == 1 || (settings.any == 2 && chance(stream) % 2);
}

static size_t split(struct Stream *stream, const Entry *entry, Piece *pieces) {
    size_t parts = 1, cuts[MOST_PIECES + 1] = {0};
    if (entry->bytes > 1) parts = settings.seeded ? 1 + chance(stream) % MOST_PIECES : 2;
    for (size_t i = 1; i < parts; i++)
        cuts[i] = settings.seeded ? chance(stream) % (entry->bytes + 1) : entry->bytes / 2;
    cuts[parts] = entry->bytes;
    for (size_t i = 1; i < parts; i++) /* in order */
        for (size_t j = i; j > 1 && cuts[j] < cuts[j - 1]; j--) {
            size_t swap = cuts[j];
            cuts[j] = cuts[j - 1];
            cuts[j - 1] = swap;
        }
    for (size_t i = 0; i < parts; i++)
        pieces[i] = (Piece){entry->to + cuts[i], entry->from + cuts[i], cuts[i + 1] - cuts[i],
                            entry->pageable, NULL};
    return parts;
}

static void shuffle(struct Stream *stream, Piece *pieces, size_t count) {
    for (size_t i = count; i > 1; i--) {
        size_t j = chance(stream) % i;
        Piece swap = pieces[i - 1];
        pieces[i - 1] = pieces[j];
        pieces[j] = swap;
    }
}

Op *copy_op(struct Stream *stream, const Entry *entries, size_t count) {
    Op *op = op_make(OP_COPY);
    op->pieces = calloc(count * MOST_PIECES + 1, sizeof *op->pieces);
    for (size_t i = 0; i < count; i++) {
        Piece *first = op->pieces + op->count;
        size_t parts = split(stream, &entries[i], first);
        for (size_t j = 0; j < parts; j++)
            if (reads_early(stream, entries[i].order)) first[j].early = read_early(&first[j]);
        op->count += parts;
    }
    if (settings.seeded) shuffle(stream, op->pieces, op->count);
    return op;
}

/* --- doing operations --------------------------------------------------------------- */

static void pause_by_chance(struct Stream *stream) {
    if (settings.seeded) nap((long)(chance(stream) % LONGEST_PAUSE_US));
}

/* Wait while a test holds this kind of work. */
static void hold(struct Stream *stream, const bool *held, const char *name) {
    pthread_mutex_lock(&lock);
    settings_refresh();
    if (*held) log_line(name);
    while (*held && !stream->context->fault) {
        pthread_mutex_unlock(&lock);
        nap(500);
        pthread_mutex_lock(&lock);
        settings_refresh();
    }
    pthread_mutex_unlock(&lock);
}

static CUresult do_pieces(struct Stream *stream, Piece *pieces, size_t count) {
    CUresult result = enter_work("@copy");
    size_t every = count / MOST_PAUSES + 1;
    for (size_t i = 0; i < count && !result; i++) {
        if (i % every == 0) pause_by_chance(stream);
        if (i == count / 2) hold(stream, &settings.hold_copies, "@held-copy");
        if (stream->context->fault) break;
        result = move(pieces[i].to, pieces[i].from, pieces[i].early, pieces[i].bytes,
                      pieces[i].pageable);
    }
    return result;
}

static CUresult do_set(struct Stream *stream, const Op *op) {
    CUresult result = enter_work("@memset");
    pause_by_chance(stream);
    hold(stream, &settings.hold_kernels, "@held-kernel");
    for (size_t done = 0; done < op->bytes && !result;) {
        size_t can = 0;
        Backing *held;
        char *target = pin(op->address + done, true, false, &can, &held);
        if (!target) return ILLEGAL_ADDRESS;
        if (can > op->bytes - done) can = op->bytes - done;
        memset(target, (int)op->value, can);
        unpin(held);
        done += can;
    }
    return result;
}

static CUresult do_value(struct Stream *stream, const Op *op) {
    CUresult result = enter_work("@value");
    pause_by_chance(stream);
    hold(stream, &settings.hold_values, "@held-value");
    size_t can = 0;
    Backing *held;
    char *target = pin(op->address, true, false, &can, &held);
    if (!result && (!target || can < sizeof(uint64_t) || !device_sees(op->address)))
        result = ILLEGAL_ADDRESS;
    if (!result) __atomic_store_n((uint64_t *)target, op->value, __ATOMIC_SEQ_CST);
    unpin(held);
    return result;
}

static CUresult do_record(struct Stream *stream, Op *op) {
    pause_by_chance(stream); /* completion is seen late */
    pthread_mutex_lock(&lock);
    op->record->done = true;
    record_release(op->record);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static CUresult do_wait(struct Stream *stream, Op *op) {
    pthread_mutex_lock(&lock);
    while (!stream->context->fault &&
           (op->record ? !op->record->done : op->stream->completed < op->value))
        pthread_cond_wait(&changed, &lock);
    record_release(op->record);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static CUresult perform(struct Stream *stream, Op *op) {
    switch (op->kind) {
    case OP_COPY: return do_pieces(stream, op->pieces, op->count);
    case OP_SET: return do_set(stream, op);
    case OP_VALUE: return do_value(stream, op);
    case OP_RECORD: return do_record(stream, op);
    default: return do_wait(stream, op);
    }
}

static void *serve(void *argument) {
    struct Stream *stream = argument;
    pthread_mutex_lock(&lock);
    while (true) {
        while (!stream->first && stream->alive) pthread_cond_wait(&changed, &lock);
        Op *op = stream->first;
        if (!op) break;
        stream->first = op->next;
        if (!stream->first) stream->last = NULL;
        bool dead = stream->context->fault; /* nothing runs in a broken context */
        pthread_mutex_unlock(&lock);
        CUresult result = dead ? SUCCESS : perform(stream, op);
        op_free(op);
        pthread_mutex_lock(&lock);
        if (result) poison(stream->context, result);
        stream->completed++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* --- the streams -------------------------------------------------------------------- */

struct Stream *stream_make(struct Context *context, unsigned flags, int priority) {
    struct Stream *stream = calloc(1, sizeof *stream);
    *stream = (struct Stream){.context = context, .flags = flags, .priority = priority,
                              .alive = true, .next = streams};
    stream->random = settings.seed * 1000003u + ++stream_number;
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are the program's own threads' business */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &attributes, serve, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(stream);
        return NULL;
    }
    streams = stream;
    return stream;
}

struct Stream *stream_of(CUstream handle) {
    if (handle == NULL || handle == LEGACY_STREAM) {
        if (!current->null_stream) current->null_stream = stream_make(current, 0, 0);
        return current->null_stream;
    }
    if (handle == PER_THREAD_STREAM) {
        if (!own_stream || !own_stream->alive || own_stream->context != current)
            own_stream = stream_make(current, 0, 0);
        return own_stream;
    }
    for (struct Stream *stream = streams; stream; stream = stream->next)
        if (stream == handle) return stream->alive ? stream : NULL;
    return NULL;
}

static void append(struct Stream *stream, Op *op) {
    op->next = NULL;
    if (stream->last) stream->last->next = op;
    else stream->first = op;
    stream->last = op;
    stream->submitted++;
    pthread_cond_broadcast(&changed);
}

static void append_after(struct Stream *stream, struct Stream *other) {
    if (other->completed == other->submitted) return;
    Op *op = op_make(OP_AFTER);
    op->stream = other;
    op->value = other->submitted;
    append(stream, op);
}

void stream_push(struct Stream *stream, Op *op) {
    struct Stream *legacy = stream->context->null_stream;
    if (stream == legacy) { /* waits for all blocking streams, and they for it */
        for (struct Stream *other = streams; other; other = other->next)
            if (other != stream && other->context == stream->context &&
                !(other->flags & STREAM_NON_BLOCKING))
                append_after(stream, other);
    } else if (legacy && !(stream->flags & STREAM_NON_BLOCKING)) append_after(stream, legacy);
    append(stream, op);
}

CUresult stream_drain(struct Stream *stream) {
    uint64_t target = stream->submitted;
    while (stream->completed < target && !stream->context->fault)
        pthread_cond_wait(&changed, &lock);
    return stream->context->fault;
}

CUresult context_drain(struct Context *context) {
    for (struct Stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context) stream_drain(stream);
    return context->fault;
}

void context_forget_streams(struct Context *context) {
    for (struct Stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context) stream->alive = false;
    context->null_stream = NULL;
    pthread_cond_broadcast(&changed);
}
