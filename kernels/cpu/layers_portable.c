/* layers_portable.c - layers_body.h for any processor. Floor: kernels. */
#define TR_LAYERS tr_cpu_layers_portable
#include "kernels/cpu/layers_body.h"
