/* optimizer.c - AdamW and the sum of squares: the portable form, and the choice. Floor: kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/optimizer_body.h"

void tr_cpu_optimizer(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512)
        tr_optimizer_avx512(k);
    else if (level >= TR_CPU_AVX2)
        tr_optimizer_avx2(k);
    else
        fill_rows(k);
}
