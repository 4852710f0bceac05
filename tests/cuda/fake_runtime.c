/* fake_runtime.c - see fake_runtime.h. Compiled with CUDA's own header where there is one, so that
 * signatures are checked. Floor: tests. */
#include "fake_runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, LOG_BYTES = 1 << 16, VERSION = 13000, FREE_MIB = 5, TOTAL_MIB = 80 };

/* One thing that was made; its address is what the caller holds. */
typedef struct {
    char kind; /* 'm'emory, 'p'inned memory, 's'tream, 'e'vent */
    char *from, *to;
    int polls;
} thing;

static struct {
    char log[LOG_BYTES];
    size_t used;
    int calls, devices, driver, major, minor, event_polls;
    bool quiet; /* on questions */
    thing things[MOST];
    int count;
    const char *fail_name;
    int fail_in;
    cudaError_t fail_with, last;
} fake;

static void forget(int i) {
    free(fake.things[i].from);
    fake.things[i].from = NULL;
}

void fake_reset(void) {
    for (int i = 0; i < fake.count; i++) forget(i);
    memset(&fake, 0, sizeof fake);
    fake.devices = 1;
    fake.driver = VERSION;
    fake.major = 9;
    fake.event_polls = 1;
}

void fake_devices(int count) {
    fake.devices = count;
}
void fake_driver(int version) {
    fake.driver = version;
}
void fake_capability(int major, int minor) {
    fake.major = major;
    fake.minor = minor;
}
void fake_event_polls(int polls) {
    fake.event_polls = polls;
}

void fake_fail(const char *name, int nth, cudaError_t error) {
    fake.fail_name = name;
    fake.fail_in = nth;
    fake.fail_with = error;
}

void fake_log_questions(bool on) {
    fake.quiet = !on;
}

const char *fake_log(void) {
    return fake.log;
}
int fake_calls(void) {
    return fake.calls;
}
void fake_clear(void) {
    fake.used = 0;
    fake.calls = 0;
    fake.log[0] = '\0';
}

int fake_alive(void) {
    int alive = 0;
    for (int i = 0; i < fake.count; i++) alive += fake.things[i].from != NULL;
    return alive;
}

/* --- writing down ------------------------------------------------------------------------------
 */

/* "m2", or "m2+64" inside of it; "h" for what was not made here. One of four buffers. */
static const char *name_of(const void *address) {
    static char names[4][32];
    static int next;
    const char *at = address;
    char *name = names[next++ % 4];
    int number[128] = {0};
    for (int i = 0; i < fake.count; i++) {
        const thing *t = &fake.things[i];
        number[(int)t->kind]++;
        if (!t->from || at < t->from || at >= t->to) continue;
        if (at == t->from)
            snprintf(name, 32, "%c%d", t->kind, number[(int)t->kind]);
        else
            snprintf(name, 32, "%c%d+%td", t->kind, number[(int)t->kind], at - t->from);
        return name;
    }
    snprintf(name, 32, "h");
    return name;
}

/* Appends a line; the result says whether the call is to fail. */
static cudaError_t note(const char *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool is_question(const char *call) {
    return strstr(call, "Query") || strstr(call, "AsyncError");
}

static void append(const char *call, const char *format, va_list arguments) {
    fake.used += (size_t)snprintf(fake.log + fake.used, LOG_BYTES - fake.used, "%s", call);
    fake.used += (size_t)vsnprintf(fake.log + fake.used, LOG_BYTES - fake.used, format, arguments);
    fake.used += (size_t)snprintf(fake.log + fake.used, LOG_BYTES - fake.used, "\n");
    if (fake.used >= LOG_BYTES) abort();
}

static int write_down(const char *call, const char *format, va_list arguments) {
    if (!fake.quiet || !is_question(call)) append(call, format, arguments);
    fake.calls++;
    if (fake.fail_in == 0 || (fake.fail_name && strcmp(fake.fail_name, call) != 0)) return 0;
    return --fake.fail_in > 0 ? 0 : (int)fake.fail_with;
}

static cudaError_t note(const char *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    cudaError_t error = (cudaError_t)write_down(call, format, arguments);
    va_end(arguments);
    return error == cudaSuccess ? error : (fake.last = error);
}

int fake_note(const char *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int result = write_down(call, format, arguments);
    va_end(arguments);
    return result;
}

const char *fake_name(const void *address) {
    return name_of(address);
}

static void *make(char kind, size_t bytes) {
    thing *t = &fake.things[fake.count++];
    t->kind = kind;
    t->from = malloc(bytes ? bytes : 1);
    if (!t->from || fake.count == MOST) abort();
    t->to = t->from + (bytes ? bytes : 1);
    return t->from;
}

static cudaError_t give_back(const void *address) {
    for (int i = 0; i < fake.count; i++)
        if (fake.things[i].from == address && address) {
            forget(i);
            return cudaSuccess;
        }
    return fake.last = cudaErrorInvalidValue;
}

/* --- the device --------------------------------------------------------------------------------
 */

cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = note("cudaGetDeviceCount", " ");
    *count = fake.devices;
    if (error != cudaSuccess) return error;
    if (fake.driver < VERSION) return fake.last = cudaErrorInsufficientDriver;
    return fake.devices ? cudaSuccess : (fake.last = cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    return note("cudaSetDevice", " %d", device);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    cudaError_t error = note("cudaGetDeviceProperties", " %d", device);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Fake GPU");
    p->major = fake.major;
    p->minor = fake.minor;
    return error;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device);
    return note("cudaDeviceGetPCIBusId", " %d", device);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = fake.driver;
    return note("cudaDriverGetVersion", " ");
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = VERSION;
    return note("cudaRuntimeGetVersion", " ");
}

/* --- errors ------------------------------------------------------------------------------------
 */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = fake.last;
    fake.last = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", (int)error);
    return text;
}

/* --- memory ------------------------------------------------------------------------------------
 */

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    cudaError_t error = note("cudaMalloc", " %zu", bytes);
    if (error == cudaSuccess) *memory = make('m', bytes);
    return error;
}

cudaError_t cudaFree(void *memory) {
    cudaError_t error = note("cudaFree", " %s", name_of(memory));
    return error == cudaSuccess ? give_back(memory) : error;
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    cudaError_t error = note("cudaHostAlloc", " %zu %u", bytes, flags);
    if (error == cudaSuccess) *memory = make('p', bytes);
    return error;
}

cudaError_t cudaFreeHost(void *memory) {
    cudaError_t error = note("cudaFreeHost", " %s", name_of(memory));
    return error == cudaSuccess ? give_back(memory) : error;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = (size_t)FREE_MIB << 20;
    *total_bytes = (size_t)TOTAL_MIB << 20;
    return note("cudaMemGetInfo", " ");
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    static const char *const kinds[] = {"on-host", "to-device", "to-host", "on-device", "any"};
    return note("cudaMemcpyAsync", " %s %s %zu %s %s", name_of(to), name_of(from), bytes,
                kinds[kind], name_of(stream));
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    return note("cudaMemsetAsync", " %s %d %zu %s", name_of(memory), value, bytes, name_of(stream));
}

/* --- streams and events ------------------------------------------------------------------------
 */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    cudaError_t error = note("cudaStreamCreateWithFlags", " %u", flags);
    if (error == cudaSuccess) *stream = make('s', 1);
    return error;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t error = note("cudaStreamDestroy", " %s", name_of(stream));
    return error == cudaSuccess ? give_back(stream) : error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return note("cudaStreamSynchronize", " %s", name_of(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaError_t error = note("cudaStreamQuery", " %s", name_of(stream));
    if (error != cudaSuccess) return error;
    return --fake.event_polls > 0 ? (fake.last = cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return note("cudaStreamWaitEvent", " %s %s %u", name_of(stream), name_of(event), flags);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = note("cudaEventCreateWithFlags", " %u", flags);
    if (error == cudaSuccess) *event = make('e', 1);
    return error;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t error = note("cudaEventDestroy", " %s", name_of(event));
    return error == cudaSuccess ? give_back(event) : error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return note("cudaEventRecord", " %s %s", name_of(event), name_of(stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    cudaError_t error = note("cudaEventQuery", " %s", name_of(event));
    if (error != cudaSuccess) return error;
    return --fake.event_polls > 0 ? (fake.last = cudaErrorNotReady) : cudaSuccess;
}
