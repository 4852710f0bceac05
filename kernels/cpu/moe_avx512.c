/* moe_avx512.c - moe_body.h for AVX-512. Floor: kernels. */
#define TR_MOE tr_cpu_moe_avx512
#include "kernels/cpu/moe_body.h"
