/* exchange.c - the hops of rows to their experts and back. Floor: model.
 *
 * Which experts a rank may have to serve follows from the way alone: after each hop all experts of
 * a row that are on this rank's way onward are its to serve, and the tables of places give -1 for
 * the others. So a row's list of experts travels with it unchanged. */
#include "model/exchange.h"

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_HOPS = TR_MOST_STOPS - 1 };

typedef struct {
    tr_comm *comm;  /* borrowed */
    int32_t *place; /* device [E]: the rank of comm to which an expert's rows go from here, or -1 */
    int64_t *to, *from; /* [size] 1 for ranks to which rows may go, or from which they may come */
} hop;

struct tr_exchange {
    /* declared */
    tr_device *device;
    tr_dtype wire;
    /* derived */
    int64_t experts, experts_here;
    int hops, long_hop; /* the hop that leaves the node, if one does: others compute under it */
    hop hop[MOST_HOPS];
    tr_comm *node;      /* owned: the ranks of the expert group on this node */
    int32_t *own_place; /* device [E]: number among the experts here, or -1 */
};

/* --- the way ----------------------------------------------------------------------------------
 */

/* Of the expert group: which rank has an expert, and the layout of its nodes. */
typedef struct {
    tr_comm *comm;
    int rank, size, node;
    int64_t experts;
} layout;

static int owner(const layout *l, int64_t expert) {
    return (int)tr_block_owner(l->experts, l->size, expert);
}

static int node_of(const layout *l, int rank) {
    return tr_comm_node_of(l->comm, rank);
}

/* How many ranks are on a node, those before `rank` if it is below the group's size. */
static int ranks_on(const layout *l, int node, int before) {
    int count = 0;
    for (int r = 0; r < before; r++) count += node_of(l, r) == node;
    return count;
}

static int local_of(const layout *l, int rank) {
    return ranks_on(l, node_of(l, rank), rank);
}

/* The rank on node `a` that sends to, and receives from, node `b`; the nodes of a group are dealt
 * out over its ranks. */
static int agent(const layout *l, int a, int b) {
    int local = b % ranks_on(l, a, l->size), rank = 0;
    while (node_of(l, rank) != a || local-- > 0) rank++;
    return rank;
}

static void *to_device(tr_device *device, const int32_t *table, int64_t n) {
    size_t bytes = (size_t)n * sizeof *table;
    void *copy = tr_allocator_take(&device->allocator, bytes, "the places of experts");
    if (!copy) tr_abort("%s", tr_error_message());
    device->copy(device->stream, copy, table, bytes, TR_TO_DEVICE);
    device->stream_wait(device->stream);
    return copy;
}

/* Adds a hop over comm on which every rank may send to every other. */
static hop *add_hop(tr_exchange *x, tr_comm *comm, const int32_t *place) {
    hop *h = &x->hop[x->hops++];
    int64_t size = tr_comm_size(comm);
    *h = (hop){.comm = comm, .place = to_device(x->device, place, x->experts)};
    h->to = tr_heap_alloc(2 * size, sizeof *h->to);
    h->from = h->to + size;
    for (int64_t i = 0; i < 2 * size; i++) h->to[i] = 1;
    return h;
}

static void make_flat(tr_exchange *x, const layout *l, int32_t *place) {
    for (int64_t e = 0; e < l->experts; e++) place[e] = owner(l, e);
    add_hop(x, l->comm, place);
}

static void make_hierarchical(tr_exchange *x, const layout *l, int32_t *place) {
    x->node = tr_comm_split(l->comm, l->node, l->rank);
    for (int64_t e = 0; e < l->experts; e++)
        place[e] = local_of(l, agent(l, l->node, node_of(l, owner(l, e))));
    add_hop(x, x->node, place);

    for (int64_t e = 0; e < l->experts; e++) {
        int there = node_of(l, owner(l, e));
        place[e] = agent(l, l->node, there) == l->rank ? agent(l, there, l->node) : -1;
    }
    x->long_hop = x->hops;
    hop *across = add_hop(x, l->comm, place);
    for (int r = 0; r < l->size; r++) {
        int there = node_of(l, r);
        across->to[r] = across->from[r] =
            agent(l, l->node, there) == l->rank && agent(l, there, l->node) == r;
    }

    for (int64_t e = 0; e < l->experts; e++)
        place[e] = node_of(l, owner(l, e)) == l->node ? local_of(l, owner(l, e)) : -1;
    add_hop(x, x->node, place);
}

/* Whether some node has several ranks, and there are several nodes. */
static bool has_levels(const layout *l) {
    int last = 0;
    for (int r = 0; r < l->size; r++)
        if (node_of(l, r) > last) last = node_of(l, r);
    return last > 0 && last + 1 < l->size;
}

tr_exchange *tr_exchange_create(const tr_grid *grid, tr_device *device, int64_t num_experts,
                                tr_exchange_kind kind, tr_dtype wire) {
    tr_comm *comm = grid->comm[TR_GROUP_EXPERT];
    layout l = {.comm = comm,
                .rank = tr_comm_rank(comm),
                .size = tr_comm_size(comm),
                .node = tr_comm_node_of(comm, tr_comm_rank(comm)),
                .experts = num_experts};
    tr_exchange *x = tr_heap_alloc(1, sizeof *x);
    int32_t *place = tr_heap_alloc(num_experts, sizeof *place);
    *x = (tr_exchange){.device = device, .wire = wire, .experts = num_experts};
    tr_range mine = tr_block_of(num_experts, l.size, l.rank);
    x->experts_here = mine.count;
    for (int64_t e = 0; e < num_experts; e++)
        place[e] = owner(&l, e) == l.rank ? (int32_t)(e - mine.first) : -1;
    x->own_place = to_device(device, place, num_experts);
    if (l.size > 1 && kind == TR_EXCHANGE_HIERARCHICAL && has_levels(&l))
        make_hierarchical(x, &l, place);
    else if (l.size > 1)
        make_flat(x, &l, place);
    for (const hop *h = x->hop; h < x->hop + x->hops; h++)
        tr_comm_expect_rows(h->comm, device, h->to, h->from);
    free(place);
    return x;
}

void tr_exchange_destroy(tr_exchange *x) {
    if (!x) return;
    const tr_allocator *a = &x->device->allocator;
    size_t bytes = (size_t)x->experts * sizeof(int32_t);
    for (int i = 0; i < x->hops; i++) {
        tr_allocator_give(a, x->hop[i].place, bytes);
        free(x->hop[i].to); /* and from */
    }
    tr_allocator_give(a, x->own_place, bytes);
    tr_comm_free(x->node);
    free(x);
}

tr_dtype tr_exchange_wire(const tr_exchange *x) {
    return x->wire;
}
bool tr_exchange_crosses(const tr_exchange *x) {
    return x->hops > 0;
}
bool tr_exchange_is_hierarchical(const tr_exchange *x) {
    return x->hops > 1;
}

/* --- stops ------------------------------------------------------------------------------------
 */

void tr_stops_init(const tr_env *c, tr_saved *saved) {
    const tr_exchange *x = c->exchange;
    saved->stops = x->hops + 1;
    for (int i = 0; i < x->hops; i++) {
        int64_t size = tr_comm_size(x->hop[i].comm);
        tr_stop *s = &saved->stop[i];
        s->send_rows = tr_heap_alloc(2 * size, sizeof *s->send_rows);
        s->recv_rows = s->send_rows + size;
    }
}

void tr_stops_fini(tr_saved *saved) {
    for (int i = 0; i < saved->stops; i++) free(saved->stop[i].send_rows); /* and recv_rows */
}

int64_t tr_stops_balanced(const tr_env *c) {
    const tr_exchange *x = c->exchange;
    int64_t pairs = c->N_loc * c->config->num_experts_per_tok * c->grid->at.shape.expert;
    return pairs * x->experts_here / x->experts;
}

/* Every row counted once at each stop, with all its experts. */
int64_t tr_stops_bytes(const tr_env *c) {
    const tr_exchange *x = c->exchange;
    int64_t pairs = c->N_loc * c->config->num_experts_per_tok, bytes = 0;
    for (int i = 0; i <= x->hops; i++) {
        int64_t places = i < x->hops ? tr_comm_size(x->hop[i].comm) : x->experts_here;
        bytes += pairs * (int64_t)(2 * sizeof(int32_t) + (i > 0) * sizeof(float));
        bytes += (places + 1) * (int64_t)sizeof(int64_t);
    }
    return bytes;
}

/* Sorts the rows at hand. Their number is known to the device alone until it is asked. */
static void sort(const tr_pass *pass, tr_stop *s, const int32_t *index, const int32_t *place,
                 int64_t places) {
    const tr_env *c = pass->c;
    int64_t k = c->config->num_experts_per_tok;
    s->row_of = tr_arena_alloc(pass->kept, (size_t)(s->rows * k) * sizeof *s->row_of);
    s->pair_of = tr_arena_alloc(pass->kept, (size_t)(s->rows * k) * sizeof *s->pair_of);
    s->offset = tr_arena_alloc(pass->kept, (size_t)(places + 1) * sizeof *s->offset);
    s->sorted = s->rows * k;
    c->kernels->moe_sort(c->stream, s->offset, s->row_of, s->pair_of, index, place, s->rows, places,
                         k);
}

/* Copies `count` numbers of the device to the host. */
static void fetch(const tr_env *c, int64_t *to, const int64_t *from, int64_t count) {
    c->device->copy(c->stream, to, from, (size_t)count * sizeof *to, TR_TO_HOST);
    c->device->stream_wait(c->stream);
}

/* Tells the ranks ahead how many rows come, and hears it from those behind. */
static void exchange_counts(const tr_env *c, const hop *h, tr_stop *s, tr_stop *next) {
    int size = tr_comm_size(h->comm), sent = 0, heard = 0;
    int64_t offset[size + 1], out[size], in[size];
    fetch(c, offset, s->offset, size + 1);
    s->sorted = offset[size];
    for (int r = 0; r < size; r++) {
        s->send_rows[r] = offset[r + 1] - offset[r];
        if (h->to[r]) out[sent++] = s->send_rows[r];
    }
    tr_end(tr_all_to_all_begin(h->comm, NULL, out, h->to, in, h->from, sizeof *out));
    next->rows = 0;
    for (int r = 0; r < size; r++) {
        s->recv_rows[r] = h->from[r] ? in[heard++] : 0;
        next->rows += s->recv_rows[r];
    }
}

/* Begins to carry rows of `width`, gathered from those at hand, over the hop; into `arrived`. */
static tr_request *carry(const tr_env *c, int i, const tr_stop *s, const void *rows, tr_dtype t,
                         int64_t width, void *arrived, tr_dtype wire) {
    const hop *h = &c->exchange->hop[i];
    void *sent = tr_scratch(c, s->sorted * width, wire);
    c->kernels->gather_rows(c->stream, wire, sent, t, rows, s->pair_of,
                            c->config->num_experts_per_tok, NULL, (tr_rows){s->sorted, NULL},
                            width);
    return tr_all_to_all_begin(h->comm, c->stream, sent, s->send_rows, arrived, s->recv_rows,
                               width * (int64_t)tr_dtype_bytes(wire));
}

void tr_exchange_plan(const tr_pass *pass, tr_saved *saved, const int32_t *index,
                      const float *weight) {
    const tr_env *c = pass->c;
    const tr_exchange *x = c->exchange;
    int64_t k = c->config->num_experts_per_tok;
    tr_arena_mark mark = tr_arena_get_mark(c->scratch);
    saved->stop[0].rows = c->N_loc;
    saved->stop[0].weight = weight;
    for (int i = 0; i < x->hops; i++) {
        const hop *h = &x->hop[i];
        tr_stop *s = &saved->stop[i], *next = s + 1;
        sort(pass, s, index, h->place, tr_comm_size(h->comm));
        exchange_counts(c, h, s, next);
        int32_t *next_index = tr_scratch(c, next->rows * k, TR_I32);
        float *next_weight =
            tr_arena_alloc(pass->kept, (size_t)(next->rows * k) * sizeof *next_weight);
        /* gathering copies bits: lists of experts pass as well as numbers */
        tr_request *indices = carry(c, i, s, index, TR_F32, k, next_index, TR_F32);
        tr_end(carry(c, i, s, s->weight, TR_F32, k, next_weight, TR_F32));
        tr_end(indices);
        index = next_index;
        next->weight = next_weight;
    }
    tr_stop *last = &saved->stop[x->hops];
    sort(pass, last, index, x->hops ? x->own_place : NULL, x->experts_here);
    if (x->hops) fetch(c, &last->sorted, last->offset + x->experts_here, 1);
    tr_arena_release(c->scratch, mark);
}

/* --- going ------------------------------------------------------------------------------------
 */

static void hop_begin(const tr_env *c, const tr_saved *saved, int i, tr_journey *j) {
    tr_dtype wire = c->exchange->wire;
    void *arrived = tr_scratch(c, saved->stop[i + 1].rows * j->width, wire);
    j->request = carry(c, i, &saved->stop[i], j->rows, j->t, j->width, arrived, wire);
    j->rows = arrived;
    j->t = wire;
}

tr_journey tr_go_begin(const tr_env *c, const tr_saved *saved, const void *x) {
    tr_journey j = {.rows = x, .t = c->t, .width = c->config->hidden_size};
    for (int i = 0; i < c->exchange->hops && i <= c->exchange->long_hop; i++) {
        tr_end(j.request);
        hop_begin(c, saved, i, &j);
    }
    return j;
}

const void *tr_go_end(const tr_env *c, const tr_saved *saved, tr_journey *j) {
    tr_end(j->request);
    for (int i = c->exchange->long_hop + 1; i < c->exchange->hops; i++) {
        hop_begin(c, saved, i, j);
        tr_end(j->request);
    }
    return j->rows;
}

/* --- returning --------------------------------------------------------------------------------
 */

static void hop_back_begin(const tr_env *c, const tr_saved *saved, int i, tr_journey *j) {
    const tr_stop *s = &saved->stop[i];
    void *back = tr_scratch(c, s->sorted * j->width, j->t);
    j->request = tr_all_to_all_begin(c->exchange->hop[i].comm, c->stream, j->rows, s->recv_rows,
                                     back, s->send_rows, j->width * (int64_t)tr_dtype_bytes(j->t));
    j->rows = back;
}

/* Adds up the copies of each row that had been at hand. */
static void add_copies(const tr_env *c, const tr_stop *s, tr_journey *j, tr_dtype y_t, void *y,
                       float beta) {
    tr_end(j->request);
    c->kernels->combine_rows(c->stream, y_t, y, j->t, j->rows, s->row_of, NULL, beta, s->rows,
                             c->config->num_experts_per_tok, j->width);
    j->rows = y;
}

tr_journey tr_return_begin(const tr_env *c, const tr_saved *saved, const void *rows, int64_t width,
                           tr_dtype t) {
    tr_journey j = {.rows = rows, .t = t, .width = width};
    for (int i = c->exchange->hops - 1; i >= c->exchange->long_hop; i--) {
        hop_back_begin(c, saved, i, &j);
        if (i == c->exchange->long_hop) break;
        const tr_stop *s = &saved->stop[i];
        add_copies(c, s, &j, t, tr_scratch(c, s->rows * width, t), 0);
    }
    return j;
}

void tr_return_end(const tr_env *c, const tr_saved *saved, tr_journey *j, tr_dtype y_t, void *y,
                   float beta) {
    for (int i = c->exchange->long_hop; i > 0; i--) {
        const tr_stop *s = &saved->stop[i];
        add_copies(c, s, j, j->t, tr_scratch(c, s->rows * j->width, j->t), 0);
        hop_back_begin(c, saved, i - 1, j);
    }
    add_copies(c, &saved->stop[0], j, y_t, y, beta);
}
