/* table.c - every row of the table from the plain loops of this folder. Floor: kernels. */
#include "kernels/makers.h"

void tr_kernels_ref(tr_kernels *k) {
    tr_ref_linear(k);
    tr_ref_layers(k);
    tr_ref_loss(k);
    tr_ref_moe(k);
    tr_ref_attention(k);
    tr_ref_optimizer(k);
}
