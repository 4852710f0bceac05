/* Property: flat and by node, on nodes of any size, each row reaches every expert it was routed to
 * exactly once, with its weight, and the weighted sums come home; by node each token crosses to a
 * node once, in one message for a pair of nodes; as bfloat16 in half the bytes. Numbers are small
 * integers, exact on any wire. */
#include "model/exchange.h"
#include "base/rng.h"
#include "tests/dist/mpi_check.h"

enum { EXPERTS = 10, CHOSEN = 4, WIDTH = 50, MOST_TOKENS = 24, CHUNK = 1 << 20 };

typedef enum { ANYWHERE, TO_EXPERT_0, NOWHERE, SOME_RANKS, PATTERNS } pattern;
static const char *const pattern_names[] = {"anywhere", "to expert 0", "nowhere", "some ranks"};

/* Tokens of a rank; rank 1 has none. */
static int64_t tokens_of(int rank) {
    return rank == 1 ? 0 : MOST_TOKENS - rank;
}

/* The j-th expert of a token, or -1; a token's experts are distinct. */
static int32_t expert_of(pattern p, int rank, int64_t token, int64_t j) {
    uint64_t draw = tr_random_u64(11, (uint64_t)rank, (uint64_t)token);
    bool pad = draw % 7 == 0, silent = p == SOME_RANKS && rank % 2 == 0;
    if (p == NOWHERE || pad || silent) return -1;
    if (p == TO_EXPERT_0) return j == 2 ? 0 : -1;
    uint64_t step = draw / 1000 % 2 ? 3 : 1; /* coprime to EXPERTS */
    return (int32_t)((draw / 7 + (uint64_t)j * step) % EXPERTS);
}

static float weight_of(int rank, int64_t token, int64_t j) {
    return (float)(1 + (rank + token + j) % 2);
}

static float value_of(int rank, int64_t token, int64_t h) {
    return (float)(h == 0 ? rank : h == 1 ? token : (rank + token + h) % 4);
}

typedef struct {
    const tr_grid *grid;
    tr_model_config config;
    tr_env env;
    tr_pass pass;
    tr_saved saved;
    tr_device *device;
    int rank, size;
    pattern pattern;
    int32_t *index;
    float *weight, *x, *y;
} lab;

static void *room(lab *l, int64_t elems, size_t bytes) {
    return tr_arena_alloc(l->pass.kept, (size_t)(elems + 1) * bytes);
}

static void lab_open(lab *l, const tr_grid *grid, tr_exchange_kind kind, tr_dtype wire, pattern p) {
    *l = (lab){.grid = grid, .rank = grid->at.rank, .size = grid->at.world, .pattern = p};
    l->device = tr_device_cpu(NULL);
    l->config = (tr_model_config){
        .hidden_size = WIDTH, .num_experts = EXPERTS, .num_experts_per_tok = CHOSEN};
    l->env = (tr_env){.config = &l->config,
                      .grid = l->grid,
                      .device = l->device,
                      .kernels = l->device->kernels,
                      .stream = l->device->stream_create(l->device),
                      .t = TR_F32,
                      .scratch = tr_arena_create(&l->device->allocator, CHUNK),
                      .N_loc = tokens_of(l->rank),
                      .exchange = tr_exchange_create(l->grid, l->device, EXPERTS, kind, wire)};
    l->pass = (tr_pass){.c = &l->env, .kept = tr_arena_create(&l->device->allocator, CHUNK)};
    tr_stops_init(&l->env, &l->saved);
    int64_t N = l->env.N_loc;
    l->index = room(l, N * CHOSEN, sizeof *l->index);
    l->weight = room(l, N * CHOSEN, sizeof *l->weight);
    l->x = room(l, N * WIDTH, sizeof *l->x);
    l->y = room(l, N * WIDTH, sizeof *l->y);
    for (int64_t i = 0; i < N * CHOSEN; i++) {
        l->index[i] = expert_of(p, l->rank, i / CHOSEN, i % CHOSEN);
        l->weight[i] = weight_of(l->rank, i / CHOSEN, i % CHOSEN);
    }
    for (int64_t i = 0; i < N * WIDTH; i++) {
        l->x[i] = value_of(l->rank, i / WIDTH, i % WIDTH);
        l->y[i] = 1;
    }
}

static void lab_close(lab *l) {
    tr_stops_fini(&l->saved);
    tr_exchange_destroy(l->env.exchange);
    tr_arena_destroy(l->env.scratch);
    tr_arena_destroy(l->pass.kept);
    l->device->stream_destroy(l->env.stream);
    tr_device_destroy(l->device);
}

/* There and back; the rows at the experts. */
static float *travel(lab *l) {
    const tr_env *c = &l->env;
    tr_exchange_plan(&l->pass, &l->saved, l->index, l->weight);
    const tr_stop *s = tr_stop_of_experts(&l->saved);
    tr_journey j = tr_go_begin(c, &l->saved, l->x);
    const void *at_hand = tr_go_end(c, &l->saved, &j);
    int64_t rows = s->offset[tr_block_of(EXPERTS, l->size, l->rank).count];
    float *xe = room(l, rows * WIDTH, sizeof *xe);
    c->kernels->gather_rows(c->stream, TR_F32, xe, j.t, at_hand, s->pair_of, CHOSEN, NULL,
                            (tr_rows){rows, NULL}, WIDTH);
    bool crosses = tr_exchange_crosses(c->exchange);
    tr_dtype wire = crosses ? tr_exchange_wire(c->exchange) : TR_F32;
    void *sums = crosses ? room(l, s->rows * WIDTH, sizeof(float)) : l->y;
    c->kernels->combine_rows(c->stream, wire, sums, TR_F32, xe, s->row_of, s->weight,
                             crosses ? 0 : 1, s->rows, CHOSEN, WIDTH);
    if (crosses) {
        j = tr_return_begin(c, &l->saved, sums, WIDTH, wire);
        tr_return_end(c, &l->saved, &j, TR_F32, l->y, 1);
    }
    return xe;
}

/* Each row says where it comes from: it is that token's, was routed here, and is the only one. */
static int64_t check_arrivals(const lab *l, const float *xe) {
    const tr_stop *s = tr_stop_of_experts(&l->saved);
    tr_range mine = tr_block_of(EXPERTS, l->size, l->rank);
    bool seen[8][MOST_TOKENS][EXPERTS] = {{{0}}};
    for (int64_t e = 0; e < mine.count; e++)
        for (int64_t r = s->offset[e]; r < s->offset[e + 1]; r++) {
            const float *x = xe + r * WIDTH;
            int64_t expert = mine.first + e, from = (int64_t)x[0], token = (int64_t)x[1], j = 0;
            if (from < 0 || from >= l->size || token < 0 || token >= tokens_of((int)from)) {
                TR_CHECK(false, "row %lld is nobody's", (long long)r);
                continue;
            }
            while (j < CHOSEN && expert_of(l->pattern, (int)from, token, j) != expert) j++;
            TR_CHECK(j < CHOSEN && !seen[from][token][expert], "expert %lld", (long long)expert);
            seen[from][token][expert] = true;
            TR_CHECK(s->weight[s->pair_of[r]] == weight_of((int)from, token, j), "weight");
            for (int64_t h = 0; h < WIDTH; h++)
                TR_CHECK(x[h] == value_of((int)from, token, h), "element %lld", (long long)h);
        }
    return s->offset[mine.count];
}

/* The sums that came home; how many pairs were sent out. */
static int64_t check_returns(const lab *l) {
    int64_t pairs = 0;
    for (int64_t n = 0; n < l->env.N_loc; n++) {
        float weight = 0;
        for (int64_t j = 0; j < CHOSEN; j++) {
            if (l->index[n * CHOSEN + j] < 0) continue;
            weight += l->weight[n * CHOSEN + j];
            pairs++;
        }
        for (int64_t h = 0; h < WIDTH; h++)
            TR_CHECK(l->y[n * WIDTH + h] == 1 + weight * value_of(l->rank, n, h),
                     "token %lld: %g, not %g", (long long)n, (double)l->y[n * WIDTH + h],
                     (double)(1 + weight * value_of(l->rank, n, h)));
    }
    return pairs;
}

static int64_t sum_of(tr_comm *comm, int64_t value) {
    tr_end(tr_all_reduce_begin(comm, NULL, TR_SUM, TR_I64, &value, 1));
    return value;
}

/* One exchange, checked; what all ranks sent to other nodes. */
static tr_sent check_exchange(const tr_grid *grid, tr_exchange_kind kind, tr_dtype wire,
                              pattern p) {
    lab l;
    tr_comm *comm = grid->comm[TR_GROUP_EXPERT];
    lab_open(&l, grid, kind, wire, p);
    tr_sent before = tr_comm_sent(comm);
    const float *xe = travel(&l);
    tr_sent out = tr_comm_sent(comm);
    int64_t arrived = sum_of(comm, check_arrivals(&l, xe));
    int64_t sent = sum_of(comm, check_returns(&l));
    TR_CHECK(arrived == sent, "%s: %lld pairs of %lld", pattern_names[p], (long long)arrived,
             (long long)sent);
    out.messages_out = sum_of(comm, out.messages_out - before.messages_out);
    out.bytes_out = sum_of(comm, out.bytes_out - before.bytes_out);
    lab_close(&l);
    return out;
}

/* All ranks as one expert group, on nodes of so many. */
static void on_nodes_of(tr_comm *world, int ranks, void (*body)(const tr_grid *grid)) {
    int size = tr_comm_size(world);
    tr_comm_set_node_ranks(ranks);
    tr_comm *comm = tr_comm_split(world, 0, tr_comm_rank(world));
    tr_grid *grid = tr_grid_create(
        comm,
        (tr_grid_shape){.pipeline = 1, .data = size, .context = 1, .expert = size, .tensor = 1});
    body(grid);
    tr_grid_destroy(grid);
    tr_comm_free(comm);
    tr_comm_set_node_ranks(0);
}

static void every_way(const tr_grid *grid) {
    for (int p = 0; p < PATTERNS; p++)
        for (tr_exchange_kind kind = TR_EXCHANGE_FLAT; kind <= TR_EXCHANGE_HIERARCHICAL; kind++)
            for (tr_dtype wire = TR_F32; wire <= TR_BF16; wire++)
                check_exchange(grid, kind, wire, (pattern)p);
}

static void one_node(tr_comm *world) {
    on_nodes_of(world, 0, every_way);
}
static void nodes_of_1(tr_comm *world) {
    on_nodes_of(world, 1, every_way);
}
static void nodes_of_2(tr_comm *world) {
    on_nodes_of(world, 2, every_way);
}
static void nodes_of_3(tr_comm *world) { /* the last is smaller */
    on_nodes_of(world, 3, every_way);
}

/* How many nodes, or ranks on them, other than its own node a token goes to. */
static int64_t places_of(const tr_comm *comm, int rank, int64_t token, bool nodes) {
    uint64_t seen = 0;
    for (int64_t j = 0; j < CHOSEN; j++) {
        int32_t e = expert_of(ANYWHERE, rank, token, j);
        if (e < 0) continue;
        int to = (int)tr_block_owner(EXPERTS, tr_comm_size(comm), e);
        if (tr_comm_node_of(comm, to) == tr_comm_node_of(comm, rank)) continue;
        seen |= UINT64_C(1) << (nodes ? tr_comm_node_of(comm, to) : to);
    }
    return __builtin_popcountll(seen);
}

/* A pair of nodes, or of ranks on different nodes, exchanges a count, and where rows follow four
 * more messages: experts, weights, rows, sums. Rows are as many as tokens have places. */
static tr_sent traffic_of(const tr_comm *comm, bool by_node, tr_dtype wire) {
    int size = tr_comm_size(comm), nodes = tr_comm_node_of(comm, size - 1) + 1;
    int64_t pairs = 0, speaking = 0, rows = 0;
    for (int a = 0; a < size; a++) {
        int64_t others = 0;
        for (int b = 0; b < size; b++)
            others += tr_comm_node_of(comm, a) != tr_comm_node_of(comm, b);
        pairs += others;
        speaking += tokens_of(a) > 0 ? others : 0;
        for (int64_t n = 0; n < tokens_of(a); n++) rows += places_of(comm, a, n, by_node);
    }
    if (by_node) pairs = speaking = nodes * (nodes - 1);
    int64_t row = 2 * WIDTH * (int64_t)tr_dtype_bytes(wire) + 8 * CHOSEN;
    return (tr_sent){.messages_out = pairs + 4 * speaking, .bytes_out = 8 * pairs + row * rows};
}

static void check_traffic(const tr_grid *grid) {
    const tr_comm *comm = grid->comm[TR_GROUP_EXPERT];
    for (int by_node = 0; by_node < 2; by_node++)
        for (tr_dtype wire = TR_F32; wire <= TR_BF16; wire++) {
            tr_exchange_kind kind = by_node ? TR_EXCHANGE_HIERARCHICAL : TR_EXCHANGE_FLAT;
            tr_sent got = check_exchange(grid, kind, wire, ANYWHERE);
            tr_sent want = traffic_of(comm, by_node, wire);
            if (tr_comm_rank(comm) == 0)
                printf("%s, %d bytes an element: %lld messages, %lld bytes between nodes\n",
                       by_node ? "by node" : "flat", (int)tr_dtype_bytes(wire),
                       (long long)got.messages_out, (long long)got.bytes_out);
            TR_CHECK(got.messages_out == want.messages_out, "%lld messages, not %lld",
                     (long long)got.messages_out, (long long)want.messages_out);
            TR_CHECK(got.bytes_out == want.bytes_out, "%lld bytes, not %lld",
                     (long long)got.bytes_out, (long long)want.bytes_out);
        }
}

static void fewer_larger_messages(tr_comm *world) {
    int size = tr_comm_size(world);
    if (size >= 4) on_nodes_of(world, 2, check_traffic);
    if (size == 8) on_nodes_of(world, 4, check_traffic);
}

static const mpi_case cases[] = {
    {"one_node", one_node},
    {"nodes_of_1", nodes_of_1},
    {"nodes_of_2", nodes_of_2},
    {"nodes_of_3", nodes_of_3},
    {"fewer_larger_messages", fewer_larger_messages},
};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    int failed = mpi_check_all(world, cases, sizeof cases / sizeof cases[0]);
    tr_comm_stop(world);
    return failed != 0;
}
