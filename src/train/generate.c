/* generate.c - sampling token by token. Floor: train. */
#include "train/generate.h"

#include "base/heap.h"
#include "base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    float p;
    int32_t token;
} choice;

static int by_probability(const void *a, const void *b) {
    const choice *x = a, *y = b;
    if (x->p != y->p) return x->p < y->p ? 1 : -1;
    return x->token < y->token ? -1 : x->token > y->token;
}

/* Turns logits into probabilities at `temperature`, most likely first. */
static void rank_choices(const float *logits, int64_t V, double temperature, choice *c) {
    double most = -INFINITY, sum = 0;
    for (int64_t v = 0; v < V; v++) most = fmax(most, (double)logits[v]);
    for (int64_t v = 0; v < V; v++) {
        double p = temperature > 0 ? exp(((double)logits[v] - most) / temperature)
                                   : (double)((double)logits[v] == most);
        c[v] = (choice){(float)p, (int32_t)v};
        sum += p;
    }
    for (int64_t v = 0; v < V; v++) c[v].p = (float)(c[v].p / sum);
    qsort(c, (size_t)V, sizeof *c, by_probability);
}

static int32_t draw(const float *logits, int64_t V, const tr_generate_options *o, int64_t i,
                    choice *c) {
    rank_choices(logits, V, o->temperature, c);
    if (o->temperature == 0) return c[0].token;
    double kept = 0;
    int64_t n = 0;
    while (n < V && (n == 0 || kept < o->top_p)) kept += (double)c[n++].p;
    double u = kept * tr_random_uniform(o->seed, tr_stream_of_name("generate"), (uint64_t)i);
    for (int64_t v = 0; v < n; v++) {
        u -= (double)c[v].p;
        if (u < 0) return c[v].token;
    }
    return c[n - 1].token;
}

/* A byte of text is the token of its number. */
static tr_status check_prompt(const char *prompt, int64_t V) {
    if (!*prompt) return tr_fail(TR_ERR_USAGE, "--prompt is empty; give at least one character");
    for (const unsigned char *c = (const unsigned char *)prompt; *c; c++)
        if (*c >= V)
            return tr_fail(TR_ERR_USAGE, "--prompt: byte %d is no token of a vocabulary of %lld",
                           *c, (long long)V);
    return TR_OK;
}

/* Logits after the last of n tokens. */
static void next_logits(tr_job *job, const int32_t *token, int64_t n, const uint8_t *valid,
                        float *logits) {
    tr_model_shape(job->model, 1, 1, n);
    tr_model_load(job->model, 0, &(tr_micro_batch){.token = token, .valid = valid});
    tr_model_begin_step(job->model, 1, 0);
    tr_model_forward(job->model, 0, 0, false);
    tr_model_logits(job->model, n - 1, logits);
}

tr_status tr_generate(tr_job *job, const tr_generate_options *o) {
    int64_t V = job->config->model.vocab_size, most = job->config->data.sequence_length;
    int64_t n = (int64_t)strlen(o->prompt), total = n + o->tokens;
    TR_TRY(check_prompt(o->prompt, V));
    int32_t *token = tr_heap_alloc(total, sizeof *token);
    uint8_t *valid = tr_heap_alloc(total, 1);
    float *logits = tr_heap_alloc(V, sizeof *logits);
    choice *choices = tr_heap_alloc(V, sizeof *choices);
    for (int64_t i = 0; i < n; i++) token[i] = (unsigned char)o->prompt[i];
    memset(valid, 1, (size_t)total);
    fwrite(o->prompt, 1, (size_t)n, stdout);
    for (; n < total; n++) {
        int64_t from = n > most ? n - most : 0;
        next_logits(job, token + from, n - from, valid, logits);
        token[n] = draw(logits, V, o, n, choices);
        if (token[n] < 256)
            putchar(token[n]);
        else
            printf("<%d>", token[n]);
        fflush(stdout);
    }
    putchar('\n');
    free(token);
    free(valid);
    free(logits);
    free(choices);
    return TR_OK;
}
