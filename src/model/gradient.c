/* gradient.c - contributions, and their sums over ranks, see gradient.h. Floor: model. */
#include "model/gradient.h"

#include <stdlib.h>

void tr_gradients_begin(tr_registry *r, int64_t micro_batches) {
    for (int64_t i = 0; i < r->count; i++) r->params[i].fresh = r->params[i].elems_loc > 0;
    for (int64_t i = 0; i < r->nunits; i++)
        r->units[i].left = r->units[i].completions * micro_batches;
    for (int64_t i = 0; i < r->nstretches; i++) r->stretches[i].reduced = false;
}

/* --- reductions --------------------------------------------------------------------------------
 */

static float *gradients_of(const tr_registry *r, const tr_stretch *t) {
    const tr_space *s = &r->space[t->space];
    return s->grads + (s->zero < 2 ? t->offset : s->grad_berths.berth[t->grad_berth].offset);
}

/* Nobody contributed to them. */
static void clear_fresh(tr_registry *r, tr_stream *stream, const tr_stretch *t) {
    const tr_unit *u = &r->units[t->unit];
    for (int64_t i = u->first_param; i < u->first_param + u->params; i++)
        if (r->params[i].stretch == t - r->stretches && r->params[i].fresh)
            tr_gradient_sum(r, stream, &r->params[i]);
}

static void reduce_begin(tr_registry *r, tr_stream *stream, tr_stretch *t) {
    clear_fresh(r, stream, t);
    float *at = gradients_of(r, t);
    for (int64_t b = 0; b < t->buckets; b++)
        t->reducing[b] = tr_reduce_scatter_begin(r->space[t->space].comm, stream, TR_F32,
                                                 at + b * t->bucket_elems, t->part);
    if (r->space[t->space].zero < 2) t->reduced = true;
}

static void reduce_end(const tr_stretch *t) {
    for (int64_t b = 0; b < t->buckets; b++) {
        tr_end(t->reducing[b]);
        t->reducing[b] = NULL;
    }
}

/* --- berths: from stage 2 on --------------------------------------------------------------------
 */

/* Each parameter of the stretch has its gradient in the berth, or has none. */
static void point(tr_registry *r, const tr_stretch *t) {
    const tr_unit *u = &r->units[t->unit];
    float *grads = t->grad_berth < 0 ? NULL : gradients_of(r, t);
    for (int64_t i = u->first_param; i < u->first_param + u->params; i++) {
        tr_param *p = &r->params[i];
        if (p->stretch != t - r->stretches) continue;
        p->grad = grads ? grads + (p->offset - t->offset) : NULL;
        p->fresh = true;
    }
}

/* The reduction has to end; this rank's part joins the sum of the step, and the berth is free. */
static void retire(tr_registry *r, tr_stretch *t) {
    tr_space *s = &r->space[t->space];
    const float *from = gradients_of(r, t);
    for (int64_t b = 0; b < t->buckets; b++) {
        tr_end(t->reducing[b]);
        t->reducing[b] = NULL;
        float *sum = tr_stretch_gradient(r, t, b);
        const float *part = from + tr_stretch_piece(r, t, b);
        if (t->reduced)
            r->device->kernels->add(r->device->stream, TR_F32, sum, TR_F32, part, t->part);
        else
            r->device->copy(r->device->stream, sum, part, (size_t)t->part * sizeof *sum,
                            TR_ON_DEVICE);
    }
    t->reduced = true;
    tr_berths_empty(&s->grad_berths, t->grad_berth);
    t->grad_berth = -1;
    point(r, t);
}

/* Between and behind parameters, where a berth has something of its last contents. */
static void clear_gaps(const tr_registry *r, const tr_stretch *t) {
    const tr_unit *u = &r->units[t->unit];
    float *grads = gradients_of(r, t);
    int64_t at = 0;
    for (int64_t i = u->first_param; i < u->first_param + u->params; i++) {
        const tr_param *p = &r->params[i];
        if (p->stretch != t - r->stretches) continue;
        int64_t first = p->offset - t->offset;
        r->device->zero(r->device->stream, grads + at, (size_t)(first - at) * sizeof *grads);
        at = first + p->elems_loc;
    }
    int64_t end = t->buckets * t->bucket_elems;
    r->device->zero(r->device->stream, grads + at, (size_t)(end - at) * sizeof *grads);
}

/* The stretch has a berth that nothing is being sent from. */
static void hold(tr_registry *r, tr_stretch *t) {
    tr_berths *berths = &r->space[t->space].grad_berths;
    if (t->grad_berth >= 0 && !berths->berth[t->grad_berth].moving) return;
    if (t->grad_berth >= 0) retire(r, t); /* the micro-batch before is still on its way */
    int i = tr_berths_find(berths, t->buckets * t->bucket_elems, true);
    if (i < 0) tr_abort("more gradients are computed at a time than there are berths for");
    if (berths->berth[i].holds >= 0) retire(r, &r->stretches[berths->berth[i].holds]);
    t->grad_berth = i;
    tr_berths_fill(berths, i, t - r->stretches);
    berths->berth[i].users = 1;
    point(r, t);
    clear_gaps(r, t);
}

/* The berth's contents begin to travel. */
static void send_off(tr_registry *r, tr_stream *stream, tr_stretch *t) {
    tr_berth *berth = &r->space[t->space].grad_berths.berth[t->grad_berth];
    reduce_begin(r, stream, t);
    berth->users = 0;
    berth->moving = true;
    if (!r->options.overlap) retire(r, t);
}

/* --- contributions -----------------------------------------------------------------------------
 */

tr_gradient tr_gradient_take(tr_registry *r, tr_param *p) {
    if (r->space[p->space].zero >= 2) hold(r, &r->stretches[p->stretch]);
    tr_gradient g = {p->grad, p->fresh ? 0 : 1};
    p->fresh = false;
    return g;
}

float *tr_gradient_sum(tr_registry *r, tr_stream *stream, tr_param *p) {
    tr_gradient g = tr_gradient_take(r, p);
    if (g.beta == 0) r->device->zero(stream, g.at, (size_t)p->elems_loc * sizeof *g.at);
    return g.at;
}

void tr_gradients_made(tr_registry *r, tr_stream *stream, int64_t unit) {
    tr_unit *u = &r->units[unit];
    bool last = --u->left == 0;
    for (int64_t i = u->first_stretch; i < u->first_stretch + u->stretches; i++) {
        tr_stretch *t = &r->stretches[i];
        if (t->space == TR_SPACE_VECTORS) continue;
        if (r->space[t->space].zero >= 2) {
            hold(r, t);
            send_off(r, stream, t);
        } else if (last && r->options.overlap) {
            reduce_begin(r, stream, t);
        }
    }
}

/* --- the end of the backward -------------------------------------------------------------------
 */

/* What has not begun to be reduced does so, and nothing is in a berth. */
static void finish(tr_registry *r, tr_stretch *t) {
    if (r->space[t->space].zero < 2) {
        if (!t->reduced) reduce_begin(r, r->device->stream, t);
        return;
    }
    if (t->grad_berth < 0 && !t->reduced) hold(r, t);
    if (t->grad_berth < 0) return;
    if (!r->space[t->space].grad_berths.berth[t->grad_berth].moving)
        send_off(r, r->device->stream, t);
    if (t->grad_berth >= 0) retire(r, t);
}

/* The embedding's two copies, on the first and the last stage, share one gradient. */
static void add_copies(const tr_registry *r, const tr_grid *grid, const tr_stretch *t) {
    for (int64_t b = 0; b < t->buckets; b++)
        tr_end(tr_all_reduce_begin(grid->comm[TR_GROUP_EMBEDDING], r->device->stream, TR_SUM,
                                   TR_F32, tr_stretch_gradient(r, t, b), t->part));
}

void tr_gradients_reduce(tr_registry *r, const tr_grid *grid, double *sum_squares_p) {
    tr_device *device = r->device;
    double squares[r->nstretches + 1], sum = 0;
    device->zero(device->stream, r->squares, (size_t)r->nstretches * sizeof *r->squares);
    for (int64_t i = r->nstretches; i-- > 0;) finish(r, &r->stretches[i]);
    for (int64_t i = r->nstretches; i-- > 0;) { /* the order in which a backward begins them */
        const tr_stretch *t = &r->stretches[i];
        reduce_end(t);
        if (t->space == TR_SPACE_TIED) add_copies(r, grid, t);
        if (t->space == TR_SPACE_TIED && !tr_grid_first_stage(grid)) continue; /* counted there */
        for (int64_t b = 0; b < t->buckets; b++)
            device->kernels->sum_squares(device->stream, r->squares + i,
                                         tr_stretch_gradient(r, t, b), t->part);
    }
    device->copy(device->stream, squares, r->squares, (size_t)r->nstretches * sizeof *squares,
                 TR_TO_HOST);
    device->stream_wait(device->stream);
    for (int64_t i = 0; i < r->nstretches; i++) sum += squares[i];
    *sum_squares_p = sum;
}
