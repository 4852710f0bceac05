/* flips.c - collects routing decisions and compares two jobs'. Floor: train. */
#include "train/flips.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

enum { TAG_COUNT = 22, TAG_PLACE = 23, TAG_GAP = 24, TAG_EXPERTS = 25 };

struct tr_routes {
    /* borrowed */
    tr_job *job;
    const tr_batches *batches;
    /* derived */
    int64_t tokens; /* of the step's batch */
    int64_t k;      /* experts a token */
    /* state: a row for each layer and token seen here */
    int64_t count, capacity;
    int64_t *place;  /* [count] layer * tokens + token */
    float *gap;      /* [count] */
    int32_t *chosen; /* [count, k] ascending */
};

static void reserve(tr_routes *r, int64_t count) {
    if (count <= r->capacity) return;
    r->capacity = count > 2 * r->capacity ? count : 2 * r->capacity;
    r->place = tr_heap_resize(r->place, r->capacity, sizeof *r->place);
    r->gap = tr_heap_resize(r->gap, r->capacity, sizeof *r->gap);
    r->chosen = tr_heap_resize(r->chosen, r->capacity * r->k, sizeof *r->chosen);
}

static int by_number(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static void watch(void *self, int64_t layer, const int32_t *index, const float *gap) {
    tr_routes *r = self;
    int64_t N = tr_batches_rows(r->batches);
    reserve(r, r->count + N);
    for (int64_t n = 0; n < N; n++, r->count++) {
        int32_t *chosen = r->chosen + r->count * r->k;
        r->place[r->count] = layer * r->tokens + tr_batches_token(r->batches, n);
        r->gap[r->count] = gap[n];
        memcpy(chosen, index + n * r->k, (size_t)r->k * sizeof *chosen);
        qsort(chosen, (size_t)r->k, sizeof *chosen, by_number);
    }
}

tr_routes *tr_routes_create(tr_job *job, const tr_batches *batches) {
    const tr_config *c = job->config;
    tr_routes *r = tr_heap_alloc(1, sizeof *r);
    *r = (tr_routes){.job = job,
                     .batches = batches,
                     .tokens = c->training.global_batch_size * c->data.sequence_length,
                     .k = c->model.num_experts_per_tok};
    tr_model_watch_routing(job->model, watch, r);
    return r;
}

void tr_routes_destroy(tr_routes *r) {
    if (!r) return;
    tr_model_watch_routing(r->job->model, NULL, NULL);
    free(r->place);
    free(r->gap);
    free(r->chosen);
    free(r);
}

void tr_routes_clear(tr_routes *r) {
    r->count = 0;
}

/* --- comparing ---------------------------------------------------------------------------------
 */

/* Rank 0: one rank's rows by place, and what was found so far. */
typedef struct {
    const tr_routes *one;
    int64_t places, *row; /* [places] of `one`, -1: none */
    bool *seen, *flipped; /* [places] */
    tr_flips *out;
    int64_t capacity;
} search;

static void search_open(search *s, const tr_routes *one, tr_flips *out) {
    *s = (search){.one = one, .out = out};
    s->places = tr_model_moe_layers(&one->job->config->model) * one->tokens;
    s->row = tr_heap_alloc(s->places, sizeof *s->row);
    s->seen = tr_heap_alloc(s->places, sizeof *s->seen);
    s->flipped = tr_heap_alloc(s->places, sizeof *s->flipped);
    for (int64_t i = 0; i < s->places; i++) s->row[i] = -1;
    for (int64_t i = 0; i < one->count; i++) s->row[one->place[i]] = i;
}

static void search_close(search *s) {
    free(s->row);
    free(s->seen);
    free(s->flipped);
}

/* Rows of one rank of the grid. Ranks that hold copies of a token count it once. */
static void compare(search *s, const tr_routes *grid) {
    const tr_routes *one = s->one;
    for (int64_t i = 0; i < grid->count; i++) {
        int64_t place = grid->place[i], row = s->row[place];
        s->seen[place] = true;
        if (row < 0 || s->flipped[place]) continue;
        if (!memcmp(grid->chosen + i * grid->k, one->chosen + row * one->k,
                    (size_t)one->k * sizeof *one->chosen))
            continue;
        s->flipped[place] = true;
        s->out->flips =
            tr_heap_grow(s->out->flips, s->out->count, &s->capacity, sizeof *s->out->flips);
        float gap = grid->gap[i] < one->gap[row] ? grid->gap[i] : one->gap[row];
        int64_t token = place % one->tokens, S = one->job->config->data.sequence_length;
        s->out->flips[s->out->count++] = (tr_flip){.layer = place / one->tokens,
                                                   .sequence = token / S,
                                                   .position = token % S,
                                                   .gap = (double)gap};
    }
}

static int by_place(const void *a, const void *b) {
    const tr_flip *x = a, *y = b;
    if (x->sequence != y->sequence) return x->sequence < y->sequence ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return (x->position > y->position) - (x->position < y->position);
}

/* Flips [first, last) of one sequence, by layer. In the earliest layer each must be a near tie of
 * its own; where experts have a capacity, one of them is the cause, and it moved the others into
 * the places it left or out of those it took. */
static void tell_causes(tr_flips *out, int64_t first, int64_t last, bool capacity) {
    int64_t narrowest = first;
    for (int64_t i = first; i < last && out->flips[i].layer == out->flips[first].layer; i++)
        if (out->flips[i].gap < out->flips[narrowest].gap) narrowest = i;
    for (int64_t i = first; i < last; i++) {
        tr_flip *f = &out->flips[i];
        f->caused = f->layer > out->flips[first].layer || (capacity && i != narrowest);
        if (!f->caused && f->gap > out->gap) out->gap = f->gap;
    }
}

/* Orders what was found, tells causes from consequences, and counts what the grid left out. */
static void conclude(search *s) {
    tr_flips *out = s->out;
    bool capacity = s->one->job->config->model.expert_capacity_factor > 0;
    if (out->count > 0) qsort(out->flips, (size_t)out->count, sizeof *out->flips, by_place);
    for (int64_t first = 0, i = 1; i <= out->count; i++)
        if (i == out->count || out->flips[i].sequence != out->flips[first].sequence) {
            tell_causes(out, first, i, capacity);
            first = i;
        }
    for (int64_t i = 0; i < s->places; i++) out->unseen += s->row[i] >= 0 && !s->seen[i];
}

/* Rank 0. The rows of rank `from`, into `r`. */
static void receive(tr_comm *world, int from, tr_routes *r) {
    int64_t count;
    tr_end(tr_recv_begin(world, NULL, from, TAG_COUNT, &count, sizeof count));
    reserve(r, count);
    r->count = count;
    int64_t rows = count * (int64_t)sizeof *r->place, k = r->k * (int64_t)sizeof *r->chosen;
    tr_end(tr_recv_begin(world, NULL, from, TAG_PLACE, r->place, rows));
    tr_end(tr_recv_begin(world, NULL, from, TAG_GAP, r->gap, count * (int64_t)sizeof *r->gap));
    tr_end(tr_recv_begin(world, NULL, from, TAG_EXPERTS, r->chosen, count * k));
}

static void send(tr_comm *world, const tr_routes *r) {
    int64_t rows = r->count * (int64_t)sizeof *r->place, k = r->k * (int64_t)sizeof *r->chosen;
    tr_end(tr_send_begin(world, NULL, 0, TAG_COUNT, &r->count, sizeof r->count));
    tr_end(tr_send_begin(world, NULL, 0, TAG_PLACE, r->place, rows));
    tr_end(tr_send_begin(world, NULL, 0, TAG_GAP, r->gap, r->count * (int64_t)sizeof *r->gap));
    tr_end(tr_send_begin(world, NULL, 0, TAG_EXPERTS, r->chosen, r->count * k));
}

void tr_flips_find(const tr_routes *grid, const tr_routes *one, tr_flips *flips_p) {
    tr_comm *world = grid->job->world;
    *flips_p = (tr_flips){0};
    if (tr_comm_rank(world) != 0) {
        send(world, grid);
        return;
    }
    search s;
    search_open(&s, one, flips_p);
    compare(&s, grid);
    tr_routes other = {.k = grid->k};
    for (int from = 1; from < tr_comm_size(world); from++) {
        receive(world, from, &other);
        compare(&s, &other);
    }
    conclude(&s);
    free(other.place);
    free(other.gap);
    free(other.chosen);
    search_close(&s);
}

void tr_flips_free(tr_flips *flips) {
    free(flips->flips);
    *flips = (tr_flips){0};
}
