/* moe_portable.c - moe_body.h for any processor. Floor: kernels. */
#define TR_MOE tr_cpu_moe_portable
#include "kernels/cpu/moe_body.h"
