/* levels.h - what files compiled for one instruction set offer. Floor: kernels, internal.
 * Each sets the rows of its concept; the tr_cpu_* function of makers.h chooses. */
#pragma once
#include "kernels/kernels.h"

void tr_linear_avx512(tr_kernels *k);
void tr_linear_avx512bf16(tr_kernels *k);
void tr_loss_avx2(tr_kernels *k);
void tr_loss_avx512(tr_kernels *k);
void tr_optimizer_avx2(tr_kernels *k);
void tr_optimizer_avx512(tr_kernels *k);
void tr_layers_avx2(tr_kernels *k);
void tr_layers_avx512(tr_kernels *k);
void tr_moe_avx2(tr_kernels *k);
void tr_moe_avx512(tr_kernels *k);
