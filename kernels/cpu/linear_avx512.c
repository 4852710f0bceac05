/* linear_avx512.c - matrix products for processors with AVX-512. Floor: kernels. */
#include "kernels/cpu/product.h"

static tr_product *product_for(const tr_gemm *g) {
    if (g->ab == TR_BF16) return tr_product_widened;
    return tr_product_f32_pays(g) ? tr_product_f32 : tr_product_sgemm;
}

#include "kernels/cpu/linear_body.h"

void tr_linear_avx512(tr_kernels *k) {
    fill_rows(k);
}
