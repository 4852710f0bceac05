/* moe_avx2.c - moe_body.h for AVX2. Floor: kernels. */
#define TR_MOE tr_cpu_moe_avx2
#include "kernels/cpu/moe_body.h"
