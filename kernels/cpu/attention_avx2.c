/* attention_avx2.c - attention for AVX2 with FMA. Floor: kernels. */
#define TR_PAIRS       0
#define TR_LEVEL(name) name##_avx2
#if defined(__x86_64__)
#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_forward.h"
#endif
