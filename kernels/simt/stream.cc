/* stream.cc - launches.
 * Floor: kernels. */
#include "kernels/simt/internal.h"

void simt_launch(const simt_call &call, cudaStream_t) {
    simt::guard held;
    simt::run_kernel(call);
}
