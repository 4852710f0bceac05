/* settings.c - every setting, declared once. Floor: config. */
#include "config/settings.h"

#include <math.h>
#include <string.h>

#define KEY(s, k)     .section = #s, .key = #k, .offset = offsetof(tr_config, s.k)
#define AT_LEAST(a)   .range = {(a), INFINITY, false, false}
#define ABOVE(a)      .range = {(a), INFINITY, true, false}
#define WITHIN(a, b)  .range = {(a), (b), false, false}
#define FRACTION_OF_1 .range = {0, 1, false, true}

/* Bounds that keep every product of extents inside 64 bits, far above any real model. */
#define MAX_TOKENS  2147483647.0
#define MAX_WIDTH   16777216.0
#define MAX_HIDDEN  1048576.0
#define MAX_COUNT   65536.0
#define MAX_SAMPLES 1e12

const char *const tr_sections[] = {"run",       "model",      "parallel", "data", "training",
                                   "optimizer", "checkpoint", "log",      NULL};

const tr_setting tr_settings[] = {
    {KEY(run, name), TR_KIND_STRING, .derived = "the config file's, without its extension",
     .help =
         "Names the run's folders: run.directory/NAME, checkpoint.directory/NAME. A run goes on "
         "from the checkpoints it finds under its name; one job at a time writes there."},
    {KEY(run, seed), TR_KIND_INT, .fallback = "1234", AT_LEAST(0), .identity = true,
     .help = "Decides the initial weights and the order of the data, on every grid alike."},
    {KEY(run, device), TR_KIND_ENUM, .fallback = "cpu", .names = "cpu|cuda|simt|simt-check",
     .help = "Where the model lives and computes. simt runs the kernels of cuda without a GPU, "
             "slowly; simt-check also checks each of their accesses."},
    {KEY(run, collectives), TR_KIND_ENUM, .derived = "nccl with run.device cuda, mpi otherwise",
     .names = "nccl|mpi",
     .help = "What carries data between ranks whose device is cuda: NCCL, with a GPU a rank, or "
             "MPI through host memory. Other devices use mpi."},
    {KEY(run, dtype), TR_KIND_ENUM, .fallback = "float32", .names = "float32|bfloat16",
     .help =
         "Type of weights and activations in computation. Gradients, master weights and moments "
         "are float32 either way."},
    {KEY(run, directory), TR_KIND_STRING, .fallback = "runs",
     .help = "Folder of the runs' folders."},
    {KEY(run, threads), TR_KIND_INT, .fallback = "0", WITHIN(0, 4096),
     .help =
         "Threads a rank; 0: OMP_NUM_THREADS, or the cores this node allows divided by its ranks."},
    {KEY(run, peak_flops), TR_KIND_REAL, .fallback = "0", AT_LEAST(0),
     .help = "A rank's peak in floating-point operations a second, the base of mfu; 0: measured at "
             "the start (of a GPU its own products; the card's data sheet says more)."},

    {KEY(model, from), TR_KIND_STRING, .nullable = true,
     .help = "A Hugging Face config.json whose keys are taken where this section gives none."},
    {KEY(model, init_from), TR_KIND_STRING, .nullable = true,
     .help = "A checkpoint whose weights the run starts from; step, moments and data position "
             "start afresh."},
    {KEY(model, vocab_size), TR_KIND_INT, .required = true, .identity = true, WITHIN(1, MAX_TOKENS),
     .help = "Tokens in the vocabulary; at least 256 for byte data."},
    {KEY(model, hidden_size), TR_KIND_INT, .required = true, .identity = true,
     WITHIN(1, MAX_HIDDEN), .help = "Width of the residual stream."},
    {KEY(model, num_hidden_layers), TR_KIND_INT, .required = true, .identity = true,
     WITHIN(1, MAX_COUNT), .help = "Transformer blocks."},
    {KEY(model, num_attention_heads), TR_KIND_INT, .required = true, .identity = true,
     WITHIN(1, MAX_COUNT), .help = "Query heads."},
    {KEY(model, num_key_value_heads), TR_KIND_INT, .derived = "num_attention_heads",
     .nullable = true, .identity = true, WITHIN(1, MAX_COUNT),
     .help = "Key and value heads; divides num_attention_heads."},
    {KEY(model, head_dim), TR_KIND_INT, .derived = "hidden_size / num_attention_heads",
     .nullable = true, .identity = true, WITHIN(2, MAX_COUNT),
     .help = "Width of a head; even, for the rotary embedding turns pairs."},
    {KEY(model, intermediate_size), TR_KIND_INT,
     .derived = "none; moe_intermediate_size if every layer has experts", .nullable = true,
     .identity = true, WITHIN(1, MAX_WIDTH),
     .help = "Width inside the feed-forward network of a layer without experts."},
    {KEY(model, hidden_act), TR_KIND_ENUM, .fallback = "silu", .names = "silu|gelu_pytorch_tanh",
     .identity = true,
     .help = "Activation of the gate of feed-forward networks and experts: silu makes SwiGLU, "
             "gelu_pytorch_tanh (GELU by its tanh approximation) GeGLU."},
    {KEY(model, rope_theta), TR_KIND_REAL, .fallback = "10000", .identity = true, ABOVE(0),
     .help = "Base of the rotary position embedding."},
    {KEY(model, rms_norm_eps), TR_KIND_REAL, .fallback = "1e-6", .identity = true, ABOVE(0),
     .help = "Added to the mean square in RMS norms."},
    {KEY(model, norm_type), TR_KIND_ENUM, .fallback = "rms_norm", .names = "rms_norm|layer_norm",
     .identity = true,
     .help = "Norms of the blocks and the last one: rms_norm has a weight, layer_norm subtracts "
             "the mean first and has a weight and a bias."},
    {KEY(model, layer_norm_eps), TR_KIND_REAL, .fallback = "1e-5", .identity = true, ABOVE(0),
     .help = "Added to the variance in layer norms."},
    {KEY(model, initializer_range), TR_KIND_REAL, .fallback = "0.02", .identity = true, AT_LEAST(0),
     .help = "Standard deviation of the initial weights."},
    {KEY(model, sliding_window), TR_KIND_INT, .fallback = "0", .nullable = true, .identity = true,
     WITHIN(0, MAX_TOKENS),
     .help = "Keys a query attends to, its own among them; 0 or null: all before it."},
    {KEY(model, tie_word_embeddings), TR_KIND_BOOL, .fallback = "false", .identity = true,
     .help = "Whether the output head is the embedding, transposed."},
    {.section = "model",
     .key = "rope_scaling",
     .kind = TR_KIND_NULL,
     .fallback = "null",
     .refusal = "is not supported yet; use null",
     .help = "Rotary scaling; null alone is accepted."},
    {KEY(model, num_experts), TR_KIND_INT, .fallback = "0", .identity = true, WITHIN(0, MAX_COUNT),
     .help = "Routed experts of a mixture-of-experts layer; 0: a dense model."},
    {KEY(model, num_experts_per_tok), TR_KIND_INT, .fallback = "2", .identity = true,
     WITHIN(1, MAX_COUNT), .help = "Experts each token is sent to."},
    {KEY(model, n_group), TR_KIND_INT, .fallback = "1", .nullable = true, .identity = true,
     WITHIN(1, MAX_COUNT),
     .help = "Groups of experts, each of neighbours; divides num_experts. Aligned with ranks or "
             "nodes, they limit how many of these a token goes to."},
    {KEY(model, topk_group), TR_KIND_INT, .derived = "n_group", .nullable = true, .identity = true,
     WITHIN(1, MAX_COUNT),
     .help = "Groups a token chooses its experts from: those with the likeliest expert or, with "
             "scoring_func sigmoid, with the two that together are the likeliest."},
    {KEY(model, moe_intermediate_size), TR_KIND_INT, .derived = "intermediate_size",
     .nullable = true, .identity = true, WITHIN(1, MAX_WIDTH), .help = "Width inside an expert."},
    {KEY(model, shared_expert_intermediate_size), TR_KIND_INT, .fallback = "0", .nullable = true,
     .identity = true, WITHIN(0, MAX_WIDTH),
     .help = "Width of the expert that every token passes; 0: there is none."},
    {KEY(model, scoring_func), TR_KIND_ENUM, .fallback = "softmax", .names = "softmax|sigmoid",
     .identity = true,
     .help = "A router's probabilities: softmax over all experts, or each expert's sigmoid."},
    {KEY(model, norm_topk_prob), TR_KIND_BOOL, .fallback = "true", .identity = true,
     .help = "Whether the chosen experts' probabilities are scaled to sum to 1."},
    {KEY(model, router_aux_loss_coef), TR_KIND_REAL, .fallback = "0.001", .identity = true,
     AT_LEAST(0), .help = "Coefficient of the load-balancing loss."},
    {KEY(model, router_z_loss_coef), TR_KIND_REAL, .fallback = "0", .identity = true, AT_LEAST(0),
     .help = "Coefficient of the router's z-loss."},
    {KEY(model, router_aux_loss_scope), TR_KIND_ENUM, .fallback = "micro_batch", .identity = true,
     .names = "micro_batch|sequence|global_batch",
     .help =
         "Tokens over which expert loads are balanced. global_batch needs the gpipe schedule or "
         "one micro-batch a rank."},
    {KEY(model, expert_capacity_factor), TR_KIND_REAL, .fallback = "0", .identity = true,
     AT_LEAST(0),
     .help =
         "An expert takes ceil(num_experts_per_tok * length / num_experts * factor) tokens of a "
         "sequence and drops the others; 0: no token is dropped."},
    {KEY(model, expert_drop_policy), TR_KIND_ENUM, .fallback = "position", .identity = true,
     .names = "position|probability",
     .help = "Which tokens a full expert keeps: the first in the sequence, or the likeliest."},
    {KEY(model, decoder_sparse_step), TR_KIND_INT, .fallback = "1", .identity = true,
     WITHIN(1, MAX_COUNT), .help = "Layer i has experts where i + 1 is a multiple of this."},
    {KEY(model, first_k_dense_replace), TR_KIND_INT, .fallback = "0", .identity = true,
     WITHIN(0, MAX_COUNT), .help = "Layers at the start without experts."},
    {KEY(model, mlp_only_layers), TR_KIND_INTS, .fallback = "[]", .identity = true,
     WITHIN(0, MAX_COUNT), .help = "Numbers of further layers without experts, from 0."},

    {KEY(parallel, pipeline), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_HIDDEN),
     .help = "Pipeline stages. Data-parallel ranks are what is left: world / (pipeline * context * "
             "tensor)."},
    {KEY(parallel, context), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_HIDDEN),
     .help = "Ranks that share a sequence: keys and values go around a ring of them (ring "
             "attention), or heads are exchanged (context_heads)."},
    {KEY(parallel, context_heads), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_HIDDEN),
     .help =
         "Context ranks that exchange rows for heads (DeepSpeed-Ulysses) in place of a ring; 1: "
         "one ring of all; equal to context: no ring; between: rings of context / "
         "context_heads ranks. Divides context and a tensor rank's query heads; divides its "
         "key/value heads, or is a multiple of them. sequence_length is a multiple of context, of "
         "2 * context for rings of an odd context_heads."},
    {KEY(parallel, expert), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_HIDDEN),
     .help = "Ranks that share one set of experts; divides data * context, at most num_experts."},
    {KEY(parallel, expert_exchange), TR_KIND_ENUM, .fallback = "flat", .names = "flat|hierarchical",
     .help = "How tokens reach experts: flat, each rank sends to each; hierarchical, over one rank "
             "of each node for each other node, a token once to a node, however many of its "
             "experts are there."},
    {KEY(parallel, expert_exchange_dtype), TR_KIND_ENUM, .fallback = "same",
     .names = "same|bfloat16",
     .help = "Type of tokens on their way to experts and back; same: run.dtype."},
    {KEY(parallel, tensor), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_HIDDEN),
     .help = "Ranks that share the weights of attention, feed-forward, embedding and head, and the "
             "rows of a micro-batch; divides num_attention_heads, divides or is a multiple of "
             "num_key_value_heads, and divides micro_batch_size * sequence_length / context."},
    {KEY(parallel, schedule), TR_KIND_ENUM, .fallback = "1f1b",
     .names = "1f1b|gpipe|interleaved|zb_h1|zb_v|dualpipe_v",
     .help = "Order of forwards and backwards in the pipeline: interleaved idles less by more "
             "messages, zb_h1 and zb_v by computing weight gradients where they would wait, "
             "dualpipe_v by doing a forward and a backward at once. `trireme plan CONFIG "
             "--schedule` draws it."},
    {KEY(parallel, virtual_stages), TR_KIND_INT,
     .derived = "2 where schedule is interleaved, zb_v or dualpipe_v, else 1", WITHIN(1, 64),
     .help = "Parts of the model on each pipeline rank; interleaved takes 2 or more."},
    {KEY(parallel, recompute), TR_KIND_ENUM, .fallback = "none", .names = "none|selective|full",
     .help = "How much of the forward the backward computes again instead of storing it."},
    {KEY(parallel, bucket_elems), TR_KIND_INT, .fallback = "4194304", WITHIN(1, MAX_TOKENS),
     .help = "Gradient elements reduced at a time."},
    {KEY(parallel, zero), TR_KIND_INT, .fallback = "1", WITHIN(1, 3),
     .help =
         "What data- and context-parallel ranks share out among them: 1 the optimizer's states, "
         "2 gradients too (reduced in every micro-batch), 3 weights too (gathered for each "
         "layer's forward and backward). Numbers and checkpoints stay the same."},
    {KEY(parallel, overlap), TR_KIND_BOOL, .fallback = "true",
     .help = "Whether gradients are reduced and weights gathered while the ranks compute; false "
             "waits for each, to measure what that gains."},

    {KEY(data, train), TR_KIND_DATA, .fallback = "[]", .identity = true,
     .help = "Training files: llm.c .bin, Megatron .bin beside its .idx, anything else as bytes."},
    {KEY(data, validation), TR_KIND_DATA, .fallback = "[]", .help = "Validation files."},
    {KEY(data, sequence_length), TR_KIND_INT, .fallback = "256", .identity = true,
     WITHIN(1, MAX_TOKENS), .help = "Tokens in a sample."},
    {KEY(data, pad_id), TR_KIND_INT, .fallback = "-1", .identity = true, WITHIN(-1, MAX_TOKENS),
     .help = "Token that is padding: neither predicted, routed nor counted; -1: none."},
    {KEY(data, bytes_per_token), TR_KIND_REAL, .fallback = "1", ABOVE(0),
     .help = "Bytes of text in a mean token, for validation_bits_per_byte."},
    {KEY(data, mask), TR_KIND_BOOL, .fallback = "false", .identity = true,
     .help = "Whether FILE.mask lies beside each file: one byte a token, 0: not predicted."},
    {KEY(data, document_mask), TR_KIND_BOOL, .fallback = "false", .identity = true,
     .help = "Whether attention stays inside a document where a sample packs several."},
    {KEY(data, end_of_document), TR_KIND_INT, .fallback = "-1", .identity = true,
     WITHIN(-1, MAX_TOKENS),
     .help = "The token that ends a document, for document_mask; -1: the indexes of Megatron files "
             "say where documents end."},
    {KEY(data, reset_position_ids), TR_KIND_BOOL, .fallback = "false", .identity = true,
     .help = "Whether positions start again with each document; needs document_mask."},

    {KEY(training, steps), TR_KIND_INT, .fallback = "200", WITHIN(1, MAX_SAMPLES),
     .help = "Optimizer steps in all."},
    {KEY(training, global_batch_size), TR_KIND_INT, .fallback = "32", WITHIN(1, MAX_TOKENS),
     .help = "Sequences a step; a multiple of micro_batch_size * data-parallel ranks."},
    {KEY(training, micro_batch_size), TR_KIND_INT, .fallback = "4", WITHIN(1, MAX_TOKENS),
     .help = "Sequences a rank computes at a time."},
    {KEY(training, evaluate_every), TR_KIND_INT, .fallback = "0", WITHIN(0, MAX_SAMPLES),
     .help = "Steps between evaluations; 0: once, after the last step, if data.validation is "
             "given."},
    {KEY(training, evaluate_batches), TR_KIND_INT, .fallback = "10", WITHIN(1, MAX_TOKENS),
     .help = "An evaluation reads this many times global_batch_size sequences."},
    {KEY(training, max_skipped_steps), TR_KIND_INT, .fallback = "10", WITHIN(1, MAX_SAMPLES),
     .help = "Consecutive steps with a gradient that is not finite before the run ends (exit "
             "70)."},
    {KEY(training, watchdog_seconds), TR_KIND_INT, .fallback = "600", WITHIN(0, MAX_COUNT),
     .help = "Seconds without progress (of a step, evaluation or save) before the job ends with "
             "exit 70, naming the rank that stalls and its action; 0: waits for ever."},

    {KEY(optimizer, learning_rate), TR_KIND_REAL, .fallback = "3e-3", AT_LEAST(0),
     .help = "AdamW's highest learning rate."},
    {KEY(optimizer, min_learning_rate), TR_KIND_REAL,
     .derived = "3e-4, or learning_rate where that is lower", AT_LEAST(0),
     .help = "Where the schedule ends."},
    {KEY(optimizer, warmup_steps), TR_KIND_INT, .fallback = "20", WITHIN(0, MAX_SAMPLES),
     .help = "Steps of linear rise at the start."},
    {KEY(optimizer, decay_steps), TR_KIND_INT, .fallback = "0", WITHIN(0, MAX_SAMPLES),
     .help = "Steps of linear decay at the end of the wsd schedule."},
    {KEY(optimizer, schedule), TR_KIND_ENUM, .fallback = "cosine",
     .names = "cosine|linear|constant|wsd",
     .help = "Learning rate after the warm-up; wsd: constant, then decay_steps of decay."},
    {KEY(optimizer, beta1), TR_KIND_REAL, .fallback = "0.9", FRACTION_OF_1,
     .help = "Decay of AdamW's first moment."},
    {KEY(optimizer, beta2), TR_KIND_REAL, .fallback = "0.95", FRACTION_OF_1,
     .help = "Decay of AdamW's second moment."},
    {KEY(optimizer, epsilon), TR_KIND_REAL, .fallback = "1e-8", ABOVE(0),
     .help = "Added to the root of the second moment."},
    {KEY(optimizer, weight_decay), TR_KIND_REAL, .fallback = "0.1", AT_LEAST(0),
     .help = "Decoupled weight decay of matrices; norms have none."},
    {KEY(optimizer, clip), TR_KIND_REAL, .fallback = "1", AT_LEAST(0),
     .help = "Highest global gradient norm; 0: gradients are not clipped."},

    {KEY(checkpoint, directory), TR_KIND_STRING, .fallback = "checkpoints",
     .help = "Folder of the runs' checkpoint folders."},
    {KEY(checkpoint, every), TR_KIND_INT, .fallback = "100", WITHIN(0, MAX_SAMPLES),
     .help = "Steps between checkpoints; 0: after the last step alone."},
    {KEY(checkpoint, keep), TR_KIND_INT, .fallback = "3", WITHIN(0, MAX_SAMPLES),
     .help = "Newest checkpoints that are kept; 0: all."},
    {KEY(checkpoint, resume), TR_KIND_RESUME, .fallback = "auto", .names = "auto|never",
     .help = "auto: go on from the newest complete checkpoint; never: move old results away and "
             "start; any other text: the path of a checkpoint."},

    {KEY(log, every), TR_KIND_INT, .fallback = "1", WITHIN(1, MAX_SAMPLES),
     .help = "Steps between progress lines where the output is no terminal."},
    {KEY(log, samples), TR_KIND_BOOL, .fallback = "false",
     .help = "Whether samples.jsonl lists the samples of each step."},
    {KEY(log, tensorboard), TR_KIND_BOOL, .fallback = "true",
     .help = "Whether TensorBoard events are written."},
    {KEY(log, routing), TR_KIND_BOOL, .fallback = "false",
     .help = "Whether routing-RANK.jsonl lists which experts each token chose, by what margin."},
    {KEY(log, trace), TR_KIND_BOOL, .fallback = "false",
     .help = "Whether trace-RANK.json shows what each rank did when (open it in Perfetto)."},
    {KEY(log, trace_steps), TR_KIND_INT, .fallback = "10", WITHIN(0, MAX_SAMPLES),
     .help = "Steps from the start that are traced; 0: all."},
};

const int tr_setting_count = (int)(sizeof tr_settings / sizeof *tr_settings);

int tr_setting_find(const char *section, const char *key) {
    for (int i = 0; i < tr_setting_count; i++)
        if (!strcmp(tr_settings[i].section, section) && !strcmp(tr_settings[i].key, key)) return i;
    return -1;
}

/* Levenshtein's distance; words longer than the rows of the table are far from everything. */
static int64_t edit_distance(const char *a, const char *b) {
    enum { MOST = 64 };
    size_t na = strlen(a), nb = strlen(b);
    int64_t row[MOST + 1];
    if (na > MOST || nb > MOST) return MOST;
    for (size_t j = 0; j <= nb; j++) row[j] = (int64_t)j;
    for (size_t i = 1; i <= na; i++) {
        int64_t corner = row[0];
        row[0] = (int64_t)i;
        for (size_t j = 1; j <= nb; j++) {
            int64_t best = corner + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            corner = row[j];
            row[j] = best;
        }
    }
    return row[nb];
}

void tr_guess_offer(tr_guess *guess, const char *name) {
    int64_t distance = edit_distance(guess->word, name);
    int64_t close = 1 + (int64_t)strlen(name) / 3;
    if (distance > close || (guess->best && distance >= guess->distance)) return;
    guess->best = name;
    guess->distance = distance;
}
