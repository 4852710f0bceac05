/* attention_portable.c - attention for any processor. Floor: kernels. */
#define TR_PAIRS       0
#define TR_LEVEL(name) name##_portable
#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_forward.h"
