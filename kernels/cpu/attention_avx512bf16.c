/* attention_avx512bf16.c - attention for AVX-512 with bf16 products. Floor: kernels. */
#define TR_PAIRS       1
#define TR_LEVEL(name) name##_avx512bf16
#if defined(__x86_64__)
#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_forward.h"
#endif
