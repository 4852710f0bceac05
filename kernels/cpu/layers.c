/* layers.c - norms, rotary positions, gated activations, sums, casts: the portable form, and the
 * choice. Floor: kernels. */
#include "kernels/cpu/layers_body.h"
#include "kernels/cpu/levels.h"

void tr_cpu_layers(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512)
        tr_layers_avx512(k);
    else if (level >= TR_CPU_AVX2)
        tr_layers_avx2(k);
    else
        fill_rows(k);
}
