/* maker.c - who computes attention: the CPU's levels in host memory, or a device on copies of what
 * a call names. Floor: tests. */
#include "problem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256 };

maker makers[MAKERS] = {{.name = "ref"},    {.name = "portable"},   {.name = "avx2"},
                        {.name = "avx512"}, {.name = "avx512bf16"}, {.name = "simt"},
                        {.name = "cuda"},   {.name = "simt-check"}};

/* --- which there are ---------------------------------------------------------------------------
 */

static bool listed(const char *name) {
    const char *list = getenv("TRIREME_TEST_MAKERS");
    size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == '\0'))
            return true;
    }
    return false;
}

static void open_level(maker *m, int level) {
    if (level < 0)
        tr_ref_attention(&m->k);
    else
        tr_cpu_attention(&m->k, (tr_cpu_level)level);
    m->here = level <= (int)tr_cpu_best_level();
    if (!m->here) printf("%s: skipped, this processor lacks it\n", m->name);
}

static void open_device(maker *m) {
    m->device = tr_device_open(&(tr_device_wish){.name = m->name});
    m->here = m->device != NULL;
    if (m->here) return;
    printf("%s: %s\n", m->name, tr_error_message());
    exit(1); /* it was asked for by name */
}

void makers_init(void) {
    const char *list = getenv("TRIREME_TEST_MAKERS");
    for (int i = 0; i < MAKERS; i++) {
        bool cpu = i < CPU_MAKERS, wanted = list && *list ? listed(makers[i].name) : cpu;
        if (wanted && cpu) open_level(&makers[i], i - 1);
        if (wanted && !cpu) open_device(&makers[i]);
    }
}

void makers_fini(void) {
    for (int i = 0; i < MAKERS; i++) tr_device_destroy(makers[i].device);
}

const maker *next_maker(const maker *m) {
    for (m = m ? m + 1 : makers; m < makers + MAKERS; m++)
        if (m->here) return m;
    return NULL;
}

/* --- copies ------------------------------------------------------------------------------------
 */

/* Memory that a call names, and its copy. */
typedef struct {
    void *host;
    size_t bytes, shift; /* the copy lies as far from an aligned address as the original */
    bool written;
    char *block;
} region;

enum { REGIONS = 14 };

typedef struct {
    const maker *m;
    region regions[REGIONS];
    int count;
} mirror;

static size_t block_bytes(const region *r) {
    return r->shift + r->bytes + 2 * GUARD;
}

/* The copy of `bytes` at `host`; NULL of NULL. */
static void *mirrored(mirror *x, const void *host, size_t bytes, bool written) {
    if (!host) return NULL;
    tr_device *d = x->m->device;
    region *r = &x->regions[x->count++];
    *r = (region){(void *)(uintptr_t)host, bytes, (uintptr_t)host % 64, written, NULL};
    char *image = malloc(block_bytes(r));
    r->block = tr_allocator_take(&d->allocator, block_bytes(r), "a test");
    if (!image || !r->block) fail_msg("%s", tr_error_message());
    memset(image, 0xff, block_bytes(r));
    memcpy(image + GUARD + r->shift, host, bytes);
    d->copy(d->stream, r->block, image, block_bytes(r), TR_TO_DEVICE);
    d->stream_wait(d->stream);
    free(image);
    return r->block + GUARD + r->shift;
}

static void check_guards(const mirror *x, const region *r, const char *image) {
    size_t first = GUARD + r->shift, all = block_bytes(r);
    for (size_t i = 0; i < all; i++)
        if ((i < first || i >= first + r->bytes) && image[i] != (char)0xff)
            fail_msg("%s: a kernel wrote outside of %zu bytes", x->m->name, r->bytes);
}

static void bring_back(mirror *x) {
    tr_device *d = x->m->device;
    for (int i = 0; i < x->count; i++) {
        region *r = &x->regions[i];
        char *image = malloc(block_bytes(r));
        assert_non_null(image);
        d->copy(d->stream, image, r->block, block_bytes(r), TR_TO_HOST);
        d->stream_wait(d->stream);
        check_guards(x, r, image);
        if (r->written) memcpy(r->host, image + GUARD + r->shift, r->bytes);
        tr_allocator_give(&d->allocator, r->block, block_bytes(r));
        free(image);
    }
}

/* Bytes from the first to behind the last element of [B, S] rows of `width`. */
static size_t span(int64_t B, int64_t S, int64_t batch, int64_t row, int64_t width, tr_dtype t) {
    if (B == 0 || S == 0 || width == 0) return 0;
    return (size_t)((B - 1) * batch + (S - 1) * row + width) * tr_dtype_bytes(t);
}

static tr_attention copies_of(mirror *x, const tr_attention *a, bool backward) {
    tr_attention c = *a;
    int64_t B = a->B, q = a->Hq * a->Dqk, k = a->Hkv * a->Dqk, v = a->Hkv * a->Dv;
    int64_t o = a->Hq * a->Dv;
    size_t heads = (size_t)a->Hq * sizeof(float), rows = (size_t)(B * a->Sq) * sizeof(int32_t);
    c.q = mirrored(x, a->q, span(B, a->Sq, a->q_batch, a->q_row, q, a->t), false);
    c.k = mirrored(x, a->k, span(B, a->Sk, a->k_batch, a->k_row, k, a->t), false);
    c.v = mirrored(x, a->v, span(B, a->Sk, a->v_batch, a->v_row, v, a->t), false);
    c.out = mirrored(x, a->out, span(B, a->Sq, a->out_batch, a->out_row, o, a->out_t), !backward);
    c.lse =
        mirrored(x, a->lse, span(B, a->Hq, a->lse_batch, a->lse_head, a->Sq, TR_F32), !backward);
    c.sink = mirrored(x, a->sink, heads, false);
    c.mask.doc_begin = mirrored(x, a->mask.doc_begin, rows, false);
    c.mask.doc_end = mirrored(x, a->mask.doc_end, rows, false);
    if (!backward) return c;
    c.dout = mirrored(x, a->dout, span(B, a->Sq, a->dout_batch, a->dout_row, o, a->t), false);
    c.dq = mirrored(x, a->dq, span(B, a->Sq, a->q_batch, a->q_row, q, a->grad_t), true);
    c.dk = mirrored(x, a->dk, span(B, a->Sk, a->k_batch, a->k_row, k, a->grad_t), true);
    c.dv = mirrored(x, a->dv, span(B, a->Sk, a->v_batch, a->v_row, v, a->grad_t), true);
    c.dsink = mirrored(x, a->dsink, heads, true);
    return c;
}

/* --- calls -------------------------------------------------------------------------------------
 */

static int64_t findings_of(tr_device *d) {
    return d->findings ? d->findings(d) : 0;
}

static void run_on_device(const maker *m, const tr_attention *a, bool backward) {
    tr_device *d = m->device;
    mirror x = {.m = m};
    tr_attention copies = copies_of(&x, a, backward);
    int64_t before = findings_of(d);
    if (backward)
        d->kernels->attention_backward(d->stream, &copies);
    else
        d->kernels->attention_forward(d->stream, &copies);
    d->stream_wait(d->stream);
    bring_back(&x);
    if (findings_of(d) > before)
        fail_msg("%s: the runtime has %lld findings", m->name,
                 (long long)(findings_of(d) - before));
}

void run_forward(const maker *m, const tr_attention *a) {
    if (m->device)
        run_on_device(m, a, false);
    else
        m->k.attention_forward(NULL, a);
}

void run_backward(const maker *m, const tr_attention *a) {
    if (m->device)
        run_on_device(m, a, true);
    else
        m->k.attention_backward(NULL, a);
}
