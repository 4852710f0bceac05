/* makers.h - who fills which rows of the kernel table. Floor: kernels, internal.
 * Each function sets the rows of its concept; cpu functions leave a row alone when they have
 * nothing faster for that level. */
#pragma once
#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { TR_CPU_PORTABLE, TR_CPU_AVX2, TR_CPU_AVX512, TR_CPU_AVX512_BF16 } tr_cpu_level;

/* The highest that this processor runs. */
tr_cpu_level tr_cpu_best_level(void);
/* The fastest on it: the highest but on Intel's, whose bf16 dot product (32 multiply-adds, every
 * second cycle on family 6 model 207, bench's peaks) does half of what two fp32 multiply-adds a
 * cycle do. */
tr_cpu_level tr_cpu_fastest_level(void);

void tr_ref_linear(tr_kernels *k); /* gemm, grouped_gemm, grouped_gemm_weight */
void tr_ref_layers(tr_kernels *k); /* rmsnorm, layernorm, rope, glu, add, cast */
void tr_ref_loss(tr_kernels *k);   /* embedding, cross_entropy */
void tr_ref_moe(tr_kernels *k);    /* router_*, moe_*, gather/combine rows */
void tr_ref_attention(tr_kernels *k);
void tr_ref_optimizer(tr_kernels *k); /* adamw, sum_squares */

void tr_cpu_linear(tr_kernels *k, tr_cpu_level level);
void tr_cpu_layers(tr_kernels *k, tr_cpu_level level);
void tr_cpu_loss(tr_kernels *k, tr_cpu_level level);
void tr_cpu_moe(tr_kernels *k, tr_cpu_level level);
void tr_cpu_attention(tr_kernels *k, tr_cpu_level level);
void tr_cpu_optimizer(tr_kernels *k, tr_cpu_level level);

/* In the modules: rows of kernels that are enqueued on a stream of kernels/cuda/stream.h. */
void tr_cuda_linear(tr_kernels *k);
void tr_cuda_layers(tr_kernels *k);
void tr_cuda_loss(tr_kernels *k);
void tr_cuda_moe(tr_kernels *k); /* with the router */
void tr_cuda_router(tr_kernels *k);
void tr_cuda_attention(tr_kernels *k);
void tr_cuda_optimizer(tr_kernels *k);
void tr_cuda_blas(tr_kernels *k); /* gemm by cuBLAS, in the module for GPUs */

#ifdef __cplusplus
}
#endif
