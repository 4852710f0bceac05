/* Property: threads of a block exchange through shared memory across barriers; votes at barriers
 * count what the threads said; exited threads are not waited for. */
#include "tests/simt/check.h"

__global__ void reverse(int *out, const int *in) {
    SIMT_DYN_SMEM(int, s);
    SIMT_SHARED(int, first, 1);
    int i = (int)threadIdx.x, n = (int)blockDim.x, base = (int)blockIdx.x * n;
    s[i] = in[base + i];
    if (i == 0) first[0] = in[base];
    SYNCTHREADS();
    out[base + i] = s[n - 1 - i] - first[0];
}

__global__ void votes(int *out, int n_true) {
    int i = (int)threadIdx.x;
    int count = __syncthreads_count(i < n_true), any = __syncthreads_or(i < n_true);
    int all = __syncthreads_and(i < n_true);
    out[i] = count + 10000 * any + 100000 * all;
}

__global__ void early_exit(int *out) {
    SIMT_SHARED(int, s, 64);
    int i = (int)threadIdx.x;
    if (i >= 64) return;
    s[i] = i;
    SYNCTHREADS();
    out[i] = s[(i + 1) % 64];
}

static void check_reverse(int blocks, int threads) {
    std::vector<int> in((size_t)(blocks * threads));
    for (size_t i = 0; i < in.size(); i++) in[i] = (int)(i * i % 1009);
    int *d_in = to_device(in), *d_out = device_array<int>(in.size());
    LAUNCH(reverse, blocks, threads, threads * sizeof(int), 0)(d_out, d_in);
    std::vector<int> out = to_host(d_out, in.size());
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < threads; i++) {
            int want = in[b * threads + threads - 1 - i] - in[b * threads];
            CHECK(out[b * threads + i] == want, "block %d of %d threads, thread %d", b, threads, i);
        }
    simt_free(d_in);
    simt_free(d_out);
}

static void check_votes(int threads, int n_true) {
    int *d_out = device_array<int>((size_t)threads);
    LAUNCH(votes, 1, threads, 0, 0)(d_out, n_true);
    int said = n_true < threads ? n_true : threads;
    int want = said + 10000 * (said > 0) + 100000 * (said == threads);
    for (int got : to_host(d_out, (size_t)threads))
        CHECK(got == want, "%d threads, %d say yes: %d, not %d", threads, n_true, got, want);
    simt_free(d_out);
}

int main() {
    const int sizes[] = {1, 31, 32, 33, 100, 256, 1024};
    for (int threads : sizes) {
        check_reverse(5, threads);
        check_votes(threads, 0);
        check_votes(threads, 17);
        check_votes(threads, 1024);
    }
    int *d_out = device_array<int>(64);
    LAUNCH(early_exit, 1, 200, 0, 0)(d_out);
    std::vector<int> out = to_host(d_out, 64);
    for (int i = 0; i < 64; i++) CHECK(out[i] == (i + 1) % 64, "thread %d: %d", i, out[i]);
    CHECK(simt_errors() == 0, "reports of correct kernels");
    return check_result("barriers");
}
