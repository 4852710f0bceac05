/* Property: on every grid of the world and at every stage of ZeRO, with and without overlap, for a
 * weight of every split, initial values are those of one rank, each element has one owner, a
 * gradient is the sum over all micro-batches and ranks that hold the element, the sum of squares
 * counts it once, and the memory held is what the registry says: of weights that are only read no
 * more than theirs. */
#include "base/rng.h"
#include "model/gradient.h"
#include "model/unit.h"
#include "tests/dist/mpi_check.h"

#include <math.h>

enum { SEED = 7, PARAMS = 6, UNITS = 3, MICRO_BATCHES = 2 };

static const tr_param_decl decls[PARAMS] = {
    {.name = "norm", .ndim = 1, .shape = {37}, .init = TR_INIT_ONES},
    {.name = "router", .ndim = 2, .shape = {5, 9}, .init_std = 1},
    {.name = "experts", .ndim = 3, .shape = {10, 3, 5}, .split = TR_SPLIT_EXPERT, .init_std = 1},
    {.name = "rows", .ndim = 2, .shape = {7, 11}, .split = TR_SPLIT_ROWS, .init_std = 1},
    {.name = "columns", .ndim = 2, .shape = {13, 7}, .split = TR_SPLIT_COLUMNS, .init_std = 1},
    {.name = "heads", .ndim = 2, .shape = {48, 3}, .split = TR_SPLIT_HEADS, .init_std = 1},
};

static tr_registry *declare(const tr_grid *grid, const tr_registry_options *options,
                            tr_device *device) {
    tr_registry *r = tr_registry_create(TR_F32);
    int pp = grid->at.shape.pipeline;
    for (int i = 0; i < PARAMS; i++) {
        tr_param_decl d = decls[i];
        if (i % (PARAMS / UNITS) == 0) tr_registry_unit(r, i < 2 * PARAMS / UNITS, 1);
        d.copy_stage = d.split == TR_SPLIT_ROWS && pp > 1 ? pp - 1 : -1; /* tied */
        d.stage = d.copy_stage < 0 ? i % pp : 0;
        tr_registry_add(r, &d);
    }
    assert_int_equal(tr_registry_seal(r, grid, options, device), TR_OK);
    return r;
}

/* Gradient of an element on each rank that holds it. */
static double slope(int64_t param, int64_t place) {
    return (double)(1 + (param * 5 + place * 3) % 17) / 16;
}

static double initial(const tr_param_decl *d, int64_t place) {
    if (d->init == TR_INIT_ONES) return 1;
    return (double)tr_random_normal(SEED, tr_stream_of_name(d->name), (uint64_t)place);
}

/* Collective. How many ranks count on each element: holders, and owners among the primary ones. */
static void count_ranks(tr_comm *world, const tr_registry *r, const tr_param *p, int64_t *holders,
                        int64_t *owners) {
    memset(holders, 0, (size_t)p->elems * sizeof *holders);
    memset(owners, 0, (size_t)p->elems * sizeof *owners);
    for (int64_t i = 0; i < p->elems_loc; i++) holders[tr_box_place(&p->box, p->decl.shape, i)]++;
    const tr_space *s = &r->space[p->space];
    for (int64_t k = 0; k < s->nsegments && p->primary; k++)
        for (int64_t i = 0; i < s->segments[k].count && s->segments[k].param == p; i++)
            owners[tr_box_place(&p->box, p->decl.shape, s->segments[k].first + i)]++;
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_I64, holders, p->elems));
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_I64, owners, p->elems));
}

/* What this rank owns of p: masters before, gradients after the reduction. */
static void check_shard(const tr_registry *r, const tr_param *p, const int64_t *holders) {
    const tr_space *s = &r->space[p->space];
    for (int64_t k = 0; k < s->nsegments; k++) {
        const tr_segment *g = &s->segments[k];
        for (int64_t i = 0; i < g->count && g->param == p; i++) {
            int64_t place = tr_box_place(&p->box, p->decl.shape, g->first + i);
            double want = MICRO_BATCHES * slope(p - r->params, place) * (double)holders[place];
            TR_CHECK(tr_segment_gradient(r, g)[i] == (float)want, "gradient of %s[%lld]",
                     p->decl.name, (long long)place);
        }
    }
}

static void check_weight(const tr_param *p) {
    for (int64_t i = 0; i < p->elems_loc; i++) {
        int64_t place = tr_box_place(&p->box, p->decl.shape, i);
        TR_CHECK(((float *)p->weight)[i] == (float)initial(&p->decl, place), "weight of %s[%lld]",
                 p->decl.name, (long long)place);
    }
}

/* As a forward and a backward use units: each weight is right while it is taken. The unit before
 * it in line may stay in a slot, so the second pass meets weights that are there. */
static void check_weights(tr_registry *r) {
    for (int64_t k = 0; k < 2 * UNITS; k++) {
        int64_t unit = k < UNITS ? k : 2 * UNITS - 1 - k, next = k < UNITS ? unit + 1 : unit - 1;
        tr_unit_take(r, unit);
        tr_unit_expect(r, next < UNITS ? next : -1);
        for (int64_t i = 0; i < r->units[unit].params; i++)
            check_weight(&r->params[r->units[unit].first_param + i]);
        tr_unit_leave(r, unit);
    }
}

static void contribute(tr_registry *r, tr_param *p) {
    if (p->elems_loc == 0) return;
    tr_gradient g = tr_gradient_take(r, p);
    for (int64_t i = 0; i < p->elems_loc; i++) {
        float old = g.beta == 0 ? 0 : g.at[i];
        g.at[i] = old + (float)slope(p - r->params, tr_box_place(&p->box, p->decl.shape, i));
    }
}

static void backwards(tr_registry *r) {
    tr_gradients_begin(r, MICRO_BATCHES);
    for (int m = 0; m < MICRO_BATCHES; m++)
        for (int64_t k = UNITS; k-- > 0;) {
            for (int64_t i = 0; i < r->units[k].params; i++)
                contribute(r, &r->params[r->units[k].first_param + i]);
            tr_gradients_made(r, NULL, k);
        }
}

/* --- memory -------------------------------------------------------------------------------------
 */

typedef struct {
    tr_allocator under;
    int64_t bytes;
} counter;

static void *count_alloc(void *self, size_t bytes) {
    counter *c = self;
    c->bytes += (int64_t)bytes;
    return c->under.alloc(c->under.self, bytes);
}

static void count_free(void *self, void *memory, size_t bytes) {
    counter *c = self;
    c->bytes -= (int64_t)bytes;
    c->under.free(c->under.self, memory, bytes);
}

static int64_t group_bytes(const tr_grid *grid) {
    int64_t bytes = 0;
    for (int i = 0; i < TR_GROUP_COUNT; i++) bytes += tr_comm_held_bytes(grid->comm[i]);
    return bytes;
}

/* --- a grid -------------------------------------------------------------------------------------
 */

static void check_registry(tr_comm *world, tr_registry *r, const tr_grid *grid) {
    int64_t holders[PARAMS][512], owners[512];
    double squares = 0, want = 0;
    tr_registry_init(r, SEED);
    tr_registry_publish(r);
    for (int64_t k = 0; k < PARAMS; k++) {
        const tr_param *p = &r->params[k];
        count_ranks(world, r, p, holders[k], owners);
        for (int64_t i = 0; i < p->elems; i++) {
            TR_CHECK(owners[i] == 1, "%s[%lld] has %lld owners", p->decl.name, (long long)i,
                     (long long)owners[i]);
            want += pow(MICRO_BATCHES * slope(k, i) * (double)holders[k][i], 2);
        }
    }
    check_weights(r);
    if (r->options.read_only) return;
    for (int step = 0; step < 2; step++) {
        backwards(r);
        tr_gradients_reduce(r, grid, &squares);
    }
    for (int64_t k = 0; k < PARAMS; k++) check_shard(r, &r->params[k], holders[k]);
    tr_end(tr_all_reduce_begin(world, NULL, TR_SUM, TR_F64, &squares, 1));
    TR_CHECK(fabs(squares - want) <= 1e-12 * want, "sum of squares %.17g, not %.17g", squares,
             want);
}

/* Weights, or the berths of some and this rank's part of all; beside them one number a stretch. */
static int64_t weights_bytes(const tr_registry *r) {
    int64_t bytes = (r->nstretches + 1) * (int64_t)sizeof(double);
    for (int i = 0; i < TR_SPACES; i++) {
        const tr_space *s = &r->space[i];
        if (s->elems == 0) continue;
        int64_t there = s->zero < 3 ? s->elems : s->weight_berths.elems;
        bytes += tr_comm_memory_bytes(there * (int64_t)sizeof(float));
        if (s->zero >= 3) bytes += s->shard_elems * (int64_t)sizeof(float);
    }
    return bytes;
}

static void check_grid(tr_comm *world, tr_grid_shape shape, const tr_registry_options *options) {
    tr_grid *grid = tr_grid_create(world, shape);
    tr_device *device = tr_device_cpu(NULL);
    counter count = {.under = device->allocator};
    device->allocator = (tr_allocator){.self = &count, .alloc = count_alloc, .free = count_free};
    int64_t before = group_bytes(grid);
    tr_registry *r = declare(grid, options, device);
    int64_t held = count.bytes + group_bytes(grid) - before;
    TR_CHECK(tr_registry_bytes(r) == held, "%lld bytes held, %lld said", (long long)held,
             (long long)tr_registry_bytes(r));
    TR_CHECK(!options->read_only || held == weights_bytes(r), "%lld bytes held to read %lld",
             (long long)held, (long long)weights_bytes(r));
    check_registry(world, r, grid);
    tr_registry_destroy(r);
    TR_CHECK(count.bytes == 0, "%lld bytes are left", (long long)count.bytes);
    device->allocator = count.under;
    tr_device_destroy(device);
    tr_grid_destroy(grid);
}

/* With overlap in every other of them; many ranks, of many grids, take the stages in turn. */
static void every_stage(tr_comm *world, tr_grid_shape shape, int number) {
    for (int zero = 1; zero <= 3; zero++) {
        if (tr_comm_size(world) > 4 && number % 3 + 1 != zero) continue;
        bool overlap = (number + zero) % 2;
        tr_registry_options options = {
            .zero = zero, .overlap = overlap, .bucket_elems = overlap ? 64 : 200};
        check_grid(world, shape, &options);
        options.read_only = true;
        check_grid(world, shape, &options);
    }
}

static void every_grid(tr_comm *world) {
    int size = tr_comm_size(world), grids = 0;
    for (int p = 1; p <= size; p++)
        for (int c = 1; p * c <= size; c++)
            for (int t = 1; p * c * t <= size; t++)
                for (int copies = 1; copies <= t; copies++) {
                    tr_grid_shape shape = {.pipeline = p, .context = c, .expert = 1, .tensor = t};
                    shape.head_copies = copies;
                    if (size % (p * c * t) != 0 || t % copies != 0) continue;
                    TR_CHECK(tr_grid_shape_check(&shape, size) == TR_OK, "shape");
                    shape.expert = grids++ % 2 ? 1 : shape.data * c;
                    every_stage(world, shape, grids);
                }
    if (tr_comm_rank(world) == 0) printf("%d grids\n", grids);
}

static const mpi_case cases[] = {{"every grid", every_grid}};

int main(int argc, char **argv) {
    tr_comm *world = tr_comm_start(&argc, &argv);
    int failed = mpi_check_all(world, cases, 1);
    tr_comm_stop(world);
    return failed != 0;
}
