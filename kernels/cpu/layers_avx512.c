/* layers_avx512.c - norms, rotary positions, gated activations, sums, casts for processors with
 * AVX-512. Floor: kernels. */
#include "kernels/cpu/layers_body.h"
#include "kernels/cpu/levels.h"

void tr_layers_avx512(tr_kernels *k) {
    fill_rows(k);
}
