/* table.c - prints the table. Floor: bench. */
#include "bench/table.h"

#include "base/log.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

static bool speaks(void) {
    return tr_log_get_rank() == 0;
}

void tr_table_head(void) {
    tr_say("%-40s %17s %9s %9s %11s", "", "measured", "base", "ratio", "target");
}

void tr_table_foot(const tr_table *t) {
    tr_say("%d targets met, %d missed, %d rows skipped", t->met, t->missed, t->skipped);
}

void tr_table_break(tr_table *table) {
    if (table->open) tr_say("failed");
    table->open = false;
}

void tr_row_begin(tr_table *table, const char *name, ...) {
    table->open = true;
    if (!speaks()) return;
    char text[64];
    va_list list;
    va_start(list, name);
    vsnprintf(text, sizeof text, name, list);
    va_end(list);
    printf("%-40s ", text);
    fflush(stdout);
}

/* A ratio, or a target of one, as the row's kind writes it. */
static void format(char out[32], const tr_row *row, const char *sign, double value) {
    if (row->kind == TR_SHARE)
        snprintf(out, 32, "%s%.*f %%", sign, *sign ? 0 : 1, 100 * value);
    else if (row->kind == TR_TIMES)
        snprintf(out, 32, "%s%.2f x", sign, value);
    else if (row->kind == TR_POINTS)
        snprintf(out, 32, "%s%.*f points", sign, *sign ? 0 : 1, value);
    else
        snprintf(out, 32, "%s%g %s", sign, value, row->unit);
}

void tr_row_end(tr_table *table, const tr_row *row) {
    table->open = false;
    char base[32] = "", ratio[32] = "", target[32] = "";
    const char *verdict = "";
    double value = row->measured;
    if (row->kind != TR_ALONE) {
        value =
            row->kind == TR_POINTS ? fabs(row->measured - row->base) : row->measured / row->base;
        snprintf(base, sizeof base, "%.2f", row->base);
        format(ratio, row, "", value);
    }
    if (row->target > 0) {
        bool met = row->at_most ? value <= row->target : value >= row->target;
        format(target, row, row->at_most ? "<= " : ">= ", row->target);
        verdict = met ? "met" : "missed";
        table->met += met;
        table->missed += !met;
    }
    char line[128];
    int n = snprintf(line, sizeof line, "%9.2f %-7s %9s %9s %11s  %s", row->measured, row->unit,
                     base, ratio, row->note ? row->note : target, verdict);
    while (n > 0 && line[n - 1] == ' ') line[--n] = 0;
    tr_say("%s", line);
}

void tr_row_skip(tr_table *table, const char *reason) {
    table->open = false;
    table->skipped++;
    tr_say("  skipped: %s", reason);
}
