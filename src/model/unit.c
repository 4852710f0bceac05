/* unit.c - whole weights from the parts that ranks own, see unit.h. Floor: model. */
#include "model/unit.h"

static size_t weight_bytes(const tr_registry *r, int64_t elems) {
    return (size_t)elems * tr_dtype_bytes(r->t);
}

/* Where a stretch's weights are, or go. */
static char *weights_of(const tr_registry *r, const tr_stretch *t) {
    const tr_space *s = &r->space[t->space];
    int64_t first = s->zero < 3 ? t->offset : s->weight_berths.berth[t->weight_berth].offset;
    return (char *)s->weights + weight_bytes(r, first);
}

static void gather_begin(const tr_registry *r, const tr_stretch *t, int64_t b) {
    char *bucket = weights_of(r, t) + weight_bytes(r, b * t->bucket_elems);
    t->gathering[b] =
        tr_all_gather_begin(r->space[t->space].comm, r->device->stream, r->t, bucket, t->part);
    if (r->options.overlap) return;
    tr_end(t->gathering[b]);
    t->gathering[b] = NULL;
}

static void gather_end(tr_registry *r, const tr_stretch *t) {
    tr_berths *berths = &r->space[t->space].weight_berths;
    for (int64_t b = 0; b < t->buckets; b++) {
        tr_end(t->gathering[b]);
        t->gathering[b] = NULL;
    }
    if (t->weight_berth >= 0) berths->berth[t->weight_berth].moving = false;
}

void tr_stretch_share(tr_registry *r, const tr_stretch *t, int64_t b) {
    if (r->space[t->space].zero < 3) gather_begin(r, t, b);
}

/* This rank's part of a bucket, from the master. */
static void cast_master(const tr_registry *r, const tr_stretch *t, int64_t b) {
    const tr_space *s = &r->space[t->space];
    char *to = weights_of(r, t) + weight_bytes(r, tr_stretch_piece(r, t, b));
    tr_dtype from_t = tr_master_type(r);
    const char *from =
        (char *)s->master + (size_t)(t->shard + b * t->part) * tr_dtype_bytes(from_t);
    if (r->t == from_t)
        r->device->copy(r->device->stream, to, from, weight_bytes(r, t->part), TR_ON_DEVICE);
    else
        r->device->kernels->cast(r->device->stream, r->t, to, from_t, from, t->part);
}

/* --- berths: stage 3 ----------------------------------------------------------------------------
 */

/* The parameters of a stretch are where its berth is, or nowhere. */
static void point(tr_registry *r, const tr_stretch *t) {
    const tr_unit *u = &r->units[t->unit];
    char *weights = t->weight_berth < 0 ? NULL : weights_of(r, t);
    for (int64_t i = u->first_param; i < u->first_param + u->params; i++) {
        tr_param *p = &r->params[i];
        if (p->stretch != t - r->stretches) continue;
        p->weight = weights ? weights + weight_bytes(r, p->offset - t->offset) : NULL;
    }
}

static void vacate(tr_registry *r, tr_berths *berths, int i) {
    if (berths->berth[i].holds < 0) return;
    tr_stretch *t = &r->stretches[berths->berth[i].holds];
    gather_end(r, t);
    t->weight_berth = -1;
    point(r, t);
    tr_berths_empty(berths, i);
}

/* Whole weights begin to come into a berth; false: there is none that may be emptied for them. */
static bool fetch(tr_registry *r, tr_stretch *t, bool patient) {
    tr_berths *berths = &r->space[t->space].weight_berths;
    int i = tr_berths_find(berths, t->buckets * t->bucket_elems, patient);
    if (i < 0) return false;
    vacate(r, berths, i);
    t->weight_berth = i;
    tr_berths_fill(berths, i, t - r->stretches);
    berths->berth[i].moving = true;
    for (int64_t b = 0; b < t->buckets; b++) {
        cast_master(r, t, b);
        gather_begin(r, t, b);
    }
    return true;
}

static void take_berth(tr_registry *r, tr_stretch *t) {
    tr_berths *berths = &r->space[t->space].weight_berths;
    if (t->weight_berth < 0 && !fetch(r, t, true))
        tr_abort("more weights are used at a time than there are berths for");
    berths->berth[t->weight_berth].users++;
    tr_berths_touch(berths, t->weight_berth);
    point(r, t);
}

/* --- units -------------------------------------------------------------------------------------
 */

void tr_unit_take(tr_registry *r, int64_t unit) {
    const tr_unit *u = &r->units[unit];
    for (int64_t i = u->first_stretch; i < u->first_stretch + u->stretches; i++) {
        tr_stretch *t = &r->stretches[i];
        if (r->space[t->space].zero >= 3) take_berth(r, t);
        gather_end(r, t);
    }
}

void tr_unit_leave(tr_registry *r, int64_t unit) {
    const tr_unit *u = &r->units[unit];
    for (int64_t i = u->first_stretch; i < u->first_stretch + u->stretches; i++) {
        const tr_stretch *t = &r->stretches[i];
        if (t->weight_berth >= 0) r->space[t->space].weight_berths.berth[t->weight_berth].users--;
    }
}

void tr_unit_expect(tr_registry *r, int64_t unit) {
    if (unit < 0 || !r->options.overlap) return;
    const tr_unit *u = &r->units[unit];
    for (int64_t i = u->first_stretch; i < u->first_stretch + u->stretches; i++) {
        tr_stretch *t = &r->stretches[i];
        if (r->space[t->space].zero >= 3 && t->weight_berth < 0) fetch(r, t, false);
    }
}

void tr_units_settle(tr_registry *r) {
    if (!r->device) return;
    for (int64_t i = 0; i < r->nstretches; i++) {
        tr_stretch *t = &r->stretches[i];
        gather_end(r, t);
        if (t->weight_berth >= 0) vacate(r, &r->space[t->space].weight_berths, t->weight_berth);
    }
}

void tr_registry_publish(tr_registry *r) {
    for (int64_t i = 0; i < r->nstretches; i++) {
        const tr_stretch *t = &r->stretches[i];
        const tr_space *s = &r->space[t->space];
        for (int64_t b = 0; b < t->buckets; b++) {
            if (s->master && s->zero < 3) cast_master(r, t, b);
            tr_stretch_share(r, t, b);
        }
    }
    tr_units_settle(r);
}
