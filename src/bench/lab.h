/* lab.h - what the measurements share: the model they are about, the clock, peaks, memory and
 * random numbers on the device. Floor: bench. */
#pragma once
#include "bench/table.h"
#include "kernels/kernels.h"
#include "train/job.h"

typedef struct {
    /* borrowed */
    tr_comm *world;
    int nsets;
    char *const *sets;
    /* owned */
    tr_comm *alone;    /* this rank by itself */
    tr_config *config; /* of the model measured, float32 */
    tr_job *plan;      /* of it, without storage: threads, device, counts */
    tr_arena *memory;  /* device; reset between groups of rows */
    /* derived */
    int ranks, threads;
    tr_device *device;
    int64_t B, T;    /* sequences of a step over all ranks, and their length */
    int64_t repeats; /* training.steps: each row is measured at least so many times */
    char name[32];   /* of the run whose files are written: bench-PID */
    uint64_t drawn;  /* streams of random numbers used so far */
    tr_table table;
} tr_lab;

/* Collective on world. TR_ERR_USAGE when the settings are impossible. */
tr_status tr_lab_open(tr_lab *lab, tr_comm *world, int nsets, char *const *sets);
void tr_lab_close(tr_lab *lab); /* Collective on world */

/* Collective on comm. A job of the model with this type and so many sequences a step, one
 * micro-batch a rank, or as `sets` (ended by NULL; nullable) say. The config belongs to the caller,
 * after the job. */
tr_status tr_lab_job(tr_lab *lab, tr_comm *comm, tr_dtype t, int64_t batch, const char *const *sets,
                     tr_config **config_p, tr_job **job_p);

/* Collective on comm. Median over repetitions of the time in seconds that the slowest rank takes
 * for `work`, after one that is not counted. Goes on until `seconds` are spent. */
double tr_lab_time(const tr_lab *lab, tr_comm *comm, double seconds, void (*work)(void *self),
                   void *self);
double tr_lab_now(void);
double tr_lab_median(double *times, int64_t count); /* sorts */

/* Collective on world. Rank 0 works while the others sleep. */
void tr_lab_rank_0(const tr_lab *lab, void (*work)(void *self), void *self);

/* Collective on world. A row with the peak of a type, GFLOP/s of all ranks together, measured while
 * all compute. */
double tr_lab_peak(tr_lab *lab, tr_dtype t);

/* Collective on world. */
double tr_lab_sum(const tr_lab *lab, double value);

/* Local. Device memory of `elems` of type t with values in [-0.5, 0.5), until the next reset. */
void *tr_lab_random(tr_lab *lab, int64_t elems, tr_dtype t);
/* Local. Causal attention of B sequences of length S over themselves, H heads of D, rows [H, D]:
 * random operands and room for all results, until the next reset. */
tr_attention tr_lab_attention(tr_lab *lab, tr_dtype t, int64_t B, int64_t S, int64_t H, int64_t D);

const char *tr_lab_dtype(tr_dtype t); /* "fp32", "bf16" */

/* Local. This process's memory in bytes. peak: the most resident since tr_resident_restart (false:
 * this system cannot start again; then since the process began). duplicate: of what is resident
 * now, the part that other processes show as theirs too. */
bool tr_resident_restart(void);
double tr_resident_now(void);
double tr_resident_peak(void);
double tr_resident_duplicate(void);
