/* Hugging Face config.json files: keys, aliases, precedence, and what is refused. */
#include "tests/config/common.h"

#include <unistd.h>

static char folder[] = "/tmp/tr-config-hf-XXXXXX";
static char path[200];

static int setup(void **state) {
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/config.json", folder);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    unlink(path);
    return rmdir(folder);
}

/* Reads `yaml` after a model section that names a file with `json` in it. */
static tr_status read_with(const char *json, const char *yaml, tr_config **config_p) {
    char text[2000];
    write_file(path, json, strlen(json));
    snprintf(text, sizeof text, "model:\n  from: %s\n%s", path, yaml);
    return tr_config_parse(text, "test.yaml", 0, NULL, config_p);
}

static tr_config *accepted(const char *json, const char *yaml) {
    tr_config *c = NULL;
    if (read_with(json, yaml, &c) != TR_OK) fail_msg("refused: %s", tr_error_message());
    return c;
}

#define SIZES                                                                                      \
    "\"vocab_size\": 256, \"hidden_size\": 64, \"intermediate_size\": 96, "                        \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4"

static void llama(void **state) {
    (void)state;
    tr_config *c = accepted(
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": "
        "128256, \"hidden_size\": 4096, \"intermediate_size\": 14336, \"num_hidden_layers\": 32, "
        "\"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"rope_theta\": 500000.0, "
        "\"rms_norm_eps\": 1e-05, \"rope_scaling\": null, \"attention_bias\": false, "
        "\"attention_dropout\": 0.0, \"hidden_act\": \"silu\", \"max_position_embeddings\": 8192, "
        "\"torch_dtype\": \"bfloat16\", \"tie_word_embeddings\": false, \"pretraining_tp\": 1, "
        "\"initializer_range\": 0.02, \"eos_token_id\": [1, 2], \"use_cache\": true}",
        "  num_hidden_layers: 2\n");
    assert_int_equal(c->model.vocab_size, 128256);
    assert_int_equal(c->model.hidden_size, 4096);
    assert_int_equal(c->model.intermediate_size, 14336);
    assert_int_equal(c->model.num_hidden_layers, 2); /* the YAML overrides */
    assert_int_equal(c->model.num_key_value_heads, 8);
    assert_int_equal(c->model.head_dim, 128);
    assert_true(c->model.rope_theta == 500000 && c->model.rms_norm_eps == 1e-5);
    assert_int_equal(c->model.num_experts, 0);
    assert_string_equal(c->model.from, path);
    char *text = tr_config_print(c); /* resolved: reads back without the file */
    unlink(path);
    tr_config *again = parsed(text, NULL);
    char *second = tr_config_print(again);
    assert_string_equal(text, second);
    free(text);
    free(second);
    tr_config_destroy(again);
    tr_config_destroy(c);
}

static void mixtral(void **state) {
    (void)state;
    tr_config *c = accepted(
        "{\"model_type\": \"mixtral\", \"vocab_size\": 32000, \"hidden_size\": 4096, "
        "\"intermediate_size\": 14336, \"num_hidden_layers\": 32, \"num_attention_heads\": 32, "
        "\"num_key_value_heads\": 8, \"num_local_experts\": 8, \"num_experts_per_tok\": 2, "
        "\"rope_theta\": 1000000.0, \"rms_norm_eps\": 1e-05, \"router_aux_loss_coef\": 0.02, "
        "\"router_jitter_noise\": 0.0, \"sliding_window\": null, \"output_router_logits\": false}",
        "");
    assert_int_equal(c->model.num_experts, 8);
    assert_int_equal(c->model.moe_intermediate_size, 14336);
    assert_int_equal(c->model.num_experts_per_tok, 2);
    assert_true(c->model.norm_topk_prob && c->model.router_aux_loss_coef == 0.02);
    assert_int_equal(c->model.sliding_window, 0);
    assert_true(tr_config_layer_is_moe(&c->model, 0));
    tr_config_destroy(c);
}

static void qwen2_moe(void **state) {
    (void)state;
    static const char json[] =
        "{\"model_type\": \"qwen2_moe\", \"vocab_size\": 151936, \"hidden_size\": 2048, "
        "\"intermediate_size\": 5632, \"num_hidden_layers\": 24, \"num_attention_heads\": 16, "
        "\"num_key_value_heads\": 16, \"num_experts\": 60, \"num_experts_per_tok\": 4, "
        "\"moe_intermediate_size\": 1408, \"shared_expert_intermediate_size\": 5632, "
        "\"decoder_sparse_step\": 2, \"mlp_only_layers\": [1, 23], \"sliding_window\": 32768, "
        "\"use_sliding_window\": false, \"max_window_layers\": 21, \"hidden_act\": \"silu\"}";
    tr_config *c = accepted(json, "");
    assert_int_equal(c->model.num_experts, 60);
    assert_int_equal(c->model.moe_intermediate_size, 1408);
    assert_int_equal(c->model.intermediate_size, 5632);
    assert_int_equal(c->model.shared_expert_intermediate_size, 5632);
    assert_int_equal(c->model.sliding_window, 0); /* switched off */
    assert_false(c->model.norm_topk_prob);        /* that model's default */
    assert_int_equal(c->model.mlp_only_layers.count, 2);
    assert_false(tr_config_layer_is_moe(&c->model, 0));
    assert_false(tr_config_layer_is_moe(&c->model, 1));
    assert_true(tr_config_layer_is_moe(&c->model, 3));
    tr_config_destroy(c);
    c = accepted(json, "  norm_topk_prob: true\n  sliding_window: 64\n");
    assert_true(c->model.norm_topk_prob);
    assert_int_equal(c->model.sliding_window, 64);
    tr_config_destroy(c);
}

static void groups_of_experts(void **state) {
    (void)state;
    static const char sizes[] =
        "{\"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 48, "
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"n_routed_experts\": 16, "
        "\"num_experts_per_tok\": 2, \"n_group\": 8, \"topk_group\": 3, \"topk_method\": \"%s\"}";
    char json[600];
    snprintf(json, sizeof json, sizes, "group_limited_greedy");
    tr_config *c = accepted(json, "");
    assert_int_equal(c->model.n_group, 8);
    assert_int_equal(c->model.topk_group, 3);
    tr_config_destroy(c);
    snprintf(json, sizeof json, sizes, "greedy"); /* which does not look at groups */
    c = accepted(json, "");
    assert_int_equal(c->model.n_group, 1);
    assert_int_equal(c->model.topk_group, 1);
    tr_config_destroy(c);
}

static void deepseek_moe(void **state) {
    (void)state;
    tr_config *c = accepted(
        "{\"model_type\": \"deepseek\", \"vocab_size\": 102400, \"hidden_size\": 2048, "
        "\"intermediate_size\": 10944, \"moe_intermediate_size\": 1408, \"num_hidden_layers\": 28, "
        "\"num_attention_heads\": 16, \"num_key_value_heads\": 16, \"n_routed_experts\": 64, "
        "\"n_shared_experts\": 2, \"num_experts_per_tok\": 6, \"first_k_dense_replace\": 1, "
        "\"moe_layer_freq\": 1, \"norm_topk_prob\": false, \"scoring_func\": \"softmax\", "
        "\"aux_loss_alpha\": 0.01, \"seq_aux\": true}",
        "");
    assert_int_equal(c->model.num_experts, 64);
    assert_int_equal(c->model.shared_expert_intermediate_size, 2816);
    assert_int_equal(c->model.first_k_dense_replace, 1);
    assert_true(c->model.router_aux_loss_coef == 0.01 && !c->model.norm_topk_prob);
    assert_int_equal(c->model.router_aux_loss_scope, TR_AUX_SEQUENCE);
    assert_int_equal(c->model.scoring_func, TR_SOFTMAX);
    tr_config_destroy(c);
    c = accepted("{\"scoring_func\": \"sigmoid\", " SIZES "}", "");
    assert_int_equal(c->model.scoring_func, TR_SIGMOID);
    tr_config_destroy(c);
}

static void windows_and_rope(void **state) {
    (void)state;
    tr_config *c = accepted("{\"model_type\": \"mistral\", \"sliding_window\": 32, " SIZES "}", "");
    assert_int_equal(c->model.sliding_window, 32);
    tr_config_destroy(c);
    c = accepted(
        "{\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 500}, " SIZES "}", "");
    assert_true(c->model.rope_theta == 500);
    tr_config_destroy(c);
    /* an explicit null in the YAML drops the file's scaling */
    c = accepted("{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, " SIZES "}",
                 "  rope_scaling: null\n");
    tr_config_destroy(c);
}

static void norms(void **state) {
    (void)state;
    static const struct {
        const char *json;
        tr_norm_type type;
        double eps;
    } cases[] = {
        {"\"rms_norm_eps\": 1e-3", TR_RMS_NORM, 1e-3},
        {"\"layer_norm_eps\": 1e-3", TR_LAYER_NORM, 1e-3},
        {"\"layer_norm_epsilon\": 1e-3", TR_LAYER_NORM, 1e-3},
        {"\"norm_type\": \"layer_norm\"", TR_LAYER_NORM, 1e-5},
        {"\"rms_norm_eps\": 1e-3, \"layer_norm_eps\": 1e-4", TR_RMS_NORM, 1e-3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1000];
        snprintf(json, sizeof json, "{%s, " SIZES "}", cases[i].json);
        tr_config *c = accepted(json, "");
        bool layer = cases[i].type == TR_LAYER_NORM;
        assert_int_equal(c->model.norm_type, cases[i].type);
        assert_true((layer ? c->model.layer_norm_eps : c->model.rms_norm_eps) == cases[i].eps);
        tr_config_destroy(c);
    }
}

static void activations(void **state) {
    (void)state;
    static const struct {
        const char *name;
        tr_activation f;
    } cases[] = {{"silu", TR_SILU}, {"swish", TR_SILU}, {"gelu_pytorch_tanh", TR_GELU_TANH}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1000];
        snprintf(json, sizeof json, "{\"hidden_act\": \"%s\", " SIZES "}", cases[i].name);
        tr_config *c = accepted(json, "");
        assert_int_equal(c->model.hidden_act, cases[i].f);
        tr_config_destroy(c);
    }
    tr_config *c =
        accepted("{\"hidden_act\": \"gelu\", " SIZES "}", "  hidden_act: gelu_pytorch_tanh\n");
    assert_int_equal(c->model.hidden_act, TR_GELU_TANH); /* the YAML overrides */
    tr_config_destroy(c);
}

static void refused(void **state) {
    (void)state;
    static const struct {
        const char *json, *parts[3];
    } cases[] = {
        {"\"rope_scaling\": {\"type\": \"yarn\"}",
         {"config.json: rope_scaling", "set model.rope_scaling to null"}},
        {"\"rope_parameters\": {\"rope_type\": \"llama3\"}", {"config.json: rope_parameters"}},
        {"\"attention_bias\": true",
         {"config.json: attention_bias: value true", "without model.from"}},
        {"\"mlp_bias\": true", {"mlp_bias: value true"}},
        {"\"hidden_act\": \"gelu\"", {"hidden_act: value gelu", "silu", "gelu_pytorch_tanh"}},
        {"\"scoring_func\": \"tanh\"", {"scoring_func: value tanh", "sigmoid"}},
        {"\"q_lora_rank\": 1536", {"q_lora_rank: value 1536", "latent attention"}},
        {"\"n_group\": 8", {"n_group: value 8", "without a topk_method"}},
        {"\"topk_method\": \"noaux_tc\"",
         {"topk_method", "routing with a bias", "e_score_correction_bias"}},
        {"\"topk_method\": \"group_limited_greedy\", \"n_group\": 2, \"topk_group\": 1, "
         "\"scoring_func\": \"sigmoid\", \"n_routed_experts\": 4",
         {"topk_method: value group_limited_greedy", "the sum of its best two"}},
        {"\"num_nextn_predict_layers\": 1", {"multi-token prediction"}},
        {"\"partial_rotary_factor\": 0.5", {"partial_rotary_factor: value 0.5"}},
        {"\"attention_dropout\": 0.1", {"attention_dropout"}},
        {"\"model_type\": \"qwen3\"", {"value qwen3", "norms of queries and keys"}},
        {"\"model_type\": \"deepseek_v3\"", {"value deepseek_v3", "latent attention"}},
        {"\"model_type\": \"gpt2\"", {"value gpt2", "known are llama"}},
        {"\"use_sliding_window\": true, \"sliding_window\": 16, \"max_window_layers\": 1",
         {"sliding_window: value 16", "some layers only"}},
        {"\"sliding_window\": 16, \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         {"some layers only"}},
        {"\"n_shared_experts\": 2",
         {"n_shared_experts: value 2", "shared_expert_intermediate_size"}},
        {"\"num_key_value_heads\": -2", {"config.json: model.num_key_value_heads: value -2"}},
        {"\"num_key_value_heads\": \"2\"", {"value 2 is quoted"}},
        {"\"num_local_experts\": 1.5",
         {"config.json: model.num_experts (num_local_experts): value 1.5"}},
        {"\"num_key_value_heads\": 3", {"model.num_key_value_heads: value 3 does not divide"}},
        {"\"vocab_size\": 4", {"is not JSON", "duplicate"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1000];
        snprintf(json, sizeof json, "{" SIZES ", %s}", cases[i].json);
        tr_config *c = NULL;
        if (read_with(json, "", &c) != TR_ERR_USAGE) fail_msg("accepted: %s", cases[i].json);
        for (int p = 0; p < 3 && cases[i].parts[p]; p++)
            expect_text(cases[i].json, cases[i].parts[p]);
    }
}

static void broken_files(void **state) {
    (void)state;
    tr_config *c = NULL;
    assert_int_equal(read_with("{\"vocab_size\": ", "", &c), TR_ERR_USAGE);
    expect_text("torn", "config.json:1:");
    assert_int_equal(read_with("[1]", "", &c), TR_ERR_USAGE);
    expect_text("list", "no JSON object");
    assert_int_equal(read_with("{}", "", &c), TR_ERR_USAGE);
    expect_text("empty", "test.yaml: model.vocab_size: is required");
    unlink(path);
    char text[400];
    snprintf(text, sizeof text, "model: {from: %s}\n", path);
    assert_int_equal(tr_config_parse(text, "test.yaml", 0, NULL, &c), TR_ERR_MISSING);
    expect_text("missing", "test.yaml:1:9: model.from: ");
    expect_text("missing", path);
    assert_null(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama),        cmocka_unit_test(mixtral),
        cmocka_unit_test(qwen2_moe),    cmocka_unit_test(groups_of_experts),
        cmocka_unit_test(deepseek_moe), cmocka_unit_test(windows_and_rope),
        cmocka_unit_test(activations),  cmocka_unit_test(norms),
        cmocka_unit_test(refused),      cmocka_unit_test(broken_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
