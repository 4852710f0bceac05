/* Property: streams are queues: a launch copies its arguments, work runs in order, no earlier than
 * waited for and no later; what is not waited for does not show. Copies keep CUDA's contract for
 * pinned and pageable memory. The case `eager` of main is the other extreme. */
#include "tests/simt/check.h"

__global__ void add(int *a, int n, int v) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) a[i] += v;
}

__global__ void copy_of(int *to, const int *from, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] = from[i];
}

constexpr int N = 300;
constexpr size_t BYTES = N * sizeof(int);

#define OK(call) CHECK((call) == cudaSuccess, "%s", cudaGetErrorString(cudaGetLastError()))

struct buffers {
    int *device, *pinned;
    cudaStream_t stream;
};

static buffers make() {
    buffers b;
    OK(cudaMalloc((void **)&b.device, BYTES));
    OK(cudaMallocHost((void **)&b.pinned, BYTES));
    OK(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    for (int i = 0; i < N; i++) b.pinned[i] = i;
    return b;
}

static void drop(buffers &b) {
    OK(cudaStreamDestroy(b.stream));
    OK(cudaFreeHost(b.pinned));
    OK(cudaFree(b.device));
}

/* A round trip; before the wait the host sees the old contents when work is deferred. */
static void order_and_waits(bool deferred) {
    buffers b = make();
    int v = 5;
    OK(cudaMemcpyAsync(b.device, b.pinned, BYTES, cudaMemcpyHostToDevice, b.stream));
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, v);
    v = 100; /* the launch has its copy */
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, 1);
    OK(cudaMemcpyAsync(b.pinned, b.device, BYTES, cudaMemcpyDeviceToHost, b.stream));
    CHECK(b.pinned[7] == (deferred ? 7 : 13), "without a wait: %d", b.pinned[7]);
    OK(cudaStreamSynchronize(b.stream));
    for (int i = 0; i < N; i++) CHECK(b.pinned[i] == i + 6, "%d: %d", i, b.pinned[i]);
    drop(b);
}

/* Pinned memory is read when the copy runs, pageable memory when it is enqueued. */
static void host_memory_is_read(bool deferred) {
    buffers b = make();
    std::vector<int> pageable(N, 3), back(N, -1);
    OK(cudaMemcpyAsync(b.device, b.pinned, BYTES, cudaMemcpyHostToDevice, b.stream));
    b.pinned[0] = 77;
    OK(cudaMemcpyAsync(back.data(), b.device, BYTES, cudaMemcpyDeviceToHost, b.stream));
    CHECK(back[0] == (deferred ? 77 : 0), "pinned source: %d", back[0]);
    CHECK(back[5] == 5, "to pageable memory the call waits: %d", back[5]);
    OK(cudaMemcpyAsync(b.device, pageable.data(), BYTES, cudaMemcpyDefault, b.stream));
    pageable.assign(N, 9);
    OK(cudaMemcpyAsync(back.data(), b.device, BYTES, cudaMemcpyDefault, b.stream));
    CHECK(back[0] == 3 && back[N - 1] == 3, "pageable source: %d", back[0]);
    OK(cudaMemsetAsync(b.device, 0, BYTES, b.stream));
    OK(cudaMemcpyAsync(back.data(), b.device, BYTES, cudaMemcpyDeviceToHost, b.stream));
    CHECK(back[0] == 0 && back[N - 1] == 0, "memset: %d", back[0]);
    drop(b);
}

/* Stream c reads what stream b writes; without the event, deferred work runs in another order. */
static void events_between_streams(bool with_event, bool deferred) {
    buffers b = make(), c = make();
    cudaEvent_t ready;
    OK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    OK(cudaStreamWaitEvent(c.stream, ready, 0)); /* never recorded: no wait */
    OK(cudaMemset(b.device, 0, BYTES));
    OK(cudaMemcpyAsync(b.device, b.pinned, BYTES, cudaMemcpyHostToDevice, b.stream));
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, 1000);
    OK(cudaEventRecord(ready, b.stream));
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, 1000000); /* after the event: c may not see it */
    if (with_event) OK(cudaStreamWaitEvent(c.stream, ready, 0));
    LAUNCH(copy_of, 3, 128, 0, c.stream)(c.device, b.device, N);
    OK(cudaMemcpyAsync(c.pinned, c.device, BYTES, cudaMemcpyDeviceToHost, c.stream));
    OK(cudaStreamSynchronize(c.stream));
    int want = !deferred ? 1001007 : with_event ? 1007 : 0;
    CHECK(c.pinned[7] == want, "event %d: %d, not %d", with_event, c.pinned[7], want);
    OK(cudaEventDestroy(ready));
    drop(b);
    drop(c);
}

static void queries(bool deferred) {
    buffers b = make();
    cudaEvent_t start, end;
    float milliseconds = -1;
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    OK(cudaEventQuery(end)); /* never recorded */
    OK(cudaEventRecord(start, b.stream));
    OK(cudaMemcpyAsync(b.device, b.pinned, BYTES, cudaMemcpyHostToDevice, b.stream));
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, 1);
    OK(cudaEventRecord(end, b.stream));
    LAUNCH(add, 2, 256, 0, b.stream)(b.device, N, 1);
    if (deferred)
        CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady, "not yet");
    int polls = 0;
    while (cudaEventQuery(end) == cudaErrorNotReady && polls < 100) polls++;
    CHECK(polls == (deferred ? 4 : 0), "%d polls", polls);
    OK(cudaEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0, "%g ms", (double)milliseconds);
    CHECK(cudaStreamQuery(b.stream) == (deferred ? cudaErrorNotReady : cudaSuccess), "one left");
    OK(cudaStreamQuery(b.stream));
    OK(cudaEventRecord(end, b.stream));
    OK(cudaEventSynchronize(end));
    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    drop(b);
}

static void device_and_errors() {
    int count = 0, value = 0;
    OK(cudaGetDeviceCount(&count));
    CHECK(count == 1, "%d", count);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 163 * 1024, "%d", value);
    size_t free_before, free_after, total;
    void *p, *q;
    OK(cudaMemGetInfo(&free_before, &total));
    OK(cudaMalloc(&p, 10 << 20));
    OK(cudaMemGetInfo(&free_after, &total));
    CHECK(free_before - free_after >= 10 << 20 && total >= free_before, "%zu", free_after);
    CHECK(cudaMalloc(&q, total) == cudaErrorMemoryAllocation && !q, "more than there is");
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation, "kept");
    CHECK(cudaGetLastError() == cudaSuccess, "until asked for");
    cudaPointerAttributes a;
    OK(cudaPointerGetAttributes(&a, (char *)p + 100));
    CHECK(a.type == cudaMemoryTypeDevice && a.device == 0, "%d", a.type);
    OK(cudaPointerGetAttributes(&a, &a));
    CHECK(a.type == cudaMemoryTypeUnregistered, "%d", a.type);
    CHECK(cudaMemcpyAsync(p, p, 4, cudaMemcpyHostToDevice, 0) == cudaErrorInvalidValue, "kind");
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice, "one device");
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice, "the latest");
    OK(cudaFree(p));
    OK(cudaFree(nullptr));
}

/* A report breaks the device for good, as a fault on a GPU does. */
static void reports_are_errors() {
    simt_on_report([](const char *, void *) {}, nullptr);
    void *p;
    OK(cudaMalloc(&p, 64));
    OK(cudaMemsetAsync(p, 0, 65, 0));
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure, "a memset beyond the end");
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure, "stays");
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure, "stays");
    simt_reset_errors();
    LAUNCH(add, 1, 2000, 0, 0)((int *)p, 1, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration, "2000 threads");
    simt_reset_errors();
    LAUNCH(add, 1, 32, 0, (cudaStream_t)p)((int *)p, 1, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle, "no stream");
    simt_reset_errors();
    OK(cudaFree(p));
}

int main() {
    const char *wish = getenv("TRIREME_SIMT_STREAMS");
    bool deferred = !wish || strcmp(wish, "eager") != 0;
    order_and_waits(deferred);
    host_memory_is_read(deferred);
    events_between_streams(true, deferred);
    events_between_streams(false, deferred);
    queries(deferred);
    device_and_errors();
    CHECK(simt_errors() == 0, "reports of correct work");
    reports_are_errors();
    return check_result(deferred ? "deferred streams" : "eager streams");
}
