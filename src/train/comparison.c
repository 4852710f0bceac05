/* comparison.c - limits, verdict and table of a proof. Floor: train. */
#include "train/comparison.h"

#include "base/heap.h"
#include "base/log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_COLUMNS = 48, FLIPS_PRINTED = 5 };

static const char *const sum_names[] = {"loss", "aux loss", "z loss", "gradient norm"};

/* float32: what the order of sums leaves (measured over grids of up to 8 ranks: loss 1e-7,
 * gradients 1e-6), with room for long sums. bfloat16: ring attention rounds its activations, an
 * element that falls to the other side of a rounding is off by 4e-3 (measured: loss 2e-5, norm
 * 6e-4, gradients 7e-3, gaps 8e-4); other splits give the same activations bit for bit. A flipped
 * token changes its own share of each sum over the tokens, and gradients of random sign add up as
 * roots. */
tr_verify_limits tr_verify_limits_of(tr_dtype t, int64_t flips, int64_t tokens) {
    tr_verify_limits exact = {{2e-6, 2e-6, 2e-6, 5e-6}, 1e-5, 2e-6, 1e-5, 1e-3};
    tr_verify_limits rounded = {{2e-4, 2e-3, 2e-3, 5e-3}, 5e-2, 2e-6, 5e-3, 1e-1};
    tr_verify_limits l = t == TR_F32 ? exact : rounded;
    if (flips == 0) return l;
    static const double flipped[TR_VERIFY_SUMS] = {1e-4, 2e-3, 2e-3, 1e-3};
    for (int i = 0; i < TR_VERIFY_SUMS; i++) l.sum[i] = fmax(l.sum[i], flipped[i]);
    l.gradient = fmax(l.gradient, fmin(1, 4 * sqrt((double)flips / (double)tokens)));
    return l;
}

double tr_verify_relative(const float *a, const float *b, int64_t n, double least) {
    double diff = 0, norm = 0;
#pragma omp parallel for schedule(static) reduction(+ : diff, norm)
    for (int64_t i = 0; i < n; i++) {
        double x = (double)a[i], y = (double)b[i];
        diff += (x - y) * (x - y);
        norm += y * y;
    }
    return diff == 0 ? 0 : sqrt(diff) / fmax(sqrt(norm), least);
}

static double relative(double a, double b) {
    if (a == b) return 0;
    return b == 0 ? fabs(a) : fabs(a - b) / fabs(b);
}

/* NaN is over every limit. */
static bool over(double difference, double limit) {
    return !(difference <= limit);
}

/* How many times its limit the worst of a row is; NaN counts as infinite. */
static double badness(const tr_comparison *c, const tr_verify_row *row) {
    double worst = 0;
    for (int s = 0; s < TR_VERIFIED_STEPS; s++) {
        double g = row->gradient[s] / c->step[s].limits.gradient;
        double w = row->weight[s] / c->step[s].limits.weight;
        if (isnan(g) || isnan(w)) return INFINITY;
        worst = fmax(worst, fmax(g, w));
    }
    return worst;
}

/* --- the table ---------------------------------------------------------------------------------
 */

static void print_sums(const tr_verify_step *s, int number) {
    tr_say("step %d %-9s %18s %18s %12s %10s", number, "", "grid", "one rank", "difference",
           "limit");
    for (int i = 0; i < TR_VERIFY_SUMS; i++) {
        double d = relative(s->grid[i], s->one[i]);
        tr_say("  %-14s %18.9g %18.9g %12.1e %10.0e%s", sum_names[i], s->grid[i], s->one[i], d,
               s->limits.sum[i], over(d, s->limits.sum[i]) ? "  over" : "");
    }
}

static void print_flips(const tr_verify_step *s) {
    const tr_flips *f = &s->flips;
    if (f->count == 0) return;
    tr_say("  %lld token%s routed differently, which explains differences up to these limits:",
           (long long)f->count, f->count == 1 ? "" : "s");
    for (int64_t i = 0; i < f->count && i < FLIPS_PRINTED; i++)
        tr_say("    MoE layer %lld, sequence %lld, position %lld: score gap %.1e%s%s",
               (long long)f->flips[i].layer, (long long)f->flips[i].sequence,
               (long long)f->flips[i].position, f->flips[i].gap,
               f->flips[i].caused ? ", after one before" : "",
               !f->flips[i].caused && over(f->flips[i].gap, s->limits.gap) ? "  over" : "");
    if (f->count > FLIPS_PRINTED)
        tr_say("    and %lld more", (long long)(f->count - FLIPS_PRINTED));
}

/* Whole, or with its middle left out. */
static void shorten(char *out, const char *name) {
    size_t length = strlen(name), half = (NAME_COLUMNS - 3) / 2;
    if (length <= NAME_COLUMNS)
        strcpy(out, name);
    else
        sprintf(out, "%.*s...%s", (int)half, name, name + length - (NAME_COLUMNS - 3 - half));
}

static void print_row(const tr_comparison *c, const tr_verify_row *row) {
    char name[NAME_COLUMNS + 1], text[TR_VERIFIED_STEPS][32];
    shorten(name, row->name);
    for (int s = 0; s < TR_VERIFIED_STEPS; s++) {
        const tr_verify_limits *l = &c->step[s].limits;
        snprintf(text[s], sizeof text[s], "%c%9.1e %c%9.1e",
                 over(row->gradient[s], l->gradient) ? '!' : ' ', row->gradient[s],
                 over(row->weight[s], l->weight) ? '!' : ' ', row->weight[s]);
    }
    tr_say("  %-*s %s %s", NAME_COLUMNS, name, text[0], text[1]);
}

/* Rows and how bad they are, for sorting. */
typedef struct {
    const tr_verify_row *row;
    double badness;
} ranked;

static int worst_first(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->badness != y->badness) return x->badness > y->badness ? -1 : 1;
    return (x->row > y->row) - (x->row < y->row);
}

static ranked *rank_rows(const tr_comparison *c) {
    ranked *rows = tr_heap_alloc(c->count, sizeof *rows);
    for (int64_t i = 0; i < c->count; i++) rows[i] = (ranked){&c->rows[i], badness(c, &c->rows[i])};
    qsort(rows, (size_t)c->count, sizeof *rows, worst_first);
    return rows;
}

void tr_comparison_print(const tr_comparison *c, int64_t most) {
    const tr_verify_limits *l = &c->step[0].limits;
    for (int s = 0; s < TR_VERIFIED_STEPS; s++) {
        print_sums(&c->step[s], s + 1);
        print_flips(&c->step[s]);
    }
    ranked *rows = rank_rows(c);
    tr_say("%-*s %10s %10s %10s %10s", NAME_COLUMNS + 2, "parameter, worst first", "gradient 1",
           "weight 1", "gradient 2", "weight 2");
    for (int64_t i = 0; i < c->count && i < most; i++) print_row(c, rows[i].row);
    if (c->count > most)
        tr_say("  and %lld more, none of them worse (--all lists them)",
               (long long)(c->count - most));
    tr_say("  %-*s %10.0e %10.0e %10.0e %10.0e", NAME_COLUMNS, "limit", l->gradient, l->weight,
           c->step[1].limits.gradient, c->step[1].limits.weight);
    free(rows);
}

/* --- the verdict -------------------------------------------------------------------------------
 */

static tr_status judge_step(const tr_verify_step *s, int number) {
    for (int i = 0; i < TR_VERIFY_SUMS; i++) {
        double d = relative(s->grid[i], s->one[i]);
        if (over(d, s->limits.sum[i]))
            return tr_fail(TR_ERR_INTERNAL, "step %d: %s %.9g against one rank's %.9g, off by %.1e",
                           number, sum_names[i], s->grid[i], s->one[i], d);
    }
    if (over(s->flips.gap, s->limits.gap))
        return tr_fail(
            TR_ERR_INTERNAL,
            "step %d: a token goes to another expert by a score gap of %.1e, which is no "
            "near tie (%.0e)",
            number, s->flips.gap, s->limits.gap);
    if (s->flips.unseen)
        return tr_fail(TR_ERR_INTERNAL, "step %d: %lld tokens were routed nowhere", number,
                       (long long)s->flips.unseen);
    return TR_OK;
}

static tr_status judge_row(const tr_comparison *c, const tr_verify_row *row) {
    for (int s = 0; s < TR_VERIFIED_STEPS; s++) {
        const tr_verify_limits *l = &c->step[s].limits;
        bool gradient = over(row->gradient[s], l->gradient);
        if (gradient || over(row->weight[s], l->weight))
            return tr_fail(TR_ERR_INTERNAL, "step %d: the %s of %s is off by %.1e", s + 1,
                           gradient ? "gradient" : "new weight", row->name,
                           gradient ? row->gradient[s] : row->weight[s]);
    }
    return TR_OK;
}

tr_status tr_comparison_judge(const tr_comparison *c) {
    tr_status status = TR_OK;
    if (c->fault[0]) status = tr_fail(TR_ERR_INTERNAL, "%s", c->fault);
    ranked *rows = rank_rows(c);
    if (status == TR_OK && c->count > 0) status = judge_row(c, rows[0].row);
    free(rows);
    for (int s = 0; s < TR_VERIFIED_STEPS && status == TR_OK; s++)
        status = judge_step(&c->step[s], s + 1);
    if (status == TR_OK) return TR_OK;
    return tr_context(status, "this grid does not compute what one rank computes");
}
