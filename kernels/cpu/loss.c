/* loss.c - embedding and cross-entropy: the portable form, and the choice. Floor: kernels. */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/loss_body.h"

void tr_cpu_loss(tr_kernels *k, tr_cpu_level level) {
    if (level >= TR_CPU_AVX512)
        tr_loss_avx512(k);
    else if (level >= TR_CPU_AVX2)
        tr_loss_avx2(k);
    else
        fill_rows(k);
}
