/* forms.h - forms of a formula that a setting names and kernels compute. Floor: base. */
#pragma once

/* Of a gated feed-forward network: silu(x) = x sigmoid(x); GELU by its tanh approximation,
 * x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 (Hendrycks, Gimpel 2016). */
typedef enum { TR_SILU, TR_GELU_TANH } tr_activation;

/* Of a norm: by the mean square (Zhang, Sennrich 2019), or by mean and variance, with a bias (Ba et
 * al. 2016). */
typedef enum { TR_RMS_NORM, TR_LAYER_NORM } tr_norm_type;

/* Of a router's scores: over all experts, or of each by itself. */
typedef enum { TR_SOFTMAX, TR_SIGMOID } tr_score;
