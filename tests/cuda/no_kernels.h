/* no_kernels.h - for tests of the module's host side: kernels have tests of their own. */
#pragma once
#include "kernels/makers.h"

#define NO_KERNELS(maker)                                                                          \
    void maker(tr_kernels *k) {                                                                    \
        (void)k;                                                                                   \
    }
NO_KERNELS(tr_cuda_linear)
NO_KERNELS(tr_cuda_layers)
NO_KERNELS(tr_cuda_loss)
NO_KERNELS(tr_cuda_moe)
NO_KERNELS(tr_cuda_attention)
NO_KERNELS(tr_cuda_optimizer)
