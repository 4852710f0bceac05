/* Property: the twin of a config shares out its heads as the config does: whole key/value heads, or
 * copies of one, for ranks of a tensor group and for those that exchange heads. Floor: tests. */
#include "train/twin.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define LARGE                                                                                      \
    "model: {vocab_size: 50257, hidden_size: 4096, num_hidden_layers: 32, head_dim: 128,\n"        \
    "  intermediate_size: 14336, num_attention_heads: %d, num_key_value_heads: %d}\n"              \
    "data: {sequence_length: 4800}\n"                                                              \
    "parallel: {context: %d, context_heads: %d, tensor: %d}\n"

typedef struct {
    int queries, keys, context, heads, tensor;
    int few; /* key/value heads of the twin */
} shape;

static const shape shapes[] = {
    {32, 8, 1, 1, 1, 2},   /* nobody shares them */
    {32, 8, 1, 1, 4, 4},   /* tensor ranks do */
    {32, 8, 4, 4, 1, 4},   /* each rank of Ulysses has a key/value head of its own */
    {64, 16, 4, 2, 2, 4},  /* of tensor, and then of Ulysses */
    {128, 32, 8, 4, 2, 8}, /* a ring of two groups */
    {32, 8, 6, 3, 1, 0},   /* refused: 3 does not divide 32 */
    {32, 2, 8, 8, 1, 2},   /* four copies of each stay four */
    {48, 12, 6, 6, 1, 6},
};

static void heads_keep_their_form(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const shape *s = &shapes[i];
        char text[1024];
        snprintf(text, sizeof text, LARGE, s->queries, s->keys, s->context, s->heads, s->tensor);
        tr_config *config = NULL, *twin = NULL;
        tr_status status = tr_config_parse(text, "large.yaml", 0, NULL, &config);
        assert_int_equal(status, s->few ? TR_OK : TR_ERR_USAGE);
        if (!s->few) continue;
        assert_int_equal(tr_twin_create(config, s->context * s->tensor, &twin), TR_OK);
        const tr_model_config *m = &twin->model;
        printf("  %d and %d heads on tensor %d, context_heads %d of %d: %d and %d\n", s->queries,
               s->keys, s->tensor, s->heads, s->context, (int)m->num_attention_heads,
               (int)m->num_key_value_heads);
        assert_int_equal(m->num_key_value_heads, s->few);
        assert_int_equal(m->num_attention_heads / s->few, s->queries / s->keys);
        assert_int_equal(twin->parallel.context_heads, s->heads);
        assert_true(m->head_dim < 128 && m->hidden_size < 4096);
        tr_config_destroy(config);
        tr_config_destroy(twin);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(heads_keep_their_form)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
