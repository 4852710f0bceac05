/* linear.c - matrix products: the portable form, and the choice. Floor: kernels. */
#include "kernels/cpu/product.h"

static void multiply_f32(const tr_gemm *g) {
    tr_product_sgemm(g);
}
static void multiply_bf16(const tr_gemm *g) {
    tr_product_widened(g);
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
