/* product.h - one matrix product by one thread, and how a call's products are shared between
 * threads. Floor: kernels, internal. */
#pragma once
#include "kernels/kernels.h"

/* The part of g's C with rows m0..m1-1 and columns n0..n1-1 as a product of its own. */
tr_gemm tr_product_part(const tr_gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

/* g by the calling thread alone, without OpenMP; M, N, K >= 1. A and B are bf16, AVX512-BF16. Takes
 * the thread's scratch memory. */
void tr_product_bf16(const tr_gemm *g);
