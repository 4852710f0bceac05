/* linear_avx512bf16.c - matrix products for processors that multiply bf16. Floor: kernels. */
#include "kernels/cpu/product.h"

static void multiply_f32(const tr_gemm *g) {
    tr_product_f32(g);
}
static void multiply_bf16(const tr_gemm *g) {
    tr_product_bf16(g);
}

#include "kernels/cpu/linear_body.h"

void tr_linear_avx512bf16(tr_kernels *k) {
    fill_rows(k);
}
