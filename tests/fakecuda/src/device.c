/* Start, devices, primary contexts, error names, finding functions by name. */
#include <stdio.h>
#include <strings.h>

#include "api.h"
#include "fake.h"

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
bool initialised;
__thread struct Context *current;

static struct Context contexts[MAX_DEVICES];
static int visible[MAX_DEVICES]; /* ordinal -> number of the device on the machine */
static int visible_count;

static const struct { int code; const char *name; } errors[] = {
    {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"}, {4, "CUDA_ERROR_DEINITIALIZED"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"}, {205, "CUDA_ERROR_MAP_FAILED"},
    {206, "CUDA_ERROR_UNMAP_FAILED"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {218, "CUDA_ERROR_INVALID_PTX"}, {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
    {401, "CUDA_ERROR_ILLEGAL_STATE"}, {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}, {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {710, "CUDA_ERROR_ASSERT"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {714, "CUDA_ERROR_HARDWARE_STACK_ERROR"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"}, {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"}, {718, "CUDA_ERROR_INVALID_PC"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"}, {800, "CUDA_ERROR_NOT_PERMITTED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

bool is_sticky(int code) {
    return code == 214 || code == 220 || code == 700 || code == 702 || code == 710 ||
           (code >= 714 && code <= 719);
}

void poison(struct Context *context, int code) {
    if (!context->fault) context->fault = code;
    pthread_cond_broadcast(&changed);
}

/* Devices of one machine have fixed, different UUIDs. */
static void uuid_of_number(int number, unsigned char out[16]) {
    static const unsigned char first[16] = {0xfa, 0x4e, 0xcd, 0xa0, 0x00, 0x00, 0x40, 0x00,
                                            0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
    memcpy(out, first, 16);
    out[15] = (unsigned char)number;
}

void device_uuid(int ordinal, unsigned char out[16]) { uuid_of_number(visible[ordinal], out); }

/* The device that one item of CUDA_VISIBLE_DEVICES names, or -1. */
static int named(const char *item) {
    if (!strncmp(item, "GPU-", 4) || !strncmp(item, "MIG-", 4)) {
        item += 4;
        for (int number = 0; number < settings.devices; number++) {
            unsigned char uuid[16];
            char text[40];
            uuid_of_number(number, uuid);
            int at = 0;
            for (int i = 0; i < 16; i++)
                at += sprintf(text + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                              uuid[i]);
            if (*item && !strncasecmp(text, item, strlen(item))) return number;
        }
        return -1;
    }
    char *end;
    long number = strtol(item, &end, 10);
    return end != item && *end == 0 && number >= 0 && number < settings.devices ? (int)number : -1;
}

static void find_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!text) {
        for (int i = 0; i < settings.devices; i++) visible[visible_count++] = i;
        return;
    }
    char copy[512], *save = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *item = strtok_r(copy, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        int number = named(item);
        if (number < 0 || visible_count == MAX_DEVICES) break; /* the rest is hidden too */
        visible[visible_count++] = number;
    }
}

/* A forked child cannot use the driver; its lock may be held by nobody. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    initialised = false;
    current = NULL;
    locks_in_child();
    host_in_child();
}

struct Context *context_of(CUdevice device) {
    return device >= 0 && device < visible_count ? &contexts[device] : NULL;
}

EXPORT CUresult cuInit(unsigned flags) {
    ENTER("cuInit", NEEDS_NOTHING);
    if (flags) return INVALID_VALUE;
    static bool forks_watched;
    static bool was_started;
    pthread_mutex_lock(&lock);
    if (!forks_watched) forks_watched = !pthread_atfork(NULL, NULL, in_child);
    CUresult result = SUCCESS;
    if (!initialised) {
        if (was_started) result = NOT_INITIALIZED; /* forked */
        else {
            find_visible();
            for (int i = 0; i < MAX_DEVICES; i++) contexts[i].ordinal = i;
            if (visible_count == 0) result = NO_DEVICE;
            else was_started = initialised = true;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    ENTER("cuDriverGetVersion", NEEDS_NOTHING);
    *version = settings.driver_version;
    return SUCCESS;
}

static const char *error_name(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    ENTER("cuGetErrorName", NEEDS_NOTHING);
    *text = error_name(code);
    return *text ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    ENTER("cuGetErrorString", NEEDS_NOTHING);
    *text = error_name(code);
    if (!*text) return INVALID_VALUE;
    *text = "an error of the test driver";
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount", NEEDS_INIT);
    *count = visible_count;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet", NEEDS_INIT);
    if (!context_of(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid", NEEDS_INIT);
    if (!context_of(device)) return INVALID_DEVICE;
    device_uuid(device, uuid->bytes);
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER("cuDeviceGetName", NEEDS_INIT);
    if (!context_of(device)) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "kvd test double %d", visible[device]);
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    ENTER("cuDeviceGetPCIBusId", NEEDS_INIT);
    if (!context_of(device)) return INVALID_DEVICE;
    snprintf(id, (size_t)length, "ffff:%02X:00.0", visible[device] + 1);
    return SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER("cuDeviceTotalMem", NEEDS_INIT);
    if (!context_of(device)) return INVALID_DEVICE;
    *bytes = DEVICE_BYTES;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute", NEEDS_INIT);
    if (!context_of(device)) return INVALID_DEVICE;
    switch (attribute) {
    case 1: case 2: case 5: *value = 1024; break;           /* threads per block, block x, grid x */
    case 20: *value = settings.compute_mode; break;
    case 10: *value = 32; break;                            /* warp */
    case 16: *value = 4; break;                             /* multiprocessors */
    case 19: case 41: case 91: case 99: *value = 1; break;  /* mapped host memory, one address space */
    case 33: *value = visible[device] + 1; break;           /* PCI bus, device, domain */
    case 34: *value = 0; break;
    case 50: *value = 0xffff; break;
    case 40: *value = 2; break;                             /* copy engines */
    case 75: *value = 9; break;                             /* compute capability */
    case 76: *value = 0; break;
    case 93: case 122: *value = settings.mem_ops; break;    /* 64-bit stream memory operations */
    case 102: case 103: *value = 1; break;                  /* virtual memory, as a descriptor */
    case 125: *value = 1; break;                            /* IPC */
    case 133: *value = settings.mps; break;
    case 134: *value = -1; break;                           /* no NUMA node */
    default: *value = 0;
    }
    return SUCCESS;
}

/* Whether one process at a time may have a context. */
static bool is_exclusive(void) {
    return settings.compute_mode == COMPUTE_EXCLUSIVE && !settings.mps;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain", NEEDS_INIT);
    struct Context *found = context_of(device);
    if (!found) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult result = found->fault;
    if (!result && settings.compute_mode == COMPUTE_PROHIBITED) result = UNKNOWN;
    if (!result && !found->users && is_exclusive() && !take_device(visible[device]))
        result = DEVICE_UNAVAILABLE;
    if (!result) {
        found->users++;
        *context = found;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease", NEEDS_INIT);
    struct Context *context = context_of(device);
    if (!context) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult result = SUCCESS;
    size_t unpinned = 0;
    if (context->users == 0) result = INVALID_CONTEXT;
    else if (--context->users == 0) {
        context_drain(context);
        context_forget_streams(context);
        drop_memory(context);
        unpinned = drop_registrations(context);
        if (is_exclusive()) give_device(visible[device]);
    }
    pthread_mutex_unlock(&lock);
    occupy_driver(unpinned, settings.unpin_ns);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState", NEEDS_INIT);
    struct Context *context = context_of(device);
    if (!context) return INVALID_DEVICE;
    *flags = 0;
    *active = context->users > 0;
    return SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER("cuCtxSetCurrent", NEEDS_INIT);
    if (context && (context < contexts || context >= contexts + MAX_DEVICES)) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    CUresult result = !context ? SUCCESS : context->users ? context->fault : INVALID_CONTEXT;
    if (!result) current = context;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER("cuCtxGetCurrent", NEEDS_INIT);
    *context = current;
    return SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER("cuCtxGetDevice", NEEDS_CONTEXT);
    *device = current->ordinal;
    return SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize", NEEDS_CONTEXT);
    pthread_mutex_lock(&lock);
    CUresult result = context_drain(current);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange", NEEDS_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

/* The driver function with this name as of this version of the interface. */
static void *function_named(const char *name, int version) {
    static const struct { const char *name; int since; void *function; } table[] = {
#define FUNCTION(name, since) {#name, since, (void *)name},
        FUNCTIONS
#undef FUNCTION
    };
    if (version > settings.driver_version) return NULL;
    /* Since 12.0 the name stands for the form that also tells a status. */
    if (!strcmp(name, "cuGetProcAddress") && version >= 12000) return (void *)cuGetProcAddress_v2;
    if (!strcmp(name, "cuMemcpyBatchAsync") && version >= 13000)
        return (void *)cuMemcpyBatchAsync_v2;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            return version >= table[i].since && settings.driver_version >= table[i].since
                       ? table[i].function
                       : NULL;
    return NULL;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                    int *status) {
    (void)flags;
    /* Before the start it is the bindings that look up everything. */
    if (initialised) ENTER("cuGetProcAddress", NEEDS_NOTHING);
    *function = function_named(name, version);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
