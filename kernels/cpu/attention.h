/* attention.h - flash attention's files for each instruction set. Floor: kernels, internal.
 *
 * attention_forward.h and attention_backward.h hold the algorithm, attention_tile.h its products of
 * small tiles, attention_plan.h which tiles a mask leaves. attention_<level>.c compile them. */
#pragma once
#include "kernels/kernels.h"

void tr_attention_forward_portable(tr_stream *s, const tr_attention *a);
void tr_attention_backward_portable(tr_stream *s, const tr_attention *a);
void tr_attention_forward_avx2(tr_stream *s, const tr_attention *a);
void tr_attention_backward_avx2(tr_stream *s, const tr_attention *a);
void tr_attention_forward_avx512(tr_stream *s, const tr_attention *a);
void tr_attention_backward_avx512(tr_stream *s, const tr_attention *a);
/* Only for t = TR_BF16: products of bf16 pairs. */
void tr_attention_forward_avx512bf16(tr_stream *s, const tr_attention *a);
void tr_attention_backward_avx512bf16(tr_stream *s, const tr_attention *a);
