/* Property: the products that blas.c asks cuBLAS for are those of the contract, for all transposes,
 * types, gaps between rows and empty sizes; it sets its handle up once a stream, gives back what it
 * took, and tells each failure by name. A cuBLAS in plain loops on the host stands in. */
#include "fake_cublas.h"

#include "kernels/cuda/stream.h"
#include "kernels/makers.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ends.h"

/* What blas.c needs of device.c. */
static char fatal_text[300];
static jmp_buf fatal_exit;
static int blocks; /* of memory, not given back */

void tr_cuda_fatal(const tr_device *device, const char *format, ...) {
    va_list arguments;
    (void)device;
    va_start(arguments, format);
    vsnprintf(fatal_text, sizeof fatal_text, format, arguments);
    va_end(arguments);
    longjmp(fatal_exit, 1);
}

void tr_cuda_check(const tr_device *device, cudaError_t error, const char *call) {
    if (error != cudaSuccess) tr_cuda_fatal(device, "%s failed", call);
}

cudaError_t cudaMemset2DAsync(void *memory, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
    (void)stream;
    for (size_t i = 0; i < height; i++) memset((char *)memory + i * pitch, value, width);
    return cudaSuccess;
}

static void *alloc(void *self, size_t bytes) {
    (void)self;
    blocks++;
    return malloc(bytes);
}

static void give_back(void *self, void *memory, size_t bytes) {
    (void)self, (void)bytes;
    blocks--;
    free(memory);
}

static tr_kernels kernels;
static tr_device device = {.kernels = &kernels, .allocator = {.alloc = alloc, .free = give_back}};

static tr_stream stream_of(uintptr_t handle) {
    return (tr_stream){.device = &device, .handle = (cudaStream_t)handle};
}

static double load(tr_dtype t, const void *x, int64_t at) {
    return (double)(t == TR_F32 ? ((const float *)x)[at]
                                : tr_bf16_to_f32(((const tr_bf16 *)x)[at]));
}

static void store(tr_dtype t, void *x, int64_t at, float value) {
    if (t == TR_F32)
        ((float *)x)[at] = value;
    else
        ((tr_bf16 *)x)[at] = tr_f32_to_bf16(value);
}

/* n small integers, which all types hold and sums keep. */
static void *integers(tr_dtype t, int64_t n, unsigned seed) {
    void *x = malloc((size_t)(n + 1) * tr_dtype_bytes(t));
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        store(t, x, i, (float)(seed >> 28) - 7);
    }
    return x;
}

static void check_gemm(int64_t M, int64_t N, int64_t K, bool ta, bool tb, tr_dtype ab, tr_dtype c,
                       float beta, int64_t gap) {
    int64_t lda = (ta ? M : K) + gap, ldb = (tb ? K : N) + gap + 1, ldc = N + 2 * gap;
    void *A = integers(ab, (ta ? K : M) * lda, 1), *B = integers(ab, (tb ? N : K) * ldb, 2);
    void *C = integers(c, M * ldc, 3), *old = integers(c, M * ldc, 3);
    if (beta == 0)
        for (int64_t i = 0; i < M; i++)
            for (int64_t j = 0; j < N; j++) store(c, C, i * ldc + j, NAN);
    tr_stream s = stream_of(1);
    tr_gemm g = {M, N, K, A, B, C, lda, ldb, ldc, ta, tb, ab, c, beta};
    kernels.gemm(&s, &g);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < ldc; j++) {
            double want = load(c, old, i * ldc + j);
            if (j < N) {
                want *= (double)beta;
                for (int64_t k = 0; k < K; k++)
                    want += load(ab, A, ta ? k * lda + i : i * lda + k) *
                            load(ab, B, tb ? j * ldb + k : k * ldb + j);
            }
            if (c == TR_BF16) want = (double)tr_bf16_to_f32(tr_f32_to_bf16((float)want));
            assert_true(load(c, C, i * ldc + j) == want);
        }
    if (s.blas_end) s.blas_end(&s);
    free(A), free(B), free(C), free(old);
}

static void products_are_the_contracts(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {8, 2, 5}, {2, 9, 1},
                                       {0, 4, 3}, {4, 0, 3}, {4, 3, 0}};
    static const tr_dtype types[][2] = {{TR_F32, TR_F32}, {TR_BF16, TR_F32}, {TR_BF16, TR_BF16}};
    fake_reset();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int t = 0; t < 3; t++)
            for (int flags = 0; flags < 16; flags++)
                check_gemm(sizes[i][0], sizes[i][1], sizes[i][2], flags & 1, flags & 2, types[t][0],
                           types[t][1], flags & 4 ? 1.0f : 0.0f, flags & 8 ? 3 : 0);
    assert_int_equal(fake_products(), 4 * 3 * 16);
    assert_int_equal(fake_compute(), CUBLAS_COMPUTE_32F);
    assert_int_equal(blocks, 0);
}

static void one_handle_a_stream(void **state) {
    (void)state;
    float x[2] = {2, 3}, y = 0;
    tr_stream s = stream_of(5), other = stream_of(6);
    tr_gemm g = {1, 1, 2, x, x, &y, 2, 1, 1, false, false, TR_F32, TR_F32, 0};
    fake_reset();
    kernels.gemm(&s, &g);
    kernels.gemm(&s, &g);
    kernels.gemm(&other, &g);
    s.blas_end(&s);
    other.blas_end(&other);
    assert_true(y == 13);
    assert_int_equal(fake_products(), 3);
    assert_string_equal(fake_log(), "cublasCreate\ncublasSetStream 0x5\n"
                                    "cublasSetWorkspace given 33554432\ncublasSetMathMode 16\n"
                                    "cublasCreate\ncublasSetStream 0x6\n"
                                    "cublasSetWorkspace given 33554432\ncublasSetMathMode 16\n"
                                    "cublasDestroy\ncublasDestroy\n");
    assert_int_equal(blocks, 0);
}

static void failures_are_told(void **state) {
    (void)state;
    static const char *const calls[] = {"cublasCreate", "cublasSetStream", "cublasSetWorkspace",
                                        "cublasSetMathMode", "cublasGemmEx"};
    float x = 1;
    tr_gemm g = {1, 1, 1, &x, &x, &x, 1, 1, 1, false, false, TR_F32, TR_F32, 0};
    for (volatile size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        static tr_stream s;
        s = stream_of(1);
        fake_reset();
        fake_fail(calls[i]);
        if (setjmp(fatal_exit) == 0) {
            kernels.gemm(&s, &g);
            fail_msg("%s failed unnoticed", calls[i]);
        }
        assert_non_null(strstr(fatal_text, calls[i]));
        assert_non_null(strstr(fatal_text, "the fake says no"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_the_contracts),
        cmocka_unit_test(one_handle_a_stream),
        ENDING_TEST(failures_are_told),
    };
    tr_cuda_blas(&kernels);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
