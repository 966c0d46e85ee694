/* The few types and numbers of CUDA's driver interface that the test driver needs.
 *
 * Written out here so that the double builds without a CUDA toolkit; the numbers
 * and layouts are the interface's own.
 */
#ifndef CUDA_TYPES_H
#define CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;
typedef uint64_t CUmemGenericAllocationHandle;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ = 205,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    UNKNOWN = 999,
};

typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char reserved[64]; } CUipcMemHandle;
typedef struct { int type; int id; } CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum { ORDER_STREAM = 1, ORDER_DURING_API_CALL = 2, ORDER_ANY = 3 };
enum { OVERLAP = 1 };

typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

enum { LOCATION_DEVICE = 1 };
enum { HANDLE_POSIX_FD = 1, HANDLE_FABRIC = 8 };
enum { ALLOCATION_PINNED = 1 };
enum { ACCESS_READ = 1, ACCESS_READWRITE = 3 };
enum { STREAM_NON_BLOCKING = 1 };
enum { EVENT_BLOCKING_SYNC = 1, EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4 };
enum { IPC_LAZY_PEER_ACCESS = 1 };
enum { REGISTER_PORTABLE = 1, REGISTER_DEVICEMAP = 2, REGISTER_READ_ONLY = 8 };
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };
enum { COMPUTE_DEFAULT = 0, COMPUTE_PROHIBITED = 2, COMPUTE_EXCLUSIVE = 3 };
enum { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

#define LEGACY_STREAM ((CUstream)1)
#define PER_THREAD_STREAM ((CUstream)2)

#endif
