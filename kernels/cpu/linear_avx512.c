/* linear_avx512.c - matrix products for processors with AVX-512. Floor: kernels. */
#include "kernels/cpu/product.h"

static void multiply_f32(const tr_gemm *g) {
    tr_product_f32(g);
}
static void multiply_bf16(const tr_gemm *g) {
    tr_product_widened(g);
}

#include "kernels/cpu/linear_body.h"

void tr_linear_avx512(tr_kernels *k) {
    fill_rows(k);
}
