/* overlap.c - which part of the gradients' reduction hides under the backward. Floor: bench. */
#include "bench/groups.h"
#include "bench/stepper.h"

static const double LEAST_SHARE = 0.01;

/* Collective on world. Seconds of a step's gradients: of ranks that share a batch, or, on
 * lab->alone, each with as many sequences and nobody to reduce with. */
static tr_status gradients_time(tr_lab *lab, tr_comm *comm, bool overlap, double *seconds_p) {
    const char *const sets[] = {overlap ? "parallel.overlap=true" : "parallel.overlap=false", NULL};
    tr_stepper s;
    int64_t batch = lab->B / lab->ranks * tr_comm_size(comm);
    tr_status status = tr_stepper_open(&s, lab, comm, TR_F32, batch, sets);
    if (status == TR_OK) status = tr_stepper_shape(&s, lab->T);
    status = tr_agree(lab->world, status);
    if (status == TR_OK)
        *seconds_p =
            tr_lab_time(lab, lab->world, 0.5 * (double)lab->repeats, tr_stepper_gradients, &s);
    tr_stepper_close(&s);
    return status;
}

/* On one node the reduction is itself computation, so that nothing is promised there. */
tr_status tr_bench_overlap(tr_lab *lab) {
    double under = 0, after = 0, none = 0;
    tr_row_begin(&lab->table, "reduction hidden under the backward");
    if (lab->ranks < 2) {
        tr_row_skip(&lab->table, "needs 2 ranks or more");
        return TR_OK;
    }
    TR_TRY(gradients_time(lab, lab->world, true, &under));
    TR_TRY(gradients_time(lab, lab->world, false, &after));
    TR_TRY(gradients_time(lab, lab->alone, false, &none));
    if (after - none < LEAST_SHARE * none) { /* a quotient of noise */
        tr_row_skip(&lab->table, "the reduction took less than 1 % of the backward's time");
        return TR_OK;
    }
    bool far = tr_comm_node_size(lab->world) < lab->ranks;
    tr_row_end(&lab->table, &(tr_row){.unit = "ms",
                                      .measured = 1e3 * (after - under),
                                      .base = 1e3 * (after - none),
                                      .kind = TR_SHARE,
                                      .target = far ? 0.7 : 0,
                                      .note = far ? NULL : "one node"});
    return TR_OK;
}
