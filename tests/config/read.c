/* What is read is what was written: defaults, values, overrides, lists, and printing that reads
 * back to the same values. */
#include "tests/config/common.h"

#include <math.h>
#include <unistd.h>

/* Property: printing, reading and printing again gives the same bytes. */
static void expect_round_trip(const tr_config *config) {
    char *first = tr_config_print(config);
    tr_config *again = parsed(first, NULL);
    char *second = tr_config_print(again);
    assert_string_equal(first, second);
    free(first);
    free(second);
    tr_config_destroy(again);
}

static void defaults(void **state) {
    (void)state;
    tr_config *c = parsed(MODEL, NULL);
    assert_string_equal(c->run.name, "test");
    assert_string_equal(c->run.directory, "runs");
    assert_int_equal(c->run.seed, 1234);
    assert_int_equal(c->run.device, TR_DEVICE_CPU);
    assert_int_equal(c->run.dtype, TR_F32);
    assert_int_equal(c->run.threads, 0);
    assert_null(c->model.from);
    assert_null(c->model.init_from);
    assert_int_equal(c->model.num_key_value_heads, 4);
    assert_int_equal(c->model.head_dim, 16);
    assert_int_equal(c->model.moe_intermediate_size, 96);
    assert_true(c->model.rope_theta == 10000 && c->model.rms_norm_eps == 1e-6);
    assert_true(c->model.initializer_range == 0.02 && c->model.norm_topk_prob);
    assert_int_equal(c->model.sliding_window, 0);
    assert_false(c->model.tie_word_embeddings);
    assert_int_equal(c->model.num_experts, 0);
    assert_int_equal(c->model.num_experts_per_tok, 2);
    assert_true(c->model.router_aux_loss_coef == 0.001 && c->model.router_z_loss_coef == 0);
    assert_int_equal(c->model.router_aux_loss_scope, TR_AUX_MICRO_BATCH);
    assert_int_equal(c->model.decoder_sparse_step, 1);
    assert_int_equal(c->parallel.pipeline, 1);
    assert_int_equal(c->parallel.schedule, TR_SCHEDULE_1F1B);
    assert_int_equal(c->parallel.recompute, TR_RECOMPUTE_NONE);
    assert_int_equal(c->parallel.bucket_elems, 4194304);
    assert_int_equal(c->data.train.count, 0);
    assert_int_equal(c->data.sequence_length, 256);
    assert_int_equal(c->data.pad_id, -1);
    assert_true(c->data.bytes_per_token == 1 && !c->data.mask);
    assert_int_equal(c->training.steps, 200);
    assert_int_equal(c->training.global_batch_size, 32);
    assert_int_equal(c->training.micro_batch_size, 4);
    assert_int_equal(c->training.evaluate_every, 0);
    assert_int_equal(c->training.evaluate_batches, 10);
    assert_int_equal(c->training.max_skipped_steps, 10);
    assert_true(c->optimizer.learning_rate == 3e-3 && c->optimizer.min_learning_rate == 3e-4);
    assert_int_equal(c->optimizer.warmup_steps, 20);
    assert_int_equal(c->optimizer.decay_steps, 0);
    assert_int_equal(c->optimizer.schedule, TR_LR_COSINE);
    assert_true(c->optimizer.beta1 == 0.9 && c->optimizer.beta2 == 0.95);
    assert_true(c->optimizer.epsilon == 1e-8 && c->optimizer.weight_decay == 0.1);
    assert_true(c->optimizer.clip == 1);
    assert_string_equal(c->checkpoint.directory, "checkpoints");
    assert_int_equal(c->checkpoint.every, 100);
    assert_int_equal(c->checkpoint.keep, 3);
    assert_int_equal(c->checkpoint.resume, TR_RESUME_AUTO);
    assert_int_equal(c->log.every, 1);
    assert_true(!c->log.samples && c->log.tensorboard);
    expect_round_trip(c);
    tr_config_destroy(c);
}

/* Property: a run is named as it says, or as its file without folder and extension. */
static void names(void **state) {
    (void)state;
    static const struct {
        const char *file, *name;
    } cases[] = {{"a/b.c.yaml", "b.c"}, {"tiny", "tiny"}, {"../x.d/.yaml", ".yaml"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tr_config *c = NULL;
        assert_int_equal(tr_config_parse(MODEL, cases[i].file, 0, NULL, &c), TR_OK);
        assert_string_equal(c->run.name, cases[i].name);
        tr_config_destroy(c);
    }
    tr_config *c = NULL;
    assert_int_equal(tr_config_parse(MODEL, "a\xff.yaml", 0, NULL, &c), TR_ERR_USAGE);
    expect_text("a name that is no text", "run.name: the file's name is no UTF-8 text");
}

/* Property: every way YAML 1.2 writes a value is read as that value. */
static void notations(void **state) {
    (void)state;
    tr_config *c = parsed("# comment\n"
                          "run: {seed: 0x10, threads: 0o17, name: 'a b', dtype: bfloat16}\n" MODEL
                          "  sliding_window: null\n"
                          "  num_key_value_heads: ~\n"
                          "  rope_theta: 1.e6\n"
                          "  tie_word_embeddings: True\n"
                          "training: {steps: 1e3, global_batch_size: &n 8., micro_batch_size: *n}\n"
                          "optimizer: {clip: .5, learning_rate: +2E-3}\n"
                          "checkpoint:\n"
                          "log: ~\n",
                          NULL);
    assert_int_equal(c->run.seed, 16);
    assert_int_equal(c->run.threads, 15);
    assert_string_equal(c->run.name, "a b");
    assert_int_equal(c->run.dtype, TR_BF16);
    assert_int_equal(c->model.sliding_window, 0);
    assert_int_equal(c->model.num_key_value_heads, 4);
    assert_true(c->model.rope_theta == 1e6 && c->model.tie_word_embeddings);
    assert_int_equal(c->training.steps, 1000);
    assert_int_equal(c->training.global_batch_size, 8);
    assert_int_equal(c->training.micro_batch_size, 8);
    assert_true(c->optimizer.clip == 0.5 && c->optimizer.learning_rate == 2e-3);
    expect_round_trip(c);
    tr_config_destroy(c);
}

/* Property: the last override wins, over the file too; the file's default never does. */
static void overrides(void **state) {
    (void)state;
    const char *sets[] = {"training.steps=7",
                          "training.steps=9",
                          "data.train=[a.txt,{path: \"\xc3\xa9t\xc3\xa9 1.txt\"}, b=c.txt]",
                          "model.mlp_only_layers=[0, 2]",
                          "model.head_dim=32",
                          "checkpoint.resume=old/step-00000005.h5",
                          "data.validation={path: v.bin}",
                          NULL};
    tr_config *c = parsed("training: {steps: 5}\ndata: {train: x.txt}\n" MODEL, sets);
    assert_int_equal(c->training.steps, 9);
    assert_int_equal(c->data.train.count, 3);
    assert_string_equal(c->data.train.entries[0].path, "a.txt");
    assert_string_equal(c->data.train.entries[1].path, "\xc3\xa9t\xc3\xa9 1.txt");
    assert_string_equal(c->data.train.entries[2].path, "b=c.txt");
    assert_true(c->data.train.entries[0].weight < 0);
    assert_int_equal(c->data.validation.count, 1);
    assert_int_equal(c->model.mlp_only_layers.count, 2);
    assert_int_equal(c->model.mlp_only_layers.values[1], 2);
    assert_int_equal(c->model.head_dim, 32);
    assert_int_equal(c->checkpoint.resume, TR_RESUME_PATH);
    assert_string_equal(c->checkpoint.resume_path, "old/step-00000005.h5");
    expect_round_trip(c);
    tr_config_destroy(c);
}

static void weights(void **state) {
    (void)state;
    tr_config *c = parsed(MODEL "data:\n  train:\n    - {path: a.bin, weight: 2}\n"
                                "    - path: b.bin\n      weight: 0.1\n",
                          NULL);
    assert_int_equal(c->data.train.count, 2);
    assert_true(c->data.train.entries[0].weight == 2 && c->data.train.entries[1].weight == 0.1);
    expect_round_trip(c);
    tr_config_destroy(c);
}

/* Property: a string that YAML could misread, or break on, survives printing. */
static void strange_strings(void **state) {
    (void)state;
    static const char *const strings[] = {"true",
                                          "null",
                                          "~",
                                          "1e5",
                                          "0x1f",
                                          ".inf",
                                          "...",
                                          "-",
                                          "- a",
                                          "a: b",
                                          "a #b",
                                          "#a",
                                          "[a]",
                                          "{a}",
                                          "a,b",
                                          "\"q\"",
                                          "it's",
                                          "back\\s",
                                          "tab\tx",
                                          "two\nx",
                                          " lead",
                                          "trail ",
                                          "*a",
                                          "&a",
                                          "!t",
                                          "%d",
                                          "@x",
                                          "`x",
                                          "\x7f",
                                          "\x01",
                                          "C1\xc2\x85",
                                          "\xe2\x80\xa8",
                                          "\xef\xbb\xbf",
                                          "\xf0\x9f\x9a\xa3.txt",
                                          "\xe6\x96\x87",
                                          "123",
                                          "yes",
                                          "=",
                                          "?",
                                          "|"};
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        char set[200];
        char *quoted = tr_config_quote(strings[i]);
        snprintf(set, sizeof set, "run.directory=%s", quoted);
        free(quoted);
        tr_config *c = parsed(MODEL, (const char *const[]){set, NULL});
        assert_string_equal(c->run.directory, strings[i]);
        expect_round_trip(c);
        char *text = tr_config_print(c);
        tr_config *again = parsed(text, NULL);
        assert_string_equal(again->run.directory, strings[i]);
        free(text);
        tr_config_destroy(again);
        tr_config_destroy(c);
    }
}

/* Property: a printed number reads back to the same double, and is as short as can be. */
static void numbers(void **state) {
    (void)state;
    static const double values[] = {0.1,      1e-8,   3e-4, 1.0 / 3, 123456789.125,
                                    1e300,    5e-324, 1e15, 1e16,    0x1.fffffffffffffp1023,
                                    0x1p-1022};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        char set[100];
        snprintf(set, sizeof set, "model.rope_theta=%.17g", values[i]);
        tr_config *c = parsed(MODEL, (const char *const[]){set, NULL});
        assert_true(c->model.rope_theta == values[i]);
        char *text = tr_config_value(c, "model.rope_theta");
        assert_true(strtod(text, NULL) == values[i]);
        if (i == 0) assert_string_equal(text, "0.1");
        if (i == 1) assert_string_equal(text, "1e-8");
        free(text);
        expect_round_trip(c);
        tr_config_destroy(c);
    }
}

/* Property: a learning rate below the default end of its schedule needs no second setting. */
static void follows(void **state) {
    (void)state;
    tr_config *c = parsed(MODEL, (const char *const[]){"optimizer.learning_rate=1e-5", NULL});
    assert_true(c->optimizer.min_learning_rate == 1e-5);
    tr_config_destroy(c);
    c = parsed("model: {vocab_size: 256, hidden_size: 64, num_hidden_layers: 2, "
               "num_attention_heads: 4, num_experts: 4, moe_intermediate_size: 48}",
               NULL);
    assert_int_equal(c->model.intermediate_size, 48);
    expect_round_trip(c);
    tr_config_destroy(c);
}

static void which_layers(void **state) {
    (void)state;
    tr_config *c = parsed(MODEL "  num_experts: 4\n", NULL);
    for (int64_t i = 0; i < 4; i++) assert_true(tr_config_layer_is_moe(&c->model, i));
    tr_config_destroy(c);
    c = parsed(MODEL "  num_experts: 4\n  first_k_dense_replace: 1\n  mlp_only_layers: [3]\n",
               NULL);
    static const bool want[] = {false, true, true, false};
    for (int64_t i = 0; i < 4; i++) assert_int_equal(tr_config_layer_is_moe(&c->model, i), want[i]);
    tr_config_destroy(c);
    c = parsed(MODEL "  num_experts: 4\n  decoder_sparse_step: 2\n", NULL);
    for (int64_t i = 0; i < 4; i++) assert_int_equal(tr_config_layer_is_moe(&c->model, i), i % 2);
    tr_config_destroy(c);
}

/* Property: identity changes with what decides weights and data order, and with nothing else. */
static void identity(void **state) {
    (void)state;
    static const char *const kept[] = {
        "run.name=other",   "run.dtype=bfloat16",           "parallel.schedule=gpipe",
        "training.steps=9", "training.global_batch_size=8", "optimizer.learning_rate=1",
        "log.every=5",      "data.validation=v.txt",        "model.init_from=w.h5"};
    static const char *const changed[] = {
        "run.seed=1",       "model.hidden_size=128",    "model.rope_theta=5",
        "data.train=b.txt", "data.sequence_length=128", "data.pad_id=0",
        "data.mask=true"};
    tr_config *base = parsed(MODEL "data: {train: a.txt}\n", NULL);
    char *want = tr_config_identity(base);
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        tr_config *c = parsed(MODEL "data: {train: a.txt}\n", (const char *const[]){kept[i], NULL});
        char *have = tr_config_identity(c), *changes = tr_config_changes(base, c);
        assert_string_equal(have, want);
        assert_null(tr_config_difference(base, c));
        assert_true(strstr(changes, " -> ") && !strncmp(changes, kept[i], strcspn(kept[i], "=")));
        free(have);
        free(changes);
        tr_config_destroy(c);
    }
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++) {
        tr_config *c =
            parsed(MODEL "data: {train: a.txt}\n", (const char *const[]){changed[i], NULL});
        char *have = tr_config_identity(c), *difference = tr_config_difference(base, c);
        assert_string_not_equal(have, want);
        assert_non_null(difference);
        assert_memory_equal(difference, changed[i], strcspn(changed[i], "="));
        free(have);
        free(difference);
        tr_config_destroy(c);
    }
    tr_config *c =
        parsed(MODEL "data: {train: a.txt}\n", (const char *const[]){"run.seed=1", NULL});
    char *difference = tr_config_difference(base, c);
    assert_string_equal(difference, "run.seed: 1234 against 1");
    free(difference);
    tr_config_destroy(c);
    free(want);
    tr_config_destroy(base);
}

/* Property: help names every key of a printed config and keeps to 100 columns. */
static void help(void **state) {
    (void)state;
    char *text = NULL;
    size_t bytes = 0, widest = 0;
    FILE *to = open_memstream(&text, &bytes);
    tr_config_help(to);
    fclose(to);
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
        if (strcspn(line, "\n") > widest) widest = strcspn(line, "\n");
    print_message("help: %zu bytes, widest line %zu\n", bytes, widest);
    assert_true(widest <= 100 && widest > 80);
    tr_config *c = parsed(MODEL, NULL);
    char *printed = tr_config_print(c);
    for (char *line = strtok(printed, "\n"); line; line = strtok(NULL, "\n")) {
        line[strcspn(line, ":") + 1] = 0;
        if (!strstr(text, line)) fail_msg("help lacks %s", line);
    }
    assert_non_null(strstr(text, "  from: "));
    free(printed);
    free(text);
    tr_config_destroy(c);
}

/* Property: the example configs are accepted, on the grids they speak of. */
static void examples(void **state) {
    (void)state;
    static const struct {
        const char *path;
        int world, data;
    } files[] = {
        {"quickstart", 4, 2}, {"gpt2-124m", 2, 2}, {"tiny-dense", 8, 8}, {"tiny-moe", 1, 1}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[500];
        snprintf(path, sizeof path, "%s/configs/%s.yaml", TR_SOURCE_DIR, files[i].path);
        tr_config *c = NULL;
        tr_status status = tr_config_read(path, 0, NULL, &c);
        if (status != TR_OK) fail_msg("%s", tr_error_message());
        int64_t data = 0;
        assert_int_equal(tr_config_check_world(c, files[i].world, &data), TR_OK);
        assert_int_equal(data, files[i].data);
        assert_string_equal(c->run.name, files[i].path);
        expect_round_trip(c);
        tr_config_destroy(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),  cmocka_unit_test(names),   cmocka_unit_test(notations),
        cmocka_unit_test(overrides), cmocka_unit_test(weights), cmocka_unit_test(strange_strings),
        cmocka_unit_test(numbers),   cmocka_unit_test(follows), cmocka_unit_test(which_layers),
        cmocka_unit_test(identity),  cmocka_unit_test(help),    cmocka_unit_test(examples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
