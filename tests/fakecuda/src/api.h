/* The driver functions that the test driver has, and since which version of the interface. */
#ifndef API_H
#define API_H

#include "cuda_types.h"

#define FUNCTIONS \
    FUNCTION(cuInit, 2000) FUNCTION(cuDriverGetVersion, 2020) \
    FUNCTION(cuGetProcAddress, 11030) FUNCTION(cuGetErrorName, 6000) \
    FUNCTION(cuGetErrorString, 6000) FUNCTION(cuDeviceGetCount, 2000) \
    FUNCTION(cuDeviceGet, 2000) FUNCTION(cuDeviceGetUuid, 9020) \
    FUNCTION(cuDeviceGetName, 2000) FUNCTION(cuDeviceGetAttribute, 2000) \
    FUNCTION(cuDeviceGetPCIBusId, 4010) FUNCTION(cuDeviceTotalMem, 3020) \
    FUNCTION(cuDevicePrimaryCtxRetain, 7000) FUNCTION(cuDevicePrimaryCtxRelease, 7000) \
    FUNCTION(cuDevicePrimaryCtxGetState, 7000) \
    FUNCTION(cuCtxSetCurrent, 4000) FUNCTION(cuCtxGetCurrent, 4000) \
    FUNCTION(cuCtxGetDevice, 2000) FUNCTION(cuCtxSynchronize, 2000) \
    FUNCTION(cuCtxGetStreamPriorityRange, 5050) \
    FUNCTION(cuMemAlloc, 2000) FUNCTION(cuMemFree, 2000) \
    FUNCTION(cuMemGetAddressRange, 2000) FUNCTION(cuMemGetInfo, 2000) \
    FUNCTION(cuPointerGetAttribute, 4000) FUNCTION(cuPointerGetAttributes, 7000) \
    FUNCTION(cuIpcGetMemHandle, 4010) FUNCTION(cuIpcOpenMemHandle, 4010) \
    FUNCTION(cuIpcCloseMemHandle, 4010) \
    FUNCTION(cuMemCreate, 10020) FUNCTION(cuMemRelease, 10020) \
    FUNCTION(cuMemRetainAllocationHandle, 11000) \
    FUNCTION(cuMemExportToShareableHandle, 10020) \
    FUNCTION(cuMemImportFromShareableHandle, 10020) \
    FUNCTION(cuMemAddressReserve, 10020) FUNCTION(cuMemAddressFree, 10020) \
    FUNCTION(cuMemMap, 10020) FUNCTION(cuMemUnmap, 10020) FUNCTION(cuMemSetAccess, 10020) \
    FUNCTION(cuMemGetAllocationGranularity, 10020) \
    FUNCTION(cuMemHostRegister, 4000) FUNCTION(cuMemHostUnregister, 4000) \
    FUNCTION(cuMemHostGetDevicePointer, 2020) \
    FUNCTION(cuStreamCreate, 2000) FUNCTION(cuStreamCreateWithPriority, 5050) \
    FUNCTION(cuStreamDestroy, 2000) FUNCTION(cuStreamSynchronize, 2000) \
    FUNCTION(cuStreamQuery, 2000) FUNCTION(cuStreamGetPriority, 5050) \
    FUNCTION(cuStreamWriteValue64, 9000) FUNCTION(cuStreamWaitEvent, 3020) \
    FUNCTION(cuEventCreate, 2000) FUNCTION(cuEventDestroy, 2000) FUNCTION(cuEventRecord, 2000) \
    FUNCTION(cuEventQuery, 2000) FUNCTION(cuEventSynchronize, 2000) \
    FUNCTION(cuMemcpyAsync, 4000) FUNCTION(cuMemcpyHtoDAsync, 2000) \
    FUNCTION(cuMemcpyDtoHAsync, 2000) FUNCTION(cuMemcpyDtoDAsync, 3000) \
    FUNCTION(cuMemcpyHtoD, 2000) FUNCTION(cuMemcpyDtoH, 2000) \
    FUNCTION(cuMemcpyBatchAsync, 12080) FUNCTION(cuMemsetD8, 2000) \
    FUNCTION(cuMemsetD8Async, 3020) FUNCTION(cuThreadExchangeStreamCaptureMode, 10010)

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             int *status);
CUresult cuGetErrorName(CUresult code, const char **text);
CUresult cuGetErrorString(CUresult code, const char **text);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
CUresult cuDeviceGetName(char *name, int length, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device);
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxSynchronize(void);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree(CUdeviceptr address);
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUresult cuMemGetInfo(size_t *left, size_t *total);
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr address);
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, uint64_t flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      uint64_t flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from, int type);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr hint, uint64_t flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, uint64_t flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *wanted,
                        size_t count);
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       int option);
CUresult cuMemHostRegister(void *address, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *host, unsigned flags);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuStreamDestroy(CUstream handle);
CUresult cuStreamSynchronize(CUstream handle);
CUresult cuStreamQuery(CUstream handle);
CUresult cuStreamGetPriority(CUstream handle, int *priority);
CUresult cuStreamWriteValue64(CUstream handle, CUdeviceptr address, uint64_t value, unsigned flags);
CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventDestroy(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream handle);
CUresult cuEventQuery(CUevent event);
CUresult cuEventSynchronize(CUevent event);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle);
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream handle);
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream handle);
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle);
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *starts, size_t kinds,
                            size_t *wrong, CUstream handle);
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *starts, size_t kinds,
                               CUstream handle);
CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes);
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream handle);
CUresult cuThreadExchangeStreamCaptureMode(int *mode);

#endif
