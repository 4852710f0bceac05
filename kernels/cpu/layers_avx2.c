/* layers_avx2.c - layers_body.h for AVX2. Floor: kernels. */
#define TR_LAYERS tr_cpu_layers_avx2
#include "kernels/cpu/layers_body.h"
