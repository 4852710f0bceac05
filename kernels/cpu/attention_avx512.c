/* attention_avx512.c - attention for AVX-512. Floor: kernels. */
#define TR_PAIRS       0
#define TR_LEVEL(name) name##_avx512
#if defined(__x86_64__)
#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_forward.h"
#endif
