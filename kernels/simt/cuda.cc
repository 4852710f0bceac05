/* cuda.cc - the entry points of cuda_runtime_api.h for the device, its errors, memory and copies.
 * Floor: kernels.
 *
 * Copies keep CUDA's contract for host memory: pinned memory is read or written when the copy
 * runs; from pageable memory the call takes what is there, to pageable memory it waits. */
#include "kernels/simt/internal.h"

#include <map>
#include <stdlib.h>

namespace simt {

namespace {

constexpr int MULTIPROCESSORS = 4; /* few, so that loops over a grid's stride are exercised */
constexpr int L2_BYTES = 1 << 20;
constexpr int CUDA_VERSION = 13000;

cudaError_t last_error; /* until it is asked for */

std::map<const unsigned char *, size_t> pinned;

bool on_device(const void *p) {
    return arena_offset(p) < arena.bytes;
}

enum cudaMemcpyKind resolve(const void *to, const void *from, enum cudaMemcpyKind kind) {
    if (kind != cudaMemcpyDefault) return kind;
    if (on_device(from)) return on_device(to) ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost;
    return on_device(to) ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost;
}

void copy_now(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    switch (kind) {
    case cudaMemcpyHostToDevice:
        simt_h2d(to, from, bytes);
        break;
    case cudaMemcpyDeviceToHost:
        simt_d2h(to, from, bytes);
        break;
    case cudaMemcpyDeviceToDevice:
        simt_d2d(to, from, bytes);
        break;
    default:
        memcpy(to, from, bytes);
    }
}

struct error_text {
    cudaError_t error;
    const char *name, *text;
};

const error_text &describe(cudaError_t error) {
    static const error_text texts[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
         "invalid configuration argument"},
        {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
         "invalid resource handle"},
        {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure",
         "a kernel or copy broke a rule: the report above says where"},
    };
    for (const error_text &t : texts)
        if (t.error == error) return t;
    static const error_text unknown = {cudaSuccess, "unknown", "unknown error"};
    return unknown;
}

} // namespace

cudaError_t set_error(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

/* After a report the device stays broken, as after a fault on a GPU. */
cudaError_t device_error() {
    return simt_errors() ? cudaErrorLaunchFailure : cudaSuccess;
}

bool is_pinned(const void *p) {
    auto next = pinned.upper_bound(static_cast<const unsigned char *>(p));
    if (next == pinned.begin()) return false;
    --next;
    return (size_t)(static_cast<const unsigned char *>(p) - next->first) < next->second;
}

} // namespace simt

using namespace simt;

/* The device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : set_error(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (device != 0) return set_error(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = MAX_THREADS;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = (int)SHARED_DEFAULT;
        return cudaSuccess;
    case cudaDevAttrWarpSize:
        *value = LANES;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = MULTIPROCESSORS;
        return cudaSuccess;
    case cudaDevAttrL2CacheSize:
        *value = L2_BYTES;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 8;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)SHARED_LIMIT;
        return cudaSuccess;
    }
    return set_error(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device != 0) return set_error(cudaErrorInvalidDevice);
    guard held;
    cudaDeviceProp p = {};
    size_t free_bytes;
    snprintf(p.name, sizeof p.name, "SIMT runtime on the host%s", checked ? ", checked" : "");
    arena_room(&free_bytes, &p.totalGlobalMem);
    p.sharedMemPerBlock = SHARED_DEFAULT;
    p.sharedMemPerBlockOptin = SHARED_LIMIT;
    p.warpSize = LANES;
    p.maxThreadsPerBlock = MAX_THREADS;
    p.major = 8;
    p.multiProcessorCount = MULTIPROCESSORS;
    p.l2CacheSize = L2_BYTES;
    *properties = p;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    if (device != 0) return set_error(cudaErrorInvalidDevice);
    snprintf(id, (size_t)length, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        (size_t)value > SHARED_LIMIT)
        return set_error(cudaErrorInvalidValue);
    simt_allow_shared(kernel, (size_t)value);
    return cudaSuccess;
}

/* Errors */

cudaError_t cudaPeekAtLastError(void) {
    return last_error ? last_error : device_error();
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error) {
    return describe(error).text;
}

const char *cudaGetErrorName(cudaError_t error) {
    return describe(error).name;
}

/* Memory */

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    *memory = simt_malloc(bytes);
    return *memory ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *memory) {
    if (!memory) return cudaSuccess;
    guard held;
    drain_all(); /* CUDA's waits too */
    simt_free(memory);
    return device_error();
}

cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    guard held;
    if (posix_memalign(memory, 4 * KB, bytes)) return set_error(cudaErrorMemoryAllocation);
    memset(*memory, 0xff, bytes);
    pinned[static_cast<unsigned char *>(*memory)] = bytes;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned int) {
    return cudaMallocHost(memory, bytes);
}

cudaError_t cudaFreeHost(void *memory) {
    if (!memory) return cudaSuccess;
    guard held;
    drain_all();
    if (!pinned.erase(static_cast<unsigned char *>(memory)))
        return set_error(cudaErrorInvalidValue);
    free(memory);
    return device_error();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    guard held;
    arena_room(free_bytes, total_bytes);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory) {
    guard held;
    cudaPointerAttributes a = {cudaMemoryTypeUnregistered, -1, nullptr, nullptr};
    void *p = const_cast<void *>(memory);
    if (on_device(memory))
        a = {cudaMemoryTypeDevice, 0, p, nullptr};
    else if (is_pinned(memory))
        a = {cudaMemoryTypeHost, 0, p, p};
    *attributes = a;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    guard held;
    if (bytes == 0) return cudaSuccess;
    kind = resolve(to, from, kind);
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    if (from_device != on_device(from) || to_device != on_device(to))
        return set_error(cudaErrorInvalidValue);
    if (!from_device && !is_pinned(from)) {
        const unsigned char *source = static_cast<const unsigned char *>(from);
        std::vector<unsigned char> staged(source, source + bytes);
        enqueue(stream, [=]() { copy_now(to, staged.data(), bytes, kind); });
    } else {
        enqueue(stream, [=]() { copy_now(to, from, bytes, kind); });
    }
    if (!to_device && !is_pinned(to)) drain(stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return error ? error : device_error();
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    guard held;
    if (bytes == 0) return cudaSuccess;
    if (!on_device(to)) return set_error(cudaErrorInvalidValue);
    enqueue(stream, [=]() { simt_memset(to, value, bytes); });
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}
