/* layers_avx2.c - norms, rotary positions, gated activations, sums, casts for processors with AVX2.
 * Floor: kernels. */
#include "kernels/cpu/layers_body.h"
#include "kernels/cpu/levels.h"

void tr_layers_avx2(tr_kernels *k) {
    fill_rows(k);
}
