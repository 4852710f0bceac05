/* layers_avx512.c - layers_body.h for AVX-512. Floor: kernels. */
#define TR_LAYERS tr_cpu_layers_avx512
#include "kernels/cpu/layers_body.h"
