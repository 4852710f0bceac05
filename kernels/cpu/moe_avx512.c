/* moe_avx512.c - routing and moving rows for processors with AVX-512. Floor: kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/moe_body.h"

void tr_moe_avx512(tr_kernels *k) {
    fill_rows(k);
}
