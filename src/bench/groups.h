/* groups.h - the groups of rows. Floor: bench. Each is collective on world and leaves nothing
 * behind. */
#pragma once
#include "bench/lab.h"

/* kernels */
void tr_bench_gemm(tr_lab *lab);      /* matrix products of a training step */
void tr_bench_attention(tr_lab *lab); /* flash attention: speed, memory */
void tr_bench_experts(tr_lab *lab);   /* a mixture-of-experts layer against a dense one */

/* comm */
void tr_bench_sum(tr_lab *lab);             /* gradients' sum over the ranks */
void tr_bench_context(tr_lab *lab);         /* attention of context ranks against one rank */
void tr_bench_exchange(tr_lab *lab);        /* rows to experts: by node against flat */
tr_status tr_bench_overlap(tr_lab *lab);    /* what of the reduction hides under the backward */
tr_status tr_bench_checkpoint(tr_lab *lab); /* save and load against raw writes and reads */

/* train */
tr_status tr_bench_schedules(tr_lab *lab); /* pipelines' idle time against the simulated */
tr_status tr_bench_train(tr_lab *lab);     /* whole steps: speed, memory, data parallelism */

/* rows */
void tr_bench_rows(tr_lab *lab); /* each row of the table of kernels beside its bound */
