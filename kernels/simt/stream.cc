/* stream.cc - launches, streams and events.
 * Floor: kernels.
 *
 * Work on a stream is queued and runs as late as CUDA allows: when the host waits for it, or for
 * something that comes after it. A wait or an event that is missing then shows in the results. A
 * query runs one piece of work, so that polling gets on. TRIREME_SIMT_STREAMS=eager runs all work
 * at once instead, the other extreme. The NULL stream is always eager, after all that the other
 * streams hold, except those created with cudaStreamNonBlocking. */
#include "kernels/simt/internal.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <stdlib.h>
#include <time.h>

namespace {

/* A point in a stream's work, as an event records it. */
struct moment {
    cudaStream_t stream;
    bool passed;
    double milliseconds; /* when */
};

struct operation {
    std::function<void()> run;
    std::shared_ptr<moment> wait_for; /* instead of run, if not NULL */
};

} // namespace

struct CUstream_st {
    std::deque<operation> queue;
    bool blocking; /* the NULL stream waits for it */
};

struct CUevent_st {
    std::shared_ptr<moment> recorded; /* the latest; NULL: none */
    bool timed;
};

namespace simt {

namespace {

std::vector<cudaStream_t> streams;

bool eager() {
    static const char *wish = getenv("TRIREME_SIMT_STREAMS");
    static bool is_eager = wish && strcmp(wish, "eager") == 0;
    if (wish && !is_eager && strcmp(wish, "deferred") != 0)
        refuse_setting("TRIREME_SIMT_STREAMS", "deferred or eager");
    return is_eager;
}

void pass(const moment &m);

void run_first(cudaStream_t stream) {
    operation first = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (first.wait_for)
        pass(*first.wait_for);
    else
        first.run();
}

/* What a moment depends on was queued before it, so this ends. */
void pass(const moment &m) {
    while (!m.passed) run_first(m.stream);
}

void drain_blocking() {
    for (cudaStream_t stream : streams)
        if (stream->blocking) drain(stream);
}

double now_milliseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

bool known(cudaStream_t stream) {
    return !stream || std::find(streams.begin(), streams.end(), stream) != streams.end();
}

} // namespace

void drain(cudaStream_t stream) {
    if (!stream) {
        drain_blocking();
        return;
    }
    while (!stream->queue.empty()) run_first(stream);
}

void drain_all() {
    for (cudaStream_t stream : streams) drain(stream);
}

void enqueue(cudaStream_t stream, std::function<void()> run) {
    if (!stream) drain_blocking();
    if (!stream || eager())
        run();
    else
        stream->queue.push_back({std::move(run), nullptr});
}

} // namespace simt

using namespace simt;

void simt_launch(const simt_call &call, cudaStream_t stream) {
    guard held;
    if (!known(stream)) {
        report("launch", nullptr, nullptr, "kernel %s: %p is no stream", call.name, (void *)stream);
        set_error(cudaErrorInvalidResourceHandle);
        call.release(call.arguments);
        return;
    }
    cudaError_t error = check_launch(call);
    if (error) {
        set_error(error);
        call.release(call.arguments);
        return;
    }
    enqueue(stream, [call]() { run_kernel(call); });
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    guard held;
    *stream = new CUstream_st{{}, flags != cudaStreamNonBlocking};
    streams.push_back(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    guard held;
    if (!stream || !known(stream)) return set_error(cudaErrorInvalidResourceHandle);
    drain(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream;
    return device_error();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    guard held;
    if (!known(stream)) return set_error(cudaErrorInvalidResourceHandle);
    drain(stream);
    return device_error();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    guard held;
    if (!known(stream)) return set_error(cudaErrorInvalidResourceHandle);
    if (!stream || stream->queue.empty()) return device_error();
    run_first(stream);
    return cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void) {
    guard held;
    drain_all();
    return device_error();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
    guard held;
    if (!event || !known(stream)) return set_error(cudaErrorInvalidResourceHandle);
    if (!event->recorded || event->recorded->passed) return cudaSuccess;
    if (stream)
        stream->queue.push_back({nullptr, event->recorded});
    else
        pass(*event->recorded);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    *event = new CUevent_st{nullptr, !(flags & cudaEventDisableTiming)};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!event) return set_error(cudaErrorInvalidResourceHandle);
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    guard held;
    if (!event || !known(stream)) return set_error(cudaErrorInvalidResourceHandle);
    std::shared_ptr<moment> m(new moment{stream, false, 0});
    event->recorded = m;
    enqueue(stream, [m]() {
        m->milliseconds = now_milliseconds();
        m->passed = true;
    });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    guard held;
    if (!event) return set_error(cudaErrorInvalidResourceHandle);
    if (!event->recorded || event->recorded->passed) return device_error();
    run_first(event->recorded->stream);
    return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    guard held;
    if (!event) return set_error(cudaErrorInvalidResourceHandle);
    if (event->recorded) pass(*event->recorded);
    return device_error();
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    guard held;
    if (!start || !end || !start->timed || !end->timed || !start->recorded || !end->recorded)
        return set_error(cudaErrorInvalidResourceHandle);
    if (!start->recorded->passed || !end->recorded->passed) return cudaErrorNotReady;
    *milliseconds = (float)(end->recorded->milliseconds - start->recorded->milliseconds);
    return device_error();
}
