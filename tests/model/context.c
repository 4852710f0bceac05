/* Property: whatever ranks do together to attend to a sequence (rings, exchanged heads, both), out
 * and gradients are those of one kernel call over all of it; documents do not touch each other, bit
 * for bit; and of keys, values and their gradients only what some query sees is sent, counted. */
#include "model/layers.h"
#include "tests/dist/mpi_check.h"

#include "base/rng.h"

#include <math.h>

enum { D = 4 };

typedef struct {
    int64_t B, S, Hq, Hkv, window;
    int documents; /* mean length: 0 one document, 1 each token its own */
} shape;

/* What one kernel call over the whole sequence takes and gives, layouts [B, S, heads, D]. */
typedef struct {
    shape s;
    int32_t *begin;            /* [B, S] */
    float *q, *k, *v, *dout;   /* in */
    float *out, *dq, *dk, *dv; /* computed */
    float *lse;
} whole;

/* This rank's attention, as model.c surrounds it. */
typedef struct {
    tr_device *device;
    tr_allocator poisoned;
    tr_model_config config;
    tr_grid *grid;
    tr_env env;
    tr_arena *kept, *fixed;
    tr_saved saved;
    tr_pass pass;
    int32_t *begin;
    int64_t *first_key;
    float *q, *kv, *dout, *dq, *dkv; /* own rows */
    int64_t sent_before[2];          /* in the ring, in the head group */
} part;

static int64_t sent(const part *p, bool ring) {
    return tr_comm_sent(p->grid->comm[ring ? TR_GROUP_RING : TR_GROUP_HEADS]).bytes -
           p->sent_before[!ring];
}

static void *checked(void *memory) {
    if (!memory) tr_abort("no memory");
    return memory;
}

static float *floats(int64_t n) {
    float *x = checked(malloc((size_t)(n + 1) * sizeof *x));
    for (int64_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}

static float *random_floats(int64_t n, uint64_t stream) {
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = tr_random_normal(3, stream, (uint64_t)i);
    return x;
}

/* Memory from the system full of NaN. */
static void *alloc_poisoned(void *self, size_t bytes) {
    const tr_allocator *host = self;
    void *memory = checked(host->alloc(host->self, bytes));
    return memset(memory, 0xff, bytes);
}
static void free_poisoned(void *self, void *memory, size_t bytes) {
    const tr_allocator *host = self;
    host->free(host->self, memory, bytes);
}

/* --- the whole -----------------------------------------------------------------------------------
 */

static void compute(const whole *w, const tr_kernels *kernels) {
    const shape *s = &w->s;
    int64_t q = s->Hq * D, kv = s->Hkv * D;
    tr_attention a = {
        .B = s->B,
        .Sq = s->S,
        .Sk = s->S,
        .Hq = s->Hq,
        .Hkv = s->Hkv,
        .Dqk = D,
        .Dv = D,
        .scale = 1.0f / sqrtf(D),
        .mask = {.causal = true, .window = s->window, .doc_begin = s->documents ? w->begin : NULL},
        .q = w->q,
        .k = w->k,
        .v = w->v,
        .q_row = q,
        .q_batch = s->S * q,
        .k_row = kv,
        .k_batch = s->S * kv,
        .v_row = kv,
        .v_batch = s->S * kv,
        .out = w->out,
        .out_row = q,
        .out_batch = s->S * q,
        .lse = w->lse,
        .lse_batch = s->Hq * s->S,
        .lse_head = s->S,
        .dout = w->dout,
        .dout_row = q,
        .dout_batch = s->S * q,
        .dq = w->dq,
        .dk = w->dk,
        .dv = w->dv};
    kernels->attention_forward(NULL, &a);
    kernels->attention_backward(NULL, &a);
}

static whole make_whole(const shape *s) {
    int64_t q = s->B * s->S * s->Hq * D, kv = s->B * s->S * s->Hkv * D;
    whole w = {.s = *s,
               .begin = checked(malloc((size_t)(s->B * s->S) * sizeof *w.begin)),
               .q = random_floats(q, 1),
               .k = random_floats(kv, 2),
               .v = random_floats(kv, 3),
               .dout = random_floats(q, 4),
               .out = floats(q),
               .dq = floats(q),
               .dk = floats(kv),
               .dv = floats(kv),
               .lse = floats(s->B * s->S * s->Hq)};
    for (int64_t n = 0; n < s->B * s->S; n++) {
        bool begins = n % s->S == 0 || (s->documents > 0 &&
                                        tr_random_uniform(3, 5, (uint64_t)n) < 1.0 / s->documents);
        w.begin[n] = begins ? (int32_t)(n % s->S) : w.begin[n - 1];
    }
    return w;
}

static void free_whole(whole *w) {
    float *all[] = {w->q, w->k, w->v, w->dout, w->out, w->dq, w->dk, w->dv, w->lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w->begin);
}

/* --- the part of a rank --------------------------------------------------------------------------
 */

/* Copies own rows of one tensor from the whole, or compares them with it. The largest difference,
 * relative to the largest value; `exactly`: that of rows outside document 0 of sequence 0, any. */
static double own_rows(const part *p, const whole *w, float *own, const float *all, int64_t width,
                       bool copy) {
    const tr_env *c = &p->env;
    double off = 0, most = 1e-30;
    for (int64_t n = 0; n < c->N; n++) {
        int64_t at = tr_sequence_position(&c->cut, c->grid->at.c, n % c->S_loc);
        const float *from = all + (n / c->S_loc * w->s.S + at) * width;
        float *to = own + n * width;
        for (int64_t i = 0; i < width; i++) {
            if (copy) to[i] = from[i];
            double d = fabs((double)to[i] - (double)from[i]), size = fabs((double)from[i]);
            if (!(d <= off)) off = d;
            if (size > most) most = size;
        }
    }
    return off / most;
}

static void place_documents(part *p, const whole *w) {
    const tr_env *c = &p->env;
    const tr_sequence *x = &c->cut;
    p->begin = checked(malloc((size_t)(c->B * x->S_ring + 1) * sizeof *p->begin));
    p->first_key = checked(malloc((size_t)(2 * x->rings) * sizeof *p->first_key));
    for (int64_t j = 0; j < x->S_ring; j++)
        for (int64_t b = 0; b < c->B; b++)
            p->begin[(j / x->chunk * c->B + b) * x->chunk + j % x->chunk] =
                w->begin[b * x->S + tr_sequence_ring_position(x, c->grid->at.c / x->heads, j)];
    for (int k = 0; k < x->rings * x->chunks; k++) {
        p->first_key[k] = x->S;
        for (int64_t b = 0; b < c->B; b++)
            if (w->begin[b * x->S + k * x->chunk] < p->first_key[k])
                p->first_key[k] = w->begin[b * x->S + k * x->chunk];
    }
}

static void open_part(part *p, tr_comm *comm, int heads, const whole *w) {
    const shape *s = &w->s;
    *p = (part){.device = tr_device_cpu(NULL),
                .config = {.num_attention_heads = s->Hq,
                           .num_key_value_heads = s->Hkv,
                           .head_dim = D,
                           .sliding_window = s->window}};
    p->poisoned = (tr_allocator){
        .alloc = alloc_poisoned, .free = free_poisoned, .self = &p->device->allocator};
    p->grid = tr_grid_create(comm, (tr_grid_shape){.pipeline = 1,
                                                   .data = 1,
                                                   .context = tr_comm_size(comm),
                                                   .expert = 1,
                                                   .tensor = 1,
                                                   .context_heads = heads});
    tr_env *c = &p->env;
    *c = (tr_env){.config = &p->config,
                  .grid = p->grid,
                  .device = p->device,
                  .kernels = p->device->kernels,
                  .t = TR_F32,
                  .scratch = tr_arena_create(&p->poisoned, 1 << 16)};
    tr_env_shape(c, s->B, s->S);
    p->kept = tr_arena_create(&p->poisoned, 1 << 16);
    p->fixed = tr_arena_create(&p->poisoned, 1 << 16);
    tr_heads_open(c, p->fixed);
    tr_saved_init(c, &p->saved, false, 0);
    place_documents(p, w);
    p->pass = (tr_pass){.c = c,
                        .kept = p->kept,
                        .training = true,
                        .begin = s->documents ? p->begin : NULL,
                        .first_key = s->documents ? p->first_key : NULL};
    p->q = floats(c->N * s->Hq * D);
    p->kv = floats(2 * c->N * s->Hkv * D);
    p->dout = floats(c->N * s->Hq * D);
    p->dq = floats(c->N * s->Hq * D);
    p->dkv = floats(2 * c->N * s->Hkv * D);
    for (int i = 0; i < 2; i++) p->sent_before[i] = sent(p, i == 0);
}

static void close_part(part *p) {
    tr_heads_close(&p->env);
    tr_saved_fini(&p->saved);
    tr_arena_destroy(p->kept);
    tr_arena_destroy(p->fixed);
    tr_arena_destroy(p->env.scratch);
    tr_grid_destroy(p->grid);
    tr_device_destroy(p->device);
    free(p->begin);
    free(p->first_key);
    free(p->q);
    free(p->kv);
    free(p->dout);
    free(p->dq);
    free(p->dkv);
}

/* As tr_attention_layer_forward and backward do it. */
static void attend(part *p, const whole *w) {
    const tr_env *c = &p->env;
    const tr_pass *pass = &p->pass;
    int64_t q = w->s.Hq * D, kv = w->s.Hkv * D;
    own_rows(p, w, p->q, w->q, q, true);
    own_rows(p, w, p->kv, w->k, kv, true);
    own_rows(p, w, p->kv + c->N * kv, w->v, kv, true);
    own_rows(p, w, p->dout, w->dout, q, true);
    tr_request *keys = tr_attend_share(pass, &p->saved, TR_SAVED_KV, p->kv);
    tr_end(tr_attend_share(pass, &p->saved, TR_SAVED_Q, p->q));
    tr_end(keys);
    tr_attend(pass, &p->saved);
    void *dout = tr_heads_room(c, TR_SAVED_Q, p->dout), *dq = tr_heads_room(c, TR_SAVED_Q, p->dq);
    void *dkv = tr_heads_room(c, TR_SAVED_KV, p->dkv);
    tr_end(tr_heads_spread(c, TR_SAVED_Q, p->dout, dout));
    tr_ring_backward(pass, &p->saved, dout, dq, dkv);
    tr_return queries = tr_heads_return_begin(c, TR_SAVED_Q, dq);
    tr_return gradients = tr_heads_return_begin(c, TR_SAVED_KV, dkv);
    tr_heads_return_end(c, &queries, p->dq);
    tr_heads_return_end(c, &gradients, p->dkv);
}

/* --- what is sent --------------------------------------------------------------------------------
 */

/* Element by element: whether some query of a chunk sees some key of another. */
static bool any_pair(const whole *w, int64_t C, int64_t q_chunk, int64_t k_chunk) {
    for (int64_t b = 0; b < w->s.B; b++)
        for (int64_t q = q_chunk * C; q < (q_chunk + 1) * C; q++)
            for (int64_t k = k_chunk * C; k < (k_chunk + 1) * C; k++)
                if (k <= q && (w->s.window == 0 || k > q - w->s.window) &&
                    (!w->s.documents || k >= w->begin[b * w->s.S + q]))
                    return true;
    return false;
}

/* Chunks of keys that ring place r owes to others. */
static int64_t owed(const whole *w, int rings, int r) {
    int64_t C = w->s.S / (2 * rings), chunks = 0;
    for (int to = 0; to < rings; to++)
        for (int half = 0; half < 2 && to != r; half++) {
            int64_t k = half ? 2 * rings - 1 - r : r;
            chunks += any_pair(w, C, to, k) || any_pair(w, C, 2 * rings - 1 - to, k);
        }
    return chunks;
}

/* Chunks whose gradients ring place r owes to their owners. */
static int64_t owed_back(const whole *w, int rings, int r) {
    int64_t C = w->s.S / (2 * rings), chunks = 0;
    for (int64_t k = 0; k < 2 * rings; k++)
        chunks += k != r && k != 2 * rings - 1 - r &&
                  (any_pair(w, C, r, k) || any_pair(w, C, 2 * rings - 1 - r, k));
    return chunks;
}

static void check_sent(const part *p, const whole *w) {
    const tr_sequence *x = &p->env.cut;
    int64_t here = p->grid->at.c / x->heads, got = sent(p, true);
    int64_t block = 2 * p->env.B * x->chunk * p->env.Akv * D * (int64_t)sizeof(float);
    int64_t want =
        x->rings == 1
            ? 0
            : block * (2 * owed(w, x->rings, (int)here) + owed_back(w, x->rings, (int)here));
    TR_CHECK(got == want, "sent %lld bytes, not %lld", (long long)got, (long long)want);
    int64_t sums[2] = {got, 0}, q = p->env.N * w->s.Hq * D,
            kv = 2 * p->env.N * x->heads * p->env.Akv * D;
    if (x->heads > 1) { /* queries, out, their gradients; keys and values and theirs */
        got = sent(p, false);
        want = (4 * q + 2 * kv) / x->heads * (x->heads - 1) * (int64_t)sizeof(float);
        TR_CHECK(got == want, "exchanged %lld bytes, not %lld", (long long)got, (long long)want);
        sums[1] = got;
    }
    tr_end(tr_all_reduce_begin(p->grid->comm[TR_GROUP_WORLD], NULL, TR_SUM, TR_I64, sums, 2));
    if (p->grid->at.rank == 0)
        printf(", rings sent %lld, head groups %lld bytes\n", (long long)sums[0],
               (long long)sums[1]);
}

/* --- cases ---------------------------------------------------------------------------------------
 */

/* Changes all of document 0 of sequence 0: rows elsewhere keep their bits, forward and backward. */
static void check_documents_apart(part *p, whole *w) {
    const tr_env *c = &p->env;
    int64_t q = w->s.Hq * D, kv = w->s.Hkv * D;
    float *before[3] = {floats(c->N * q), floats(c->N * q), floats(2 * c->N * kv)};
    const float *now[3] = {p->saved.t[TR_SAVED_ATTN], p->dq, p->dkv};
    const int64_t width[3] = {q, q, kv}, rows[3] = {c->N, c->N, 2 * c->N};
    for (int i = 0; i < 3; i++)
        memcpy(before[i], now[i], (size_t)(rows[i] * width[i]) * sizeof(float));
    for (int64_t n = 0; n < w->s.S && w->begin[n] == 0; n++)
        for (int64_t i = 0; i < q; i++) {
            w->q[n * q + i] *= 37;
            w->dout[n * q + i] *= 37;
            if (i < kv) w->k[n * kv + i] *= -37, w->v[n * kv + i] *= 37;
        }
    attend(p, w);
    now[0] = p->saved.t[TR_SAVED_ATTN];
    for (int i = 0; i < 3; i++)
        for (int64_t n = 0; n < rows[i]; n++) {
            int64_t b = n % c->N / c->S_loc;
            int64_t at = tr_sequence_position(&c->cut, c->grid->at.c, n % c->S_loc);
            bool same = memcmp(before[i] + n * width[i], now[i] + n * width[i],
                               (size_t)width[i] * sizeof(float)) == 0;
            if (b > 0 || w->begin[at] > 0)
                TR_CHECK(same, "tensor %d, position %lld changed", i, (long long)at);
        }
    for (int i = 0; i < 3; i++) free(before[i]);
}

static bool fits(const shape *s, int size, int heads) {
    int64_t unit = heads < size ? size / heads * 2 : size;
    bool kv = s->Hkv % heads == 0 || heads % s->Hkv == 0;
    return size % heads == 0 && s->Hq % heads == 0 && kv && s->S % unit == 0 && s->S % size == 0;
}

static void check(tr_comm *world, int heads, const shape *s) {
    whole w = make_whole(s);
    part p;
    if (tr_comm_rank(world) == 0)
        printf("%d of %d exchange heads: B %lld S %lld heads %lld/%lld window %lld documents %d",
               heads, tr_comm_size(world), (long long)s->B, (long long)s->S, (long long)s->Hq,
               (long long)s->Hkv, (long long)s->window, s->documents);
    open_part(&p, world, heads, &w);
    compute(&w, p.env.kernels);
    attend(&p, &w);
    check_sent(&p, &w);
    const tr_env *c = &p.env;
    int64_t q = s->Hq * D, kv = s->Hkv * D;
    double limit = p.env.cut.size == 1 ? 0 : 3e-6; /* alone it is the same call */
    struct {
        const char *name;
        float *own;
        const float *all;
        int64_t width;
    } rows[] = {{"out", p.saved.t[TR_SAVED_ATTN], w.out, q},
                {"dq", p.dq, w.dq, q},
                {"dk", p.dkv, w.dk, kv},
                {"dv", p.dkv + c->N * kv, w.dv, kv}};
    for (int i = 0; i < 4; i++) {
        double off = own_rows(&p, &w, rows[i].own, rows[i].all, rows[i].width, false);
        TR_CHECK(off <= limit, "%s is off by %.1e", rows[i].name, off);
    }
    if (s->documents) check_documents_apart(&p, &w);
    close_part(&p);
    free_whole(&w);
}

static void equals_one_call(tr_comm *world) {
    static const shape shapes[] = {
        {1, 48, 12, 12, 0, 0},    {2, 48, 12, 4, 0, 0}, {3, 96, 12, 2, 0, 7},
        {1, 480, 12, 1, 0, 60},   {2, 96, 12, 3, 5, 0}, {1, 480, 12, 6, 61, 0},
        {2, 480, 12, 4, 100, 90}, {2, 48, 12, 6, 0, 1},
    };
    for (int heads = 1; heads <= tr_comm_size(world); heads++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if (fits(&shapes[i], tr_comm_size(world), heads)) check(world, heads, &shapes[i]);
}

/* A window, and documents, of an eighth of the sequence: how much less is sent. */
static void masks_send_less(tr_comm *world) {
    static const shape shapes[] = {
        {1, 960, 2, 2, 0, 0}, {1, 960, 2, 2, 60, 0}, {1, 960, 2, 2, 0, 30}};
    int64_t bytes[3];
    for (int i = 0; i < 3; i++) {
        whole w = make_whole(&shapes[i]);
        part p;
        open_part(&p, world, 1, &w);
        attend(&p, &w);
        bytes[i] = sent(&p, true);
        tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_I64, &bytes[i], 1));
        if (i > 0 && tr_comm_size(world) > 1)
            TR_CHECK(10 * bytes[i] < 7 * bytes[0], "%lld of %lld bytes", (long long)bytes[i],
                     (long long)bytes[0]);
        close_part(&p);
        free_whole(&w);
    }
    if (tr_comm_rank(world) == 0)
        printf("causal %lld bytes, window %lld, documents %lld\n", (long long)bytes[0],
               (long long)bytes[1], (long long)bytes[2]);
}

static const mpi_case cases[] = {{"equals one call", equals_one_call},
                                 {"masks send less", masks_send_less}};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    int failed = mpi_check_all(world, cases, sizeof cases / sizeof *cases);
    tr_comm_set_synchronous(true);
    tr_comm_set_chunk_limit(1000);
    failed += mpi_check_all(world, cases, sizeof cases / sizeof *cases);
    tr_comm_stop(world);
    return failed != 0;
}
