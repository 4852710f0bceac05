/* values.h - wanted values in float64, for tests that loop over the types of the table.
 * Floor: tests. */
#pragma once
#include "harness.h"

#include <stdlib.h>
#include <string.h>

static const tr_dtype types[] = {TR_F32, TR_BF16};
enum { TYPES = sizeof types / sizeof *types };

static inline const char *type_name(tr_dtype t) {
    return t == TR_BF16 ? "bf16" : "f32";
}

/* n zeros, or what x held when it was last uploaded or read; the caller frees them. */
static inline double *doubles(int64_t n) {
    double *x = calloc((size_t)n + 1, sizeof *x);
    assert_non_null(x);
    return x;
}

static inline double *copy_of(const kt_tensor *x) {
    double *y = doubles(x->n);
    memcpy(y, x->value, (size_t)x->n * sizeof *y);
    return y;
}
