/* moe_avx2.c - routing and moving rows for processors with AVX2. Floor: kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/moe_body.h"

void tr_moe_avx2(tr_kernels *k) {
    fill_rows(k);
}
