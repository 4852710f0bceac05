/* dtype.h - element types, and what reduces them. Floor: base. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum { TR_F32, TR_BF16, TR_F64, TR_I32, TR_I64, TR_U8 } tr_dtype;

typedef enum { TR_SUM, TR_MAX, TR_MIN } tr_op;

typedef uint16_t tr_bf16; /* the upper half of a float32 */

static inline size_t tr_dtype_bytes(tr_dtype t) {
    switch (t) {
    case TR_F32:
        return 4;
    case TR_BF16:
        return 2;
    case TR_F64:
        return 8;
    case TR_I32:
        return 4;
    case TR_I64:
        return 8;
    case TR_U8:
        return 1;
    }
    return 0;
}

static inline float tr_bf16_to_f32(tr_bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline tr_bf16 tr_f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (tr_bf16)((u >> 16) | 0x40u);
    return (tr_bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
