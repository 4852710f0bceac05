/* optimizer_avx2.c - AdamW and the sum of squares for processors with AVX2. Floor: kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/optimizer_body.h"

void tr_optimizer_avx2(tr_kernels *k) {
    fill_rows(k);
}
