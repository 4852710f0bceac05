/* gather.c - whole parameters from the runs that ranks own. Floor: train.
 *
 * A rank owns runs of parameters (tr_segment): what AdamW updates and checkpoints save. Rank 0
 * learns the list of every rank once; then each rank sends its runs of a parameter in the order of
 * that list, in one message. */
#include "train/gather.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

enum { TAG_LIST = 20, TAG_DATA = 21 };

/* A run as other ranks have to know it: elements [first, first + count) of `box`. */
typedef struct {
    int64_t parameter, first, count;
    tr_box box;
} run;

/* The runs of one rank, ordered by parameter; [start[i], start[i + 1]) are those of parameter i. */
typedef struct {
    run *runs;
    int64_t count, *start;
} run_list;

struct tr_gather {
    /* borrowed */
    tr_comm *world;
    const tr_registry *registry;
    /* owned */
    const tr_segment **segments; /* [mine.count], in the order of `mine` */
    run_list mine, *lists;       /* lists: rank 0 alone, [world] */
    float *message;              /* the longest of any rank */
    uint8_t *held;               /* rank 0: whether an element has come */
};

static int by_parameter(const void *a, const void *b) {
    const tr_segment *x = *(const tr_segment *const *)a, *y = *(const tr_segment *const *)b;
    if (x->param != y->param) return x->param < y->param ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

static void index_list(run_list *list, int64_t parameters) {
    list->start = tr_heap_alloc(parameters + 1, sizeof *list->start);
    for (int64_t i = 0, k = 0; i <= parameters; i++) {
        while (k < list->count && list->runs[k].parameter < i) k++;
        list->start[i] = k;
    }
}

static void list_own(tr_gather *g) {
    const tr_registry *r = g->registry;
    for (int i = 0; i < TR_SPACES; i++) g->mine.count += r->space[i].nsegments;
    g->segments = tr_heap_alloc(g->mine.count, sizeof *g->segments);
    g->mine.runs = tr_heap_alloc(g->mine.count, sizeof *g->mine.runs);
    for (int64_t i = 0, n = 0; i < TR_SPACES; i++)
        for (int64_t k = 0; k < r->space[i].nsegments; k++)
            g->segments[n++] = &r->space[i].segments[k];
    qsort(g->segments, (size_t)g->mine.count, sizeof *g->segments, by_parameter);
    for (int64_t k = 0; k < g->mine.count; k++) {
        const tr_segment *s = g->segments[k];
        g->mine.runs[k] = (run){s->param - r->params, s->first, s->count, s->param->box};
    }
    index_list(&g->mine, r->count);
}

static void exchange_lists(tr_gather *g) {
    int size = tr_comm_size(g->world);
    if (tr_comm_rank(g->world) != 0) {
        int64_t bytes = g->mine.count * (int64_t)sizeof *g->mine.runs;
        tr_end(tr_send_begin(g->world, NULL, 0, TAG_LIST, &g->mine.count, sizeof g->mine.count));
        tr_end(tr_send_begin(g->world, NULL, 0, TAG_LIST, g->mine.runs, bytes));
        return;
    }
    g->lists = tr_heap_alloc(size, sizeof *g->lists);
    g->lists[0] = g->mine;
    for (int r = 1; r < size; r++) {
        run_list *list = &g->lists[r];
        tr_end(tr_recv_begin(g->world, NULL, r, TAG_LIST, &list->count, sizeof list->count));
        list->runs = tr_heap_alloc(list->count, sizeof *list->runs);
        int64_t bytes = list->count * (int64_t)sizeof *list->runs;
        tr_end(tr_recv_begin(g->world, NULL, r, TAG_LIST, list->runs, bytes));
        index_list(list, g->registry->count);
    }
}

static int64_t elems_of(const run_list *list, int64_t parameter) {
    int64_t elems = 0;
    for (int64_t k = list->start[parameter]; k < list->start[parameter + 1]; k++)
        elems += list->runs[k].count;
    return elems;
}

tr_gather *tr_gather_create(tr_comm *world, const tr_registry *registry) {
    tr_gather *g = tr_heap_alloc(1, sizeof *g);
    g->world = world;
    g->registry = registry;
    list_own(g);
    exchange_lists(g);
    bool root = tr_comm_rank(world) == 0;
    int64_t longest = 0, whole = 0;
    for (int r = 0; r < (root ? tr_comm_size(world) : 1); r++)
        for (int64_t i = 0; i < registry->count; i++) {
            int64_t elems = elems_of(root ? &g->lists[r] : &g->mine, i);
            if (elems > longest) longest = elems;
            if (registry->params[i].elems > whole) whole = registry->params[i].elems;
        }
    g->message = tr_heap_alloc(longest, sizeof *g->message);
    if (root) g->held = tr_heap_alloc(whole, sizeof *g->held);
    return g;
}

static void list_free(run_list *list) {
    free(list->runs);
    free(list->start);
}

void tr_gather_destroy(tr_gather *g) {
    if (!g) return;
    for (int r = 1; g->lists && r < tr_comm_size(g->world); r++) list_free(&g->lists[r]);
    list_free(&g->mine);
    free(g->lists);
    free(g->segments);
    free(g->message);
    free(g->held);
    free(g);
}

/* --- one parameter -----------------------------------------------------------------------------
 */

static float *memory_of(const tr_gather *g, int64_t k, tr_gather_kind kind) {
    const tr_segment *s = g->segments[k];
    return kind == TR_GATHER_WEIGHT ? tr_segment_master(g->registry, s)
                                    : tr_segment_gradient(g->registry, s);
}

static void read_own(tr_gather *g, int64_t parameter, tr_gather_kind kind) {
    tr_device *device = g->registry->device;
    float *to = g->message;
    for (int64_t k = g->mine.start[parameter]; k < g->mine.start[parameter + 1]; k++) {
        int64_t count = g->mine.runs[k].count;
        device->copy(device->stream, to, memory_of(g, k, kind), (size_t)count * sizeof *to,
                     TR_TO_HOST);
        to += count;
    }
    device->stream_wait(device->stream);
}

/* The message of one rank on its way into the whole parameter. */
typedef struct {
    float *whole, *message;
    uint8_t *held;
    int64_t held_count;
    bool differ;
} placing;

static void place_row(placing *p, int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (p->held[at + i] && memcmp(&p->whole[at + i], &p->message[i], sizeof(float)))
            p->differ = true;
        p->held_count += !p->held[at + i];
        p->held[at + i] = 1;
        p->whole[at + i] = p->message[i];
    }
    p->message += count;
}

static void place_box(placing *p, const tr_param_decl *d, const tr_box *box) {
    int last = box->ndim - 1;
    int64_t rows = 1;
    for (int i = 0; i < last; i++) rows *= box->extent[i];
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = 0, stride = d->shape[last], rest = row;
        for (int i = last - 1; i >= 0; i--) {
            at += (box->offset[i] + rest % box->extent[i]) * stride;
            rest /= box->extent[i];
            stride *= d->shape[i];
        }
        place_row(p, at + box->offset[last], box->extent[last]);
    }
}

static void place(placing *p, const tr_param_decl *d, const run *r) {
    tr_box boxes[2 * TR_MAX_DIM - 1];
    int count = tr_box_cut(&r->box, r->first, r->count, boxes);
    for (int i = 0; i < count; i++) place_box(p, d, &boxes[i]);
}

tr_status tr_gather_parameter(tr_gather *g, int64_t parameter, tr_gather_kind kind, float *whole) {
    const tr_param *param = &g->registry->params[parameter];
    read_own(g, parameter, kind);
    if (tr_comm_rank(g->world) != 0) {
        int64_t bytes = elems_of(&g->mine, parameter) * (int64_t)sizeof(float);
        if (bytes) tr_end(tr_send_begin(g->world, NULL, 0, TAG_DATA, g->message, bytes));
        return TR_OK;
    }
    placing p = {.whole = whole, .held = g->held};
    memset(g->held, 0, (size_t)param->elems);
    for (int r = 0; r < tr_comm_size(g->world); r++) {
        const run_list *list = &g->lists[r];
        int64_t bytes = elems_of(list, parameter) * (int64_t)sizeof(float);
        if (r > 0 && bytes) tr_end(tr_recv_begin(g->world, NULL, r, TAG_DATA, g->message, bytes));
        p.message = g->message;
        for (int64_t k = list->start[parameter]; k < list->start[parameter + 1]; k++)
            place(&p, &param->decl, &list->runs[k]);
    }
    const char *what = kind == TR_GATHER_WEIGHT ? "weight" : "gradient";
    if (p.held_count < param->elems)
        return tr_fail(TR_ERR_INTERNAL, "%s: no rank holds the %s of %lld of %lld elements",
                       param->decl.name, what, (long long)(param->elems - p.held_count),
                       (long long)param->elems);
    if (p.differ)
        return tr_fail(TR_ERR_INTERNAL, "%s: ranks hold copies of its %s that differ",
                       param->decl.name, what);
    return TR_OK;
}

void tr_gather_put(tr_gather *g, int64_t parameter, tr_gather_kind kind, const float *whole) {
    tr_device *device = g->registry->device;
    for (int64_t k = g->mine.start[parameter]; k < g->mine.start[parameter + 1]; k++) {
        const run *r = &g->mine.runs[k];
        device->copy(device->stream, memory_of(g, k, kind), whole + r->first,
                     (size_t)r->count * sizeof *whole, TR_TO_DEVICE);
    }
    device->stream_wait(device->stream);
}

float *tr_gather_first(tr_gather *g, int64_t parameter, int64_t *count_p) {
    int64_t k = g->mine.start[parameter];
    if (k == g->mine.start[parameter + 1]) return NULL;
    const run *r = &g->mine.runs[k];
    for (int i = 0; i < r->box.ndim; i++)
        if (r->first > 0 || r->box.offset[i] > 0) return NULL;
    *count_p = r->count;
    return memory_of(g, k, TR_GATHER_GRADIENT);
}
