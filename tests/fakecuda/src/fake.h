/* What the parts of the test driver share. See README.md for what is kept of CUDA. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_types.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 8
#define GRANULARITY (2ul << 20)
#define DEVICE_BYTES (1ul << 30)

/* One lock guards everything; `changed` is signalled whenever work ends or arrives. */
extern pthread_mutex_t lock;
extern pthread_cond_t changed;

/* --- settings.c: switches, injected failures, the call log ------------------------- */

typedef struct {
    bool seeded;               /* adversarial timing */
    uint64_t seed;
    int any;                   /* 0 at its turn, 1 at submission, 2 by chance */
    bool hold_copies, hold_kernels, hold_values;
    int devices;
    int driver_version;
    bool mem_ops;              /* 64-bit stream memory operations */
    size_t max_pin;            /* most bytes of one registration; 0: any number */
    bool vmm_ranges;           /* cuMemGetAddressRange knows virtual memory */
    bool elsewhere;            /* devices find registered memory at another address */
    bool instant;              /* copies, memsets and events end at once and move nothing */
    long call_ns;              /* processor time that a call takes for each copy it is given */
    long pin_ns, unpin_ns;     /* for each KiB, under the driver's lock */
    int compute_mode;
    bool mps;
    int handle_code;           /* of failures to open handles that are made now; 0: none */
    bool handle_sticky;
    bool capture;              /* another thread captures a stream, in global mode */
} Settings;

extern Settings settings;

typedef enum { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT } Needs;

/* Every driver function begins with this: log, injected failure or hang, state. */
CUresult enter(const char *name, Needs needs);
#define ENTER(name, needs)                          \
    do {                                            \
        CUresult refused_ = enter(name, needs);     \
        if (refused_) return refused_;              \
    } while (0)

/* The same for work that runs later ("@copy", "@memset", "@value"). */
CUresult enter_work(const char *name);
void log_line(const char *name);
void settings_refresh(void);
void nap(long microseconds);
/* Keep this thread busy as long as a driver would be with so many copies. */
void be_busy(size_t copies);
uint64_t draw(uint64_t *state);

/* --- locks.c: what processes share -------------------------------------------------- */

/* Hold the driver's lock as long as it takes to pin or unpin so many bytes. */
void occupy_driver(size_t bytes, long ns_per_kib);
/* Wait until no process holds the driver's lock, where a switch says that pinning takes time. */
void await_driver(void);
/* A device in exclusive mode; false where another process has it. */
bool take_device(int number);
void give_device(int number);
void locks_in_child(void);

/* --- device.c ---------------------------------------------------------------------- */

struct Context {
    int ordinal;
    int users;                 /* cuDevicePrimaryCtxRetain minus Release */
    int fault;                 /* a sticky error; nothing clears it */
    size_t used;               /* device memory */
    struct Stream *null_stream;
};

extern bool initialised;
extern __thread struct Context *current;
struct Context *context_of(CUdevice device);
void device_uuid(int ordinal, unsigned char out[16]);
void poison(struct Context *context, int code);
bool is_sticky(int code);

/* --- memory.c ---------------------------------------------------------------------- */

typedef struct Backing {       /* bytes of device memory: one memfd; or of pinned host memory */
    int fd;                    /* -1 for host memory */
    size_t bytes;
    char *alias;               /* where the fake itself reaches them */
    int references;
    int ordinal;
    int handle_types;          /* VMM: what may be exported */
} Backing;

typedef enum { REGION_ALLOC, REGION_IPC, REGION_VMM } RegionKind;

typedef struct Region {        /* addresses that device pointers may have */
    CUdeviceptr base;
    size_t bytes;
    size_t offset;             /* in the backing */
    Backing *backing;
    RegionKind kind;
    int access;
    int opened;                /* IPC: opens minus closes */
    uint64_t inode;            /* IPC: which allocation */
    uint64_t id;
    struct Context *context;
    struct Region *next;
} Region;

Region *region_at(CUdeviceptr address);
/* Whether an address is a device pointer, even one behind the end of its allocation. */
bool region_pads(CUdeviceptr address);
/* Addresses at which nothing is mapped; 0 if there are none. */
CUdeviceptr take_addresses(size_t bytes);
void give_addresses(CUdeviceptr base, size_t bytes);
void drop_memory(struct Context *context);

typedef struct HostRange {
    uintptr_t base;
    CUdeviceptr device;        /* where devices find it */
    size_t reserved;           /* addresses that were taken for that */
    size_t bytes;
    unsigned flags;
    struct Context *context;
    Backing *pinned;           /* shared pages, reached by the fake's own mapping */
    struct HostRange *next;
} HostRange;

/* The registration at a host address or at a device's; how far into it goes to `into`. */
HostRange *host_range_at(uint64_t address, size_t *into);
/* Whether a device finds memory at this address. Copies of a stream take host addresses too. */
bool device_sees(uint64_t address);
/* Unregisters all; how many bytes that were. The lock is held. */
size_t drop_registrations(struct Context *context);
void host_in_child(void);

typedef enum { PLACE_BAD, PLACE_DEVICE, PLACE_REGISTERED, PLACE_PAGEABLE } Place;

/* Where `bytes` from `address` lie; PLACE_BAD when they leave an allocation or span two
 * registrations. */
Place place_of(uint64_t address, size_t bytes);

/* Reach memory now: a pointer to bytes at `address`, how many follow, and a reference on
 * their backing (NULL for host memory). NULL when the address is no longer valid. */
char *pin(uint64_t address, bool write, bool pageable, size_t *available, Backing **held);
void unpin(Backing *held);
/* Give up one reference. The lock is held. */
void backing_release(Backing *backing);

/* --- engine.c ---------------------------------------------------------------------- */

typedef struct Record {        /* one recording of an event */
    bool done;
    int references;
} Record;

struct Event {
    unsigned flags;
    Record *latest;
    bool alive;
    struct Context *context;
    struct Event *next;
};

typedef enum { OP_COPY, OP_SET, OP_VALUE, OP_RECORD, OP_WAIT, OP_AFTER } OpKind;

typedef struct {
    uint64_t to, from;
    size_t bytes;
    int order;
    bool pageable;             /* one side may be unregistered host memory */
} Entry;

typedef struct {               /* a part of a copy */
    uint64_t to, from;
    size_t bytes;
    bool pageable;
    char *early;               /* its bytes, when the source was read before its turn */
} Piece;

typedef struct Op {
    OpKind kind;
    Piece *pieces;             /* OP_COPY */
    size_t count;
    uint64_t address, value;   /* OP_SET, OP_VALUE */
    size_t bytes;
    Record *record;            /* OP_RECORD, OP_WAIT */
    struct Stream *stream;     /* OP_AFTER: until that stream has done `value` ops */
    struct Op *next;
} Op;

struct Stream {
    struct Context *context;
    unsigned flags;
    int priority;
    bool alive;
    uint64_t submitted, completed;
    uint64_t random;
    Op *first, *last;
    struct Stream *next;
};

struct Stream *stream_make(struct Context *context, unsigned flags, int priority);
/* The stream that a handle names, or NULL. The lock is held. */
struct Stream *stream_of(CUstream handle);
/* Append; adds what the legacy default stream orders. The lock is held. */
void stream_push(struct Stream *stream, Op *op);
/* Wait until everything submitted so far is done, or the context is poisoned. The lock is held. */
CUresult stream_drain(struct Stream *stream);
CUresult context_drain(struct Context *context);
void context_forget_streams(struct Context *context);
/* The lock is not held: sources that may be read early are read here. */
Op *copy_op(struct Stream *stream, const Entry *entries, size_t count);
Op *op_make(OpKind kind);
void record_release(Record *record);
double now_seconds(void);

#endif
