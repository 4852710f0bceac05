/* draw.c - timelines as text and as traces. Floor: plan. */
#include "plan/draw.h"

#include "base/heap.h"
#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 82 }; /* of the bars, beside rank and idle time */

static char letter_of(const tr_action *a) {
    static const char letters[2][TR_ACTION_KINDS] = {{[TR_FORWARD] = 'F',
                                                      [TR_BACKWARD] = 'B',
                                                      [TR_BACKWARD_INPUT] = 'B',
                                                      [TR_WEIGHT] = 'W',
                                                      [TR_FORWARD_BACKWARD] = 'X'},
                                                     {[TR_FORWARD] = 'f',
                                                      [TR_BACKWARD] = 'b',
                                                      [TR_BACKWARD_INPUT] = 'b',
                                                      [TR_WEIGHT] = 'w',
                                                      [TR_FORWARD_BACKWARD] = 'x'}};
    return letters[a->task.chunk > 0][a->kind];
}

/* --- text ---------------------------------------------------------------------------------------
 */

/* Columns a unit of time, whole ones for the shortest computation where that is possible. */
static double scale_of(const tr_schedule *lists, const tr_timeline *t) {
    double shortest = t->end - t->start, scale = COLUMNS / (t->end - t->start);
    for (int64_t r = 0; r < t->ranks; r++)
        for (int64_t i = 0; i < lists[r].count; i++) {
            double length = t->spans[r][i].end - t->spans[r][i].start;
            if (tr_action_computes(lists[r].actions[i].kind) && length < shortest)
                shortest = length;
        }
    double columns = floor(shortest * scale + 1e-6);
    return columns >= 1 ? columns / shortest : scale;
}

/* A computation: its letter, the micro-batch where there is room, dashes to its end. Returns
 * whether there was room. */
static bool paint(char *row, int from, int to, const tr_action *a) {
    char number[24];
    int digits = snprintf(number, sizeof number, "%" PRId64, a->task.micro_batch);
    if (from == to && row[from] != '.') return false;
    row[from] = letter_of(a);
    for (int c = from + 1; c < to; c++)
        row[c] = digits < to - from && c - from <= digits ? number[c - from - 1] : '-';
    return digits < to - from;
}

void tr_draw_timeline(const tr_schedule *lists, const tr_schedule_shape *shape,
                      const tr_timeline *t) {
    double length = t->end - t->start, scale = scale_of(lists, t);
    int width = (int)lround(length * scale);
    bool both = false, numbered = false;
    for (int64_t r = 0; r < t->ranks; r++) {
        char row[COLUMNS + 2];
        memset(row, '.', sizeof row);
        for (int64_t i = 0; i < lists[r].count; i++) {
            const tr_action *a = &lists[r].actions[i];
            if (!tr_action_computes(a->kind)) continue;
            both |= a->kind == TR_FORWARD_BACKWARD;
            numbered |= paint(row, (int)lround((t->spans[r][i].start - t->start) * scale),
                              (int)lround((t->spans[r][i].end - t->start) * scale), a);
        }
        tr_say("rank %-3d %.*s %4.1f%%", (int)r, width, row, 100 * t->idle[r] / length);
    }
    tr_say("F forward, B backward, W weight gradients, . idle%s",
           numbered ? "; the number is the micro-batch" : "");
    if (both) tr_say("X forward and, at the same time, backward of another micro-batch");
    if (shape->stages.chunks > 1) tr_say("small letters: a rank's chunks after its first");
    tr_say("idle %.2f %% of all ranks' time; %.4g units long", 100 * tr_timeline_idle(t), length);
}

/* --- trace --------------------------------------------------------------------------------------
 */

static void write_event(FILE *f, const tr_schedule_shape *shape, int64_t rank, const tr_action *a,
                        tr_span span) {
    fprintf(f,
            ",\n{\"ph\":\"X\",\"name\":\"%s\",\"pid\":0,\"tid\":%" PRId64
            ",\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"micro_batch\":%" PRId64
            ",\"chunk\":%d,\"stage\":%" PRId64,
            tr_action_name(a->kind), rank, 1000 * span.start, 1000 * (span.end - span.start),
            a->task.micro_batch, (int)a->task.chunk,
            tr_stage_of(&shape->stages, rank, a->task.chunk));
    if (a->kind == TR_FORWARD_BACKWARD)
        fprintf(f, ",\"backward_micro_batch\":%" PRId64 ",\"backward_chunk\":%d",
                a->other.micro_batch, (int)a->other.chunk);
    fprintf(f, "}}");
}

tr_status tr_write_trace(const char *path, const tr_schedule *lists, const tr_schedule_shape *shape,
                         const tr_timeline *t) {
    FILE *f = fopen(path, "w");
    if (!f)
        return tr_fail(TR_ERR_IO, "cannot write %s: %s; name another file after --trace", path,
                       strerror(errno));
    fprintf(f, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
               "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"args\":{\"name\":\"trireme "
               "schedule\"}}");
    for (int64_t r = 0; r < t->ranks; r++) {
        fprintf(f,
                ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":%" PRId64
                ",\"args\":{\"name\":\"rank %" PRId64 "\"}}",
                r, r);
        for (int64_t i = 0; i < lists[r].count; i++) {
            const tr_action *a = &lists[r].actions[i];
            tr_span span = t->spans[r][i];
            if (tr_action_name(a->kind) && span.end > span.start) write_event(f, shape, r, a, span);
        }
    }
    fprintf(f, "\n]}\n");
    bool failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed)
        return tr_fail(TR_ERR_IO, "cannot write %s: %s; make room, or name another file", path,
                       strerror(errno));
    return TR_OK;
}

/* --- the command --------------------------------------------------------------------------------
 */

static void say_what(const tr_config *config, const tr_schedule_shape *shape) {
    int64_t layers = config->model.num_hidden_layers, stages = tr_stages_count(&shape->stages);
    int64_t most = tr_stage_layers(&shape->stages, layers, 0).count;
    char *name = tr_config_value(config, "parallel.schedule");
    tr_say("schedule %s: %" PRId64 " pipeline rank%s x %" PRId64 " stage%s, %" PRId64
           " micro-batch%s; %" PRId64 " layers, %" PRId64 "%s a stage",
           name, shape->stages.ranks, shape->stages.ranks == 1 ? "" : "s", shape->stages.chunks,
           shape->stages.chunks == 1 ? "" : "s", shape->micro_batches,
           shape->micro_batches == 1 ? "" : "es", layers, most,
           layers % stages ? " or one less" : "");
    double share = (double)layers / (double)shape->stages.ranks;
    tr_say("a unit: %.3g layer%s forward, or back to the inputs, or back to the weights", share,
           share == 1 ? "" : "s");
    free(name);
}

static void say_idle(const tr_config *config, const tr_timeline *t) {
    char *name = tr_config_value(config, "parallel.schedule");
    tr_say("schedule   %s leaves ranks idle for %.2f %% of the time if a forward, a gradient of",
           name, 100 * tr_timeline_idle(t));
    tr_say("           inputs and one of weights take equally long and messages none; --schedule "
           "draws it");
    free(name);
}

tr_status tr_plan_schedule(const tr_config *config, int64_t micro_batches, bool draw,
                           const char *trace) {
    tr_schedule_shape shape = {.kind = config->parallel.schedule,
                               .stages = tr_stages_of(config),
                               .micro_batches = micro_batches};
    int64_t stages = tr_stages_count(&shape.stages), layers = config->model.num_hidden_layers;
    double *share = tr_heap_alloc(stages, sizeof *share);
    for (int64_t s = 0; s < stages; s++)
        share[s] = (double)(tr_stage_layers(&shape.stages, layers, s).count * shape.stages.ranks) /
                   (double)layers;
    tr_schedule *all = tr_schedules_create(&shape);
    tr_status status = tr_schedules_prove(all, &shape);
    if (status == TR_OK) {
        tr_costs costs = {.forward = 1, .input = 1, .weight = 1, .share = share};
        tr_timeline t = tr_simulate(all, &shape, &costs);
        if (draw) {
            say_what(config, &shape);
            tr_draw_timeline(all, &shape, &t);
        } else {
            say_idle(config, &t);
        }
        if (trace) status = tr_write_trace(trace, all, &shape, &t);
        if (trace && status == TR_OK)
            tr_say("trace %s (open it in https://ui.perfetto.dev)", trace);
        tr_timeline_free(&t);
    }
    tr_schedules_free(all, shape.stages.ranks);
    free(share);
    return status;
}
