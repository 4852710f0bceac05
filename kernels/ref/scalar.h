/* scalar.h - element access by type, for the plain loops. Floor: kernels, internal. */
#pragma once
#include "base/dtype.h"

/* Element i of an array of type t (F32 or BF16), and where it lies. */
static inline float tr_load(tr_dtype t, const void *x, int64_t i) {
    return t == TR_BF16 ? tr_bf16_to_f32(((const tr_bf16 *)x)[i]) : ((const float *)x)[i];
}

static inline void tr_store(tr_dtype t, void *x, int64_t i, float value) {
    if (t == TR_BF16)
        ((tr_bf16 *)x)[i] = tr_f32_to_bf16(value);
    else
        ((float *)x)[i] = value;
}

static inline const void *tr_at(tr_dtype t, const void *x, int64_t i) {
    return (const char *)x + i * (int64_t)tr_dtype_bytes(t);
}

static inline void *tr_at_mutable(tr_dtype t, void *x, int64_t i) {
    return (char *)x + i * (int64_t)tr_dtype_bytes(t);
}
