/* bound.h - single kernels beside what bounds them: a copy's bandwidth or the peak, both
 * measured in the same run. Floor: bench. */
#pragma once
#include "bench/lab.h"

typedef struct {
    tr_lab *lab;
    tr_device *device;
    const tr_kernels *k;
    tr_stream *s;
    double copy;    /* bytes a second that a large copy reads and writes */
    double peak[2]; /* operations a second, by type */
} tr_bound;

typedef struct {
    const char *kernel; /* its row of the table of kernels */
    tr_dtype t;
    double bytes, flop;      /* that any kernel would have to move at least, and to do */
    void (*run)(void *self); /* enqueues one call */
    void *self;
} tr_bound_row;

/* Local. Measures the bounds and prints the head of the table. */
void tr_bound_open(tr_bound *b, tr_lab *lab);
/* Local. Times a kernel and prints its row; what follows formats its shape. */
void tr_bound_time(const tr_bound *b, const tr_bound_row *row, const char *shape, ...)
    __attribute__((format(printf, 3, 4)));

/* Local. Device memory of the lab until its next reset: given int32 values, or not defined. */
int32_t *tr_bound_integers(const tr_bound *b, int64_t count, const int32_t *value);
void *tr_bound_room(const tr_bound *b, int64_t elems, tr_dtype t);

/* The families of kernels, Local. */
void tr_bound_products(const tr_bound *b); /* gemm, attention */
void tr_bound_layers(const tr_bound *b);   /* norms to embedding, loss, optimizer */
void tr_bound_moe(const tr_bound *b);      /* router, experts' rows, grouped_gemm */
