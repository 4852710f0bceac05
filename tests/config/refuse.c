/* Every refusal has its exit code and names place, key, value and what would do. */
#include "tests/config/common.h"

#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    const char *yaml;     /* a whole file */
    const char *parts[4]; /* what the message holds */
} file_case;

/* MODEL has 6 lines, so what follows starts on line 7. */
static const file_case files[] = {
    /* structure */
    {MODEL "trainin: {steps: 1}\n", {"test.yaml:7:1: trainin: unknown section", "training"}},
    {MODEL "steps: 5\n", {"test.yaml:7:1: steps", "section training (training.steps)"}},
    {MODEL "  hiden_size: 5\n", {"test.yaml:7:3: model.hiden_size", "model.hidden_size?"}},
    {MODEL "run:\n  learning_rate: 5\n", {"test.yaml:8:3: run.learning_rate", "section optimizer"}},
    {MODEL "run:\n  zzzzzzzz: 5\n", {"test.yaml:8:3: run.zzzzzzzz: unknown key", "help config"}},
    {MODEL "  hidden_size: 5\n",
     {"test.yaml:7:3: model.hidden_size: is given twice", "test.yaml:3:3"}},
    {MODEL "log: {every: 1}\nlog: {every: 2}\n", {"test.yaml:8:1: log: the section stands twice"}},
    {MODEL "log: [1]\n", {"test.yaml:7:1: log: must hold keys and values"}},
    {MODEL "log: 5\n", {"test.yaml:7:1: log: must hold keys and values"}},
    {"- a\n- b\n", {"test.yaml:1: must hold sections"}},
    {"hello\n", {"test.yaml:1: must hold sections"}},
    {MODEL "log: {[a]: 1}\n", {"test.yaml", "a key must be a word"}},
    {MODEL "log:\n  every: [1\n", {"test.yaml:", "is not YAML", "closing bracket"}},
    {MODEL "log:\n\tevery: 1\n", {"test.yaml:8:", "is not YAML"}},
    {MODEL "---\nlog: {every: 1}\n", {"second document"}},
    {MODEL "run: {name: \xff}\n", {"test.yaml:7:13: byte 0xff is not UTF-8"}},
    {MODEL "log: {every: *nobody}\n", {"test.yaml:7:7: log.every", "anchor"}},
    {MODEL "<<: {a: 1}\n", {"test.yaml:7:1: <<: unknown section"}},
    /* required */
    {"", {"test.yaml: model.vocab_size: is required", "model.from"}},
    {"model: {vocab_size: 256, num_hidden_layers: 1, num_attention_heads: 1}\n",
     {"test.yaml: model.hidden_size: is required"}},
    {"model: {vocab_size: 256, hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 1}\n",
     {"model.intermediate_size: is required"}},
    {"model: {vocab_size: 256, hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 1, "
     "num_experts: 2, moe_intermediate_size: 8, first_k_dense_replace: 1}\n",
     {"model.intermediate_size: is required", "some layers have no experts"}},
    {"model: {vocab_size: 256, hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 1, "
     "num_experts: 2}\n",
     {"model.moe_intermediate_size: is required"}},
};

typedef struct {
    const char *set;
    const char *parts[4];
} set_case;

static const set_case sets[] = {
    /* types */
    {"training.steps=-5", {"--set training.steps: value -5 is out of range", "from 1 to"}},
    {"training.steps=0", {"value 0 is out of range"}},
    {"training.steps=1.5", {"value 1.5 is no whole number", "an integer"}},
    {"training.steps=1_000", {"value 1_000 is no number"}},
    {"training.steps=yes", {"value yes is no number"}},
    {"training.steps='5'", {"value 5 is quoted", "an integer"}},
    {"training.steps=", {"value null is no number"}},
    {"training.steps=[5]", {"value [...] is no number"}},
    {"training.steps={a: 5}", {"value {...} is no number"}},
    {"training.steps=.inf", {"value .inf is too large"}},
    {"training.steps=1e30", {"value 1e30 is too large"}},
    {"training.steps=\"5\\0\"", {"value with a NUL character"}},
    {"run.seed=9223372036854775808", {"value 9223372036854775808 is too large"}},
    {"run.seed=-1", {"value -1 is out of range", "at least 0"}},
    {"optimizer.clip=.nan", {"--set optimizer.clip: value .nan is not finite"}},
    {"optimizer.clip=-.inf", {"value -.inf is not finite"}},
    {"optimizer.clip=1e999", {"value 1e999 is not finite"}},
    {"optimizer.clip=0x1p3", {"value 0x1p3 is no number"}},
    {"optimizer.beta1=1", {"value 1 is out of range", "from 0 to below 1"}},
    {"optimizer.epsilon=0", {"value 0 is out of range", "above 0"}},
    {"optimizer.learning_rate=abc", {"value abc is no number", "a number, at least 0"}},
    {"log.samples=yes", {"value yes is no truth value", "true or false"}},
    {"log.samples='true'", {"value true is no truth value"}},
    {"log.samples=1", {"value 1 is no truth value"}},
    {"run.dtype=float16", {"value float16 is not among its words", "float32 or bfloat16"}},
    {"run.device=gpu", {"value gpu is not among its words", "cpu, cuda, simt or simt-check"}},
    {"parallel.schedule=zb", {"1f1b, gpipe, interleaved, zb_h1, zb_v or dualpipe_v"}},
    {"parallel.recompute=some", {"none, selective or full"}},
    {"optimizer.schedule=step", {"cosine, linear, constant or wsd"}},
    {"run.name=", {"value null is no text"}},
    {"run.name=''", {"value \"\" is no text"}},
    {"run.name=[a]", {"value [...] is no text"}},
    {"run.name=a/b", {"value a/b must name a folder"}},
    {"run.name=..", {"value \"..\" must name a folder"}},
    {"checkpoint.resume=", {"value null is no text", "auto, never or a path"}},
    {"model.rope_scaling={type: linear, factor: 2}", {"model.rope_scaling", "not supported yet"}},
    {"model.rope_scaling=2", {"value 2 is not supported yet; use null"}},
    /* lists */
    {"data.train=", {"value null is no data file"}},
    {"data.train=[a, ]x", {"is not YAML"}},
    {"data.train=[a, [b]]", {"value [...] is no data file"}},
    {"data.train=[{weight: 2}]", {"is no data file"}},
    {"data.train=[{path: a, wait: 2}]", {"unknown key wait"}},
    {"data.train=[{path: a, weight: 0}]", {"value 0 is no weight", "above 0"}},
    {"data.train=[{path: a, weight: -1}]", {"value -1 is no weight"}},
    {"data.train=[{path: a, weight: .nan}]", {"value .nan is no weight"}},
    {"data.train=[{path: a, path: b}]", {"has path twice"}},
    {"data.train=[{path: a, weight: 1}, b]", {"a weight to 1 of 2 files"}},
    {"data.validation=[{path: a, weight: 1}]", {"data.validation", "paths alone"}},
    {"model.mlp_only_layers=[0, x]", {"value x cannot be in the list"}},
    {"model.mlp_only_layers=[4]", {"names layer 4 of 4", "0 to 3"}},
    {"model.mlp_only_layers=[-1]", {"value -1 cannot be in the list"}},
    /* overrides themselves */
    {"training.stepz=5", {"--set training.stepz: unknown key; did you mean training.steps?"}},
    {"trainin.steps=5", {"--set: trainin: unknown section", "training?"}},
    {"steps=5", {"--set: steps: is no section", "training.steps"}},
    {"training={steps: 5}", {"--set training={steps: 5}: must be section.key=value"}},
    {"training.steps", {"must be section.key=value"}},
    {"=", {"--set: : unknown section"}},
    {"", {"unknown section"}},
    /* combinations */
    {"data.end_of_document=256", {"value 256 is no token of a vocabulary of 256", "-1 to 255"}},
    {"data.reset_position_ids=true", {"data.document_mask to true"}},
    {"parallel.context_heads=2", {"must divide context 1", "use 1"}},
    {"model.num_key_value_heads=3", {"value 3 does not divide num_attention_heads 4", "1, 2 or 4"}},
    {"model.head_dim=15", {"--set model.head_dim: value 15 is odd", "14 or 16"}},
    {"model.hidden_size=66", {"value 66 is not a multiple of num_attention_heads 4"}},
    {"model.hidden_size=68", {"value 68 / num_attention_heads 4", "odd head_dim of 17"}},
    {"model.num_experts=1",
     {"num_experts_per_tok: value 2 (the default) is more than num_experts 1"}},
    {"model.num_experts_per_tok=0", {"value 0 is out of range", "from 1"}},
    {"model.shared_expert_intermediate_size=8", {"where num_experts is 0"}},
    {"parallel.tensor=3",
     {"value 3 must divide num_attention_heads 4", "num_key_value_heads 4 or", "use 1, 2 or 4"}},
    {"parallel.pipeline=5", {"value 5 is more stages than num_hidden_layers 4", "1 to 4"}},
    {"parallel.virtual_stages=2", {"value 2 asks for several parts", "1f1b has one; use 1"}},
    {"parallel.context=3",
     {"data.sequence_length: value 256 (the default)", "= 6; use 252 or 258"}},
    {"parallel.expert=2", {"value 2 shares experts", "use 1"}},
    {"data.pad_id=256", {"value 256 is no token of a vocabulary of 256", "-1 to 255"}},
    {"training.evaluate_every=5", {"value 5 asks for evaluation", "data.validation is empty"}},
    {"optimizer.min_learning_rate=1", {"value 1 is above learning_rate 0.003"}},
};

static void refused_files(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        tr_config *c = NULL;
        assert_int_equal(tr_config_parse(files[i].yaml, "test.yaml", 0, NULL, &c), TR_ERR_USAGE);
        assert_null(c);
        for (int p = 0; p < 4 && files[i].parts[p]; p++)
            expect_text(files[i].yaml, files[i].parts[p]);
    }
}

static void refused_sets(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        tr_config *c = NULL;
        char *one[] = {(char *)sets[i].set};
        if (tr_config_parse(MODEL, "test.yaml", 1, one, &c) != TR_ERR_USAGE)
            fail_msg("accepted: %s", sets[i].set);
        assert_null(c);
        for (int p = 0; p < 4 && sets[i].parts[p]; p++) expect_text(sets[i].set, sets[i].parts[p]);
    }
}

/* Refusals that take more than one setting. */
static void refused_pairs(void **state) {
    (void)state;
    static const struct {
        const char *sets[5], *part;
    } cases[] = {
        {{"run.collectives=nccl"},
         "--set run.collectives: value nccl is between GPUs, and run.device is cpu; use mpi"},
        {{"run.collectives=nccl", "run.device=simt"}, "run.device is simt; use mpi"},
        {{"model.num_experts=4", "parallel.expert=5"},
         "--set parallel.expert: value 5 is more ranks than num_experts 4 has experts; use 1 to 4"},
        {{"model.num_experts=4", "model.num_experts_per_tok=5"}, "value 5 is more than"},
        {{"model.num_experts=8", "model.n_group=3"},
         "--set model.n_group: value 3 does not divide num_experts 8; use 1, 2, 4 or 8"},
        {{"model.num_experts=8", "model.n_group=4", "model.topk_group=5"},
         "--set model.topk_group: value 5 is more than n_group 4; use 1 to 4"},
        {{"model.num_experts=8", "model.n_group=4", "model.topk_group=1",
          "model.num_experts_per_tok=4"},
         "--set model.topk_group: value 1 groups of num_experts / n_group = 2 have 2 experts, "
         "fewer "
         "than num_experts_per_tok 4; use 2 or more here"},
        {{"model.n_group=2"}, "asks for groups of experts where num_experts is 0"},
        {{"model.num_experts=4", "model.decoder_sparse_step=5"},
         "--set model.num_experts: value 4 has no layer"},
        {{"model.num_experts=4", "model.first_k_dense_replace=4"}, "has no layer"},
        {{"model.mlp_only_layers=[0, 0, 0, 0, 0]"}, "names more layers"},
        {{"parallel.schedule=interleaved", "parallel.virtual_stages=1"},
         "--set parallel.virtual_stages: value 1 is less than the 2 that schedule interleaved "
         "needs; use 2 or more, or set parallel.schedule to 1f1b"},
        {{"parallel.schedule=zb_v", "parallel.virtual_stages=1"},
         "value 1 is not the 2 that schedule zb_v has; use 2"},
        {{"parallel.schedule=interleaved", "parallel.virtual_stages=5"},
         "value 5 is more than num_hidden_layers 4; set parallel.schedule to 1f1b"},
        {{"parallel.schedule=dualpipe_v", "parallel.pipeline=3"},
         "value 2 (the default) * pipeline 3 = 6 is more stages than num_hidden_layers 4; use a "
         "pipeline of 1 to 2, more layers, or set parallel.schedule to 1f1b"},
        {{"parallel.tensor=6", "model.num_attention_heads=12", "model.num_key_value_heads=4",
          "model.head_dim=8"},
         "num_attention_heads 12, and divide num_key_value_heads 4 or be a multiple of it; use 1, "
         "2, 4 or 12"},
        {{"training.micro_batch_size=1", "data.sequence_length=30", "parallel.tensor=4"},
         "--set training.micro_batch_size: value 1 * sequence_length / context 30 = 30 rows, which "
         "parallel.tensor 4 does not divide; use 2 here"},
        {{"optimizer.schedule=wsd", "optimizer.decay_steps=190"},
         "--set optimizer.decay_steps: value 190 and warmup_steps 20 are more than training.steps "
         "200; use at most 180"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int n = 0;
        while (cases[i].sets[n]) n++;
        tr_config *c = NULL;
        assert_int_equal(tr_config_parse(MODEL, "test.yaml", n, (char *const *)cases[i].sets, &c),
                         TR_ERR_USAGE);
        expect_text(cases[i].sets[0], cases[i].part);
    }
}

/* The world's size against the grid: both numbers, and the nearest that work. */
static void refused_worlds(void **state) {
    (void)state;
    static const struct {
        int world;
        const char *sets[6], *part;
    } cases[] = {
        {4,
         {"parallel.pipeline=3"},
         "--set parallel.pipeline: value 3 makes pipeline 3 * context 1 "
         "* tensor 1 = 3, which does not divide the 4 ranks; start 3 or "
         "6 ranks (mpirun -n)"},
        {1, {"parallel.context=2"}, "--set parallel.context: value 2 makes"},
        {1, {"parallel.context=2"}, "start 2 ranks (mpirun -n)"},
        {6,
         {"model.num_experts=4", "parallel.expert=4", "training.global_batch_size=24"},
         "--set parallel.expert: value 4 does not divide data 6 * context 1 = 6 (6 ranks); use 1, "
         "2 or 3"},
        {2,
         {"training.global_batch_size=30"},
         "--set training.global_batch_size: value 30 is not a multiple of micro_batch_size 4 * "
         "data-parallel ranks 2 = 8; use 24 or 32"},
        {1,
         {"training.global_batch_size=2147483644"},
         "value 2147483644 makes 536870911 micro-batches a rank in one step, at most 1048576 are "
         "possible; raise micro_batch_size or start more ranks"},
        {16, {NULL}, "value 32 (the default) is not a multiple"},
        {16, {NULL}, "= 64; use 64"},
        {2,
         {"model.num_experts=4", "model.router_aux_loss_scope=global_batch"},
         "--set model.router_aux_loss_scope: value global_batch needs all forwards"},
        {2,
         {"model.num_experts=4", "model.router_aux_loss_scope=global_batch"},
         "parallel.schedule to gpipe, or micro_batch_size to 16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tr_config *c = parsed(MODEL, cases[i].sets);
        int64_t data = -7;
        assert_int_equal(tr_config_check_world(c, cases[i].world, &data), TR_ERR_USAGE);
        assert_int_equal(data, -7);
        expect_text("world", cases[i].part);
        tr_config_destroy(c);
    }
    static const struct {
        int world, data;
        const char *sets[6];
    } good[] = {
        {1, 1, {NULL}},
        {8, 8, {NULL}},
        {8, 2, {"parallel.pipeline=2", "parallel.context=2"}},
        {4, 2, {"parallel.context=2", "model.num_experts=4", "parallel.expert=4"}},
        {4, 4, {"model.num_experts=10", "parallel.expert=4"}},
        {2,
         2,
         {"model.num_experts=4", "model.router_aux_loss_scope=global_batch",
          "parallel.schedule=gpipe"}},
        {2,
         2,
         {"model.num_experts=4", "model.router_aux_loss_scope=global_batch",
          "training.micro_batch_size=16"}},
        {3, 3, {"training.global_batch_size=3", "training.micro_batch_size=1"}},
        {2, 2, {"model.router_aux_loss_scope=global_batch"}}, /* a dense model has no such loss */
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        tr_config *c = parsed(MODEL, good[i].sets);
        int64_t data = 0;
        if (tr_config_check_world(c, good[i].world, &data) != TR_OK)
            fail_msg("%s", tr_error_message());
        assert_int_equal(data, good[i].data);
        tr_config_destroy(c);
    }
}

static void refused_paths(void **state) {
    (void)state;
    char folder[] = "/tmp/tr-config-XXXXXX", path[200];
    assert_non_null(mkdtemp(folder));
    tr_config *c = NULL;
    snprintf(path, sizeof path, "%s/not there \xc3\xa9.yaml", folder);
    assert_int_equal(tr_config_read(path, 0, NULL, &c), TR_ERR_MISSING);
    expect_text("missing", path);
    assert_int_equal(tr_config_read(folder, 0, NULL, &c), TR_ERR_USAGE);
    expect_text("folder", "is a folder");
    write_file(path, MODEL "\0x", sizeof MODEL + 1);
    assert_int_equal(tr_config_read(path, 0, NULL, &c), TR_ERR_USAGE);
    expect_text("binary", "NUL byte");
    write_file(path, MODEL "log: {every: 0}\n", strlen(MODEL) + 16);
    assert_int_equal(tr_config_read(path, 0, NULL, &c), TR_ERR_USAGE);
    expect_text("unicode path", "not there \xc3\xa9.yaml:7:7: log.every: value 0 is out of range");
    assert_int_equal(tr_config_read("/dev/zero", 0, NULL, &c), TR_ERR_USAGE);
    expect_text("endless", "is a pipe or device");
    assert_null(c);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

/* Property: a long value is cut in the message, between characters, and control codes go. */
static void long_values(void **state) {
    (void)state;
    char set[2000] = "training.steps=\"";
    for (int i = 0; i < 300; i++) strcat(set, "\xc3\xa9\\t");
    strcat(set, "\"");
    char *one[] = {set};
    tr_config *c = NULL;
    assert_int_equal(tr_config_parse(MODEL, "test.yaml", 1, one, &c), TR_ERR_USAGE);
    assert_true(strlen(tr_error_message()) < 250);
    expect_text("cut", "\xc3\xa9 \xc3\xa9 ");
    expect_text("cut", "...");
    assert_null(strchr(tr_error_message(), '\t'));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_files), cmocka_unit_test(refused_sets),
        cmocka_unit_test(refused_pairs), cmocka_unit_test(refused_worlds),
        cmocka_unit_test(refused_paths), cmocka_unit_test(long_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
