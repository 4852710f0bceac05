/* harness.c - makers, guarded tensors, comparisons. Floor: tests. */
#include "harness.h"

#include "base/rng.h"
#include "base/status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64 };

/* --- makers ------------------------------------------------------------------------------------
 */

static const char cpu_levels[] = "ref,portable,avx2,avx512,avx512bf16";

static bool is_level(const char *name) {
    const char *at = strstr(cpu_levels, name);
    size_t length = strlen(name);
    return at && (at == cpu_levels || at[-1] == ',') && (at[length] == ',' || at[length] == '\0');
}

static tr_device *open_device(const char *name) {
    if (is_level(name)) return tr_device_cpu(name);
    return tr_device_open(&(tr_device_wish){.name = name});
}

static int64_t findings_of(tr_device *device) {
    return device->findings ? device->findings(device) : 0;
}

static void run_on(const kt_case *test, const char *name) {
    kt_maker m = {.name = name, .device = open_device(name)};
    if (!m.device) {
        if (!is_level(name)) fail_msg("%s: %s", name, tr_error_message());
        printf("  %-10s skipped: %s\n", name, tr_error_message());
        return;
    }
    m.k = m.device->kernels;
    m.s = m.device->stream_create(m.device);
    int64_t before = findings_of(m.device);
    test->run(&m);
    m.device->stream_wait(m.s);
    int64_t found = findings_of(m.device) - before;
    kt_release(&m);
    m.device->stream_destroy(m.s);
    tr_device_destroy(m.device);
    if (found > 0) fail_msg("%s: the runtime has %lld findings", name, (long long)found);
}

void kt_run(void **state) {
    const char *wish = getenv("TRIREME_TEST_MAKERS");
    char list[256];
    snprintf(list, sizeof list, "%s", wish && *wish ? wish : cpu_levels);
    for (char *rest = list, *name; (name = strsep(&rest, ","));) run_on(*state, name);
}

int kt_threads(const kt_maker *m, int most) {
    if (m->device->host_memory) return most;
    printf("  %-10s 3 to %d threads skipped: the host's threads are not its\n", m->name, most);
    return 2;
}

/* --- numbers -----------------------------------------------------------------------------------
 */

double kt_round(tr_dtype t, double x) {
    if (t == TR_F32) return (double)(float)x;
    return t == TR_BF16 ? (double)tr_bf16_to_f32(tr_f32_to_bf16((float)x)) : x;
}

double kt_tolerance(tr_dtype t) {
    return t == TR_BF16 ? 8e-3 : 1e-5;
}

static void store(tr_dtype t, void *to, int64_t i, double x) {
    switch (t) {
    case TR_F32:
        ((float *)to)[i] = (float)x;
        return;
    case TR_BF16:
        ((tr_bf16 *)to)[i] = tr_f32_to_bf16((float)x);
        return;
    case TR_F64:
        ((double *)to)[i] = x;
        return;
    case TR_I32:
        ((int32_t *)to)[i] = (int32_t)x;
        return;
    case TR_I64:
        ((int64_t *)to)[i] = (int64_t)x;
        return;
    case TR_U8:
        ((uint8_t *)to)[i] = (uint8_t)x;
        return;
    }
}

static double load(tr_dtype t, const void *from, int64_t i) {
    switch (t) {
    case TR_F32:
        return (double)((const float *)from)[i];
    case TR_BF16:
        return (double)tr_bf16_to_f32(((const tr_bf16 *)from)[i]);
    case TR_F64:
        return ((const double *)from)[i];
    case TR_I32:
        return ((const int32_t *)from)[i];
    case TR_I64:
        return (double)((const int64_t *)from)[i];
    case TR_U8:
        return ((const uint8_t *)from)[i];
    }
    return 0;
}

static void *host_memory(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    return p;
}

/* Stages guard, values, guard and copies them up. */
static void upload(kt_maker *m, kt_tensor *x) {
    size_t body = x->bytes - 2 * GUARD;
    char *host = host_memory(x->bytes);
    memset(host, 0xff, x->bytes);
    void *values = host_memory(body);
    for (int64_t i = 0; i < x->n; i++) store(x->t, values, i, x->value[i]);
    memcpy(host + GUARD, values, body);
    m->device->copy(m->s, x->block, host, x->bytes, TR_TO_DEVICE);
    m->device->stream_wait(m->s);
    free(values);
    free(host);
}

static kt_tensor *tensor(kt_maker *m, tr_dtype t, int64_t n) {
    kt_tensor *x = host_memory(sizeof *x);
    size_t bytes = (size_t)n * tr_dtype_bytes(t) + 2 * GUARD;
    const tr_allocator *a = &m->device->allocator;
    *x = (kt_tensor){.t = t, .n = n, .bytes = bytes, .next = m->tensors};
    x->block = a->alloc(a->self, bytes);
    assert_non_null(x->block);
    x->data = x->block + GUARD;
    x->value = host_memory((size_t)n * sizeof(double));
    m->tensors = x;
    return x;
}

kt_tensor *kt_from(kt_maker *m, tr_dtype t, int64_t n, const double *value) {
    kt_tensor *x = tensor(m, t, n);
    for (int64_t i = 0; i < n; i++) x->value[i] = kt_round(t, value[i]);
    upload(m, x);
    return x;
}

kt_tensor *kt_normal(kt_maker *m, tr_dtype t, int64_t n, double scale) {
    kt_tensor *x = tensor(m, t, n);
    uint64_t stream = m->streams++;
    for (int64_t i = 0; i < n; i++)
        x->value[i] = kt_round(t, scale * (double)tr_random_normal(1, stream, (uint64_t)i));
    upload(m, x);
    return x;
}

kt_tensor *kt_integers(kt_maker *m, tr_dtype t, int64_t n, int64_t low, int64_t high) {
    kt_tensor *x = tensor(m, t, n);
    uint64_t stream = m->streams++;
    for (int64_t i = 0; i < n; i++) {
        double u = tr_random_uniform(2, stream, (uint64_t)i);
        x->value[i] = floor((double)low + u * (double)(high - low));
    }
    upload(m, x);
    return x;
}

kt_tensor *kt_filled(kt_maker *m, tr_dtype t, int64_t n, double value) {
    kt_tensor *x = tensor(m, t, n);
    for (int64_t i = 0; i < n; i++) x->value[i] = kt_round(t, value);
    upload(m, x);
    return x;
}

void kt_release(kt_maker *m) {
    const tr_allocator *a = &m->device->allocator;
    while (m->tensors) {
        kt_tensor *x = m->tensors;
        m->tensors = x->next;
        a->free(a->self, x->block, x->bytes);
        free(x->value);
        free(x);
    }
}

const double *kt_read(kt_maker *m, kt_tensor *x) {
    char *host = host_memory(x->bytes);
    m->device->copy(m->s, host, x->block, x->bytes, TR_TO_HOST);
    m->device->stream_wait(m->s);
    for (size_t i = 0; i < GUARD; i++)
        if (host[i] != (char)0xff || host[x->bytes - 1 - i] != (char)0xff)
            fail_msg("%s: a kernel wrote outside a tensor of %lld elements", m->name,
                     (long long)x->n);
    for (int64_t i = 0; i < x->n; i++) x->value[i] = load(x->t, host + GUARD, i);
    free(host);
    return x->value;
}

static void report(const kt_maker *m, double residual, double tolerance, const char *text) {
    printf("  %-10s %-52s residual %9.2e  tolerance %.0e\n", m->name, text, residual, tolerance);
    if (!(residual <= tolerance)) fail_msg("%s: %s is off by %g", m->name, text, residual);
}

/* 0 for equal values (infinities and NaN included), infinity for a non-finite mismatch. */
static double deviation(double got, double want) {
    if (got == want || (isnan(got) && isnan(want))) return 0;
    return isfinite(got) && isfinite(want) ? fabs(got - want) : INFINITY;
}

void kt_check(kt_maker *m, kt_tensor *got, const double *want, double tolerance, const char *what,
              ...) {
    char text[200];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    const double *x = kt_read(m, got);
    double sum = 0, residual = 0;
    for (int64_t i = 0; i < got->n; i++)
        if (isfinite(want[i])) sum += want[i] * want[i];
    double rms = got->n ? sqrt(sum / (double)got->n) : 0;
    for (int64_t i = 0; i < got->n; i++) {
        double d = deviation(x[i], want[i]);
        if (isfinite(d) && d > 0) d /= fabs(want[i]) + rms;
        if (d > residual) residual = d;
    }
    report(m, residual, tolerance, text);
}

void kt_check_number(kt_maker *m, double got, double want, double tolerance, const char *what,
                     ...) {
    char text[200];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    double d = deviation(got, want);
    report(m, isfinite(d) ? d / fmax(fabs(want), 1) : d, tolerance, text);
}

double kt_difference(kt_maker *m, kt_tensor *x, int64_t i, double step,
                     double (*f)(kt_maker *m, void *context), void *context) {
    double old = x->value[i], at[2], f_at[2];
    for (int side = 0; side < 2; side++) {
        at[side] = kt_round(x->t, old + (side ? step : -step));
        x->value[i] = at[side];
        upload(m, x);
        f_at[side] = f(m, context);
    }
    x->value[i] = old;
    upload(m, x);
    return (f_at[1] - f_at[0]) / (at[1] - at[0]);
}
