/* linear.c - matrix products: the portable form, and the choice. Floor: kernels. */
#include "kernels/cpu/product.h"

static tr_product *product_for(const tr_gemm *g) {
    return g->ab == TR_BF16 ? tr_product_widened : tr_product_sgemm;
}

#include "kernels/cpu/linear_body.h"

void tr_cpu_linear(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512_BF16)
        tr_linear_avx512bf16(k);
    else if (level >= TR_CPU_AVX512)
        tr_linear_avx512(k);
    else
        fill_rows(k);
}
