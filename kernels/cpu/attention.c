/* attention.c - chooses the attention of an instruction set. Floor: kernels. */
#include "kernels/cpu/attention.h"

#include "kernels/makers.h"

#if defined(__x86_64__)
static void forward_by_type(tr_stream *s, const tr_attention *a) {
    if (a->t == TR_BF16)
        tr_attention_forward_avx512bf16(s, a);
    else
        tr_attention_forward_avx512(s, a);
}

static void backward_by_type(tr_stream *s, const tr_attention *a) {
    if (a->t == TR_BF16)
        tr_attention_backward_avx512bf16(s, a);
    else
        tr_attention_backward_avx512(s, a);
}
#endif

void tr_cpu_attention(tr_kernels *k, tr_cpu_level level) {
    k->attention_forward = tr_attention_forward_portable;
    k->attention_backward = tr_attention_backward_portable;
#if defined(__x86_64__)
    switch (level) {
    case TR_CPU_PORTABLE:
        break;
    case TR_CPU_AVX2:
        k->attention_forward = tr_attention_forward_avx2;
        k->attention_backward = tr_attention_backward_avx2;
        break;
    case TR_CPU_AVX512:
        k->attention_forward = tr_attention_forward_avx512;
        k->attention_backward = tr_attention_backward_avx512;
        break;
    case TR_CPU_AVX512_BF16:
        k->attention_forward = forward_by_type;
        k->attention_backward = backward_by_type;
        break;
    }
#else
    (void)level;
#endif
}
