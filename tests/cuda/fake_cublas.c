/* fake_cublas.c - see fake_cublas.h. Compiled with cuBLAS's own header, so that signatures are
 * checked. Floor: tests. */
#include "fake_cublas.h"

#include "base/dtype.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LOG_BYTES = 4096 };

static struct {
    char log[LOG_BYTES];
    size_t used;
    const char *fails;
    int products;
    cublasComputeType_t compute;
    int handle; /* its address is the handle */
} fake;

void fake_reset(void) {
    memset(&fake, 0, sizeof fake);
}
void fake_fail(const char *name) {
    fake.fails = name;
}
const char *fake_log(void) {
    return fake.log;
}
int fake_products(void) {
    return fake.products;
}
cublasComputeType_t fake_compute(void) {
    return fake.compute;
}

static cublasStatus_t result(const char *name) {
    return fake.fails && strcmp(fake.fails, name) == 0 ? CUBLAS_STATUS_EXECUTION_FAILED
                                                       : CUBLAS_STATUS_SUCCESS;
}

__attribute__((format(printf, 2, 3))) static cublasStatus_t note(const char *name,
                                                                 const char *format, ...) {
    char line[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (fake.used + strlen(name) + strlen(line) < LOG_BYTES) /* a long log is not looked at */
        fake.used += (size_t)sprintf(fake.log + fake.used, "%s%s", name, line);
    return result(name);
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = (cublasHandle_t)(void *)&fake.handle;
    return note("cublasCreate", "\n");
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    return note("cublasDestroy", "%s\n", (void *)handle == &fake.handle ? "" : " of another");
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    (void)handle;
    return note("cublasSetStream", " %p\n", (void *)stream);
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes) {
    (void)handle;
    return note("cublasSetWorkspace", " %s %zu\n", workspace ? "given" : "none", bytes);
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    (void)handle;
    return note("cublasSetMathMode", " %d\n", (int)mode);
}
const char *cublasGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "fine" : "the fake says no";
}

static float load(cudaDataType t, const void *x, int64_t at) {
    return t == CUDA_R_32F ? ((const float *)x)[at] : tr_bf16_to_f32(((const tr_bf16 *)x)[at]);
}

static void store(cudaDataType t, void *x, int64_t at, float value) {
    if (t == CUDA_R_32F)
        ((float *)x)[at] = value;
    else
        ((tr_bf16 *)x)[at] = tr_f32_to_bf16(value);
}

/* cuBLAS documentation, "cublas<t>gemm": C = alpha op(A) op(B) + beta C, columns first. */
cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t transa,
                               cublasOperation_t transb, int64_t m, int64_t n, int64_t k,
                               const void *alpha, const void *A, cudaDataType Atype, int64_t lda,
                               const void *B, cudaDataType Btype, int64_t ldb, const void *beta,
                               void *C, cudaDataType Ctype, int64_t ldc,
                               cublasComputeType_t computeType, cublasGemmAlgo_t algo) {
    (void)handle, (void)algo;
    float a = *(const float *)alpha, b = *(const float *)beta;
    int64_t a_rows = transa == CUBLAS_OP_N ? m : k, b_rows = transb == CUBLAS_OP_N ? k : n;
    if (m < 1 || n < 1 || k < 1 || lda < a_rows || ldb < b_rows || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    fake.products++;
    fake.compute = computeType;
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++) {
                int64_t in_a = transa == CUBLAS_OP_N ? i + l * lda : l + i * lda;
                int64_t in_b = transb == CUBLAS_OP_N ? l + j * ldb : j + l * ldb;
                sum += (double)load(Atype, A, in_a) * (double)load(Btype, B, in_b);
            }
            int64_t at = i + j * ldc;
            float old = b != 0 ? b * load(Ctype, C, at) : 0;
            store(Ctype, C, at, a * (float)sum + old);
        }
    return result("cublasGemmEx");
}
