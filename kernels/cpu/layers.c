/* layers.c - which instruction set's layers a processor gets. Floor: kernels. */
#include "kernels/makers.h"

void tr_cpu_layers_portable(tr_kernels *k);
void tr_cpu_layers_avx2(tr_kernels *k);
void tr_cpu_layers_avx512(tr_kernels *k);

void tr_cpu_layers(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512)
        tr_cpu_layers_avx512(k);
    else if (level == TR_CPU_AVX2)
        tr_cpu_layers_avx2(k);
    else
        tr_cpu_layers_portable(k);
}
