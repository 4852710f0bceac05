/* blas.c - dense matrix products by cuBLAS, in the module for GPUs. Floor: kernels.
 *
 * cuBLAS counts columns first: to it our C is C^T [N, M], so it is asked for op(B)^T op(A)^T, where
 * the operand that we store transposed is the one it transposes. Sums are fp32, without TF32 and
 * without partial sums in bf16. Each stream has a handle and a workspace of its own, always the
 * same: results repeat. Not measured on a card yet. */
#include "kernels/cuda/stream.h"
#include "kernels/makers.h"

#include <cublas_v2.h>

enum { WORKSPACE_BYTES = 32 << 20 };

static void check(tr_stream *s, cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    tr_cuda_fatal(s->device, "%s failed: %s", call, cublasGetStatusString(status));
}

static void end(tr_stream *s) {
    const tr_allocator *memory = &s->device->allocator;
    check(s, cublasDestroy(s->blas), "cublasDestroy");
    memory->free(memory->self, s->blas_workspace, WORKSPACE_BYTES);
    s->blas = s->blas_workspace = NULL;
}

/* The stream's handle, made at its first product. */
static cublasHandle_t handle_of(tr_stream *s) {
    if (s->blas) return s->blas;
    const tr_allocator *memory = &s->device->allocator;
    cublasHandle_t handle;
    check(s, cublasCreate(&handle), "cublasCreate");
    void *workspace = memory->alloc(memory->self, WORKSPACE_BYTES);
    if (!workspace)
        tr_cuda_fatal(s->device,
                      "out of memory: %d bytes wanted as cuBLAS's workspace; use more ranks, a "
                      "smaller micro_batch_size or parallel.recompute",
                      WORKSPACE_BYTES);
    check(s, cublasSetStream(handle, s->handle), "cublasSetStream");
    /* after the stream, which takes the workspace away */
    check(s, cublasSetWorkspace(handle, workspace, WORKSPACE_BYTES), "cublasSetWorkspace");
    cublasMath_t math =
        (cublasMath_t)(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    check(s, cublasSetMathMode(handle, math), "cublasSetMathMode");
    s->blas = handle;
    s->blas_workspace = workspace;
    s->blas_end = end;
    return handle;
}

static cudaDataType type_of(tr_dtype t) {
    return t == TR_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

static void gemm(tr_stream *s, const tr_gemm *g) {
    const float one = 1;
    if (g->M == 0 || g->N == 0) return;
    if (g->K == 0) {
        size_t width = tr_dtype_bytes(g->c);
        if (g->beta != 0) return;
        tr_cuda_check(s->device,
                      cudaMemset2DAsync(g->C, (size_t)g->ldc * width, 0, (size_t)g->N * width,
                                        (size_t)g->M, s->handle),
                      "cudaMemset2DAsync");
        return;
    }
    cublasOperation_t first = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType ab = type_of(g->ab);
    check(s,
          cublasGemmEx_64(handle_of(s), first, second, g->N, g->M, g->K, &one, g->B, ab, g->ldb,
                          g->A, ab, g->lda, &g->beta, g->C, type_of(g->c), g->ldc,
                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
}

void tr_cuda_blas(tr_kernels *k) {
    k->gemm = gemm;
}
