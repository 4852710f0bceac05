/* arguments.c - reads the command line with argp. Floor: main. */
#include "commands.h"
#include "version.h"

#include "base/heap.h"
#include "base/log.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY_SET = 256,
    KEY_RESUME,
    KEY_DRY_RUN,
    KEY_CHECKPOINT,
    KEY_PROMPT,
    KEY_TOKENS,
    KEY_TEMPERATURE,
    KEY_TOP_P,
    KEY_SEED,
    KEY_OUTPUT,
    KEY_FORMAT,
    KEY_DOCUMENTS,
    KEY_EOD,
    KEY_FRACTION,
    KEY_VALIDATION,
    KEY_SEQUENCE,
    KEY_SCHEDULE,
    KEY_WORLD,
    KEY_TRACE,
    KEY_FULL,
    KEY_ALL,
    KEY_TENSORS
};

/* Each option belongs to one group; a command takes the groups it names. */
static const struct argp_option options[] = {
    {"set", KEY_SET, "KEY=VALUE", 0, "Override a setting (trireme help config): section.key=value",
     TR_TAKES_SET},
    {"resume", KEY_RESUME, "auto|never|PATH", 0,
     "Go on from the newest checkpoint, start afresh, or take this file", TR_TAKES_TRAIN},
    {"dry-run", KEY_DRY_RUN, 0, 0, "Check config, data and grid, print the plan, do not train",
     TR_TAKES_TRAIN},
    {"full", KEY_FULL, 0, 0, "Prove the config itself, not a small twin of it", TR_TAKES_VERIFY},
    {"all", KEY_ALL, 0, 0, "Print every parameter, not only the worst", TR_TAKES_VERIFY},
    {"checkpoint", KEY_CHECKPOINT, "PATH", 0, "The checkpoint to read", TR_TAKES_CHECKPOINT},
    {"prompt", KEY_PROMPT, "TEXT", 0, "What the sample starts with", TR_TAKES_SAMPLE},
    {"tokens", KEY_TOKENS, "N", 0, "How many tokens to add (200)", TR_TAKES_SAMPLE},
    {"temperature", KEY_TEMPERATURE, "X", 0, "0 takes the most likely token (0.8)",
     TR_TAKES_SAMPLE},
    {"top-p", KEY_TOP_P, "X", 0, "Draw from the most likely tokens of this mass (0.95)",
     TR_TAKES_SAMPLE},
    {"seed", KEY_SEED, "N", 0, "Another seed, another sample (1)", TR_TAKES_SAMPLE},
    {"output", KEY_OUTPUT, "FILE", 0, "build: where the tokens go", TR_TAKES_DATA},
    {"format", KEY_FORMAT, "llm.c|megatron|text", 0, "build: what is written (llm.c)",
     TR_TAKES_DATA},
    {"documents", KEY_DOCUMENTS, "file|paragraph|line", 0, "build: what a document is (file)",
     TR_TAKES_DATA},
    {"end-of-document", KEY_EOD, "ID", 0, "build: a token after each, 256 or more (none)",
     TR_TAKES_DATA},
    {"validation-fraction", KEY_FRACTION, "X", 0, "build: hold out this last part of the text",
     TR_TAKES_DATA},
    {"validation-output", KEY_VALIDATION, "FILE", 0, "build: where the held-out part goes",
     TR_TAKES_DATA},
    {"schedule", KEY_SCHEDULE, 0, 0, "Draw what each pipeline rank does, and when", TR_TAKES_PLAN},
    {"world", KEY_WORLD, "N", 0, "For so many ranks (those of mpirun, else as few as will do)",
     TR_TAKES_PLAN},
    {"trace", KEY_TRACE, "FILE", 0, "Write the timeline as a trace for Perfetto", TR_TAKES_PLAN},
    {"tensors", KEY_TENSORS, 0, 0, "info: list all tensors of a large model", TR_TAKES_INFO},
    {"sequence-length", KEY_SEQUENCE, "N", 0, "info: for counting samples (256)", TR_TAKES_DATA}};

enum { OPTIONS = sizeof options / sizeof *options };

static void options_of(const tr_command *c, struct argp_option out[OPTIONS + 1]) {
    int n = 0;
    for (int i = 0; i < OPTIONS; i++) {
        if (!(options[i].group & c->takes)) continue;
        out[n] = options[i];
        out[n++].group = 0;
    }
    out[n] = (struct argp_option){0};
}

/* What the parser works on. */
typedef struct {
    const tr_command *command;
    tr_arguments *out;
    tr_status status;
} parser;

static void add_set(parser *p, char *text) {
    tr_arguments *a = p->out;
    if (a->nsets < (int)(sizeof a->sets / sizeof *a->sets)) {
        a->sets[a->nsets++] = text;
        return;
    }
    free(text);
    p->status = tr_fail(TR_ERR_USAGE, "more than %d times --set", a->nsets);
}

/* --resume X is --set checkpoint.resume=X. */
static char *resume_set(const char *value) {
    char *quoted = tr_config_quote(value);
    char *text = tr_heap_format("checkpoint.resume=%s", quoted);
    free(quoted);
    return text;
}

static double number(parser *p, const char *option, const char *text, double least, double most,
                     bool whole) {
    char *end;
    errno = 0;
    double x = strtod(text, &end);
    if (end == text || *end || errno || !(x >= least && x <= most) || (whole && x != floor(x)))
        p->status = tr_fail(TR_ERR_USAGE, "--%s %s: a%s number from %g to %g is needed", option,
                            text, whole ? " whole" : "", least, most);
    return x;
}

static int64_t whole(parser *p, const char *option, const char *text, double least, double most) {
    double x = number(p, option, text, least, most, true);
    return p->status == TR_OK ? (int64_t)x : 0;
}

static void word(parser *p, char *text) {
    tr_arguments *a = p->out;
    const char *words = p->command->words;
    if (strstr(words, "CONFIG") && !a->config)
        a->config = text;
    else if (strchr(words, '|') && !a->operation)
        a->operation = text;
    else if (strstr(words, "PATH") && a->npaths < (int)(sizeof a->paths / sizeof *a->paths))
        a->paths[a->npaths++] = text;
    else
        p->status = tr_fail(TR_ERR_USAGE, "'%s' is one word too many: trireme %s %s", text,
                            p->command->name, words);
}

static error_t parse(int key, char *text, struct argp_state *state) {
    parser *p = state->input;
    tr_arguments *a = p->out;
    switch (key) {
    case KEY_SET:
        add_set(p, tr_heap_copy(text));
        break;
    case KEY_RESUME:
        add_set(p, resume_set(text));
        break;
    case KEY_DRY_RUN:
        a->dry_run = true;
        break;
    case KEY_CHECKPOINT:
        a->checkpoint = text;
        break;
    case KEY_PROMPT:
        a->prompt = text;
        break;
    case KEY_TOKENS:
        a->tokens = whole(p, "tokens", text, 0, 1e9);
        break;
    case KEY_TEMPERATURE:
        a->temperature = number(p, "temperature", text, 0, 100, false);
        break;
    case KEY_TOP_P:
        a->top_p = number(p, "top-p", text, 0, 1, false);
        break;
    case KEY_SEED:
        a->seed = whole(p, "seed", text, 0, 1e15);
        break;
    case KEY_OUTPUT:
        a->output = text;
        break;
    case KEY_FORMAT:
        a->format = text;
        break;
    case KEY_DOCUMENTS:
        a->documents = text;
        break;
    case KEY_EOD:
        a->end_of_document = whole(p, "end-of-document", text, 256, 65535);
        break;
    case KEY_FRACTION:
        a->validation_fraction = number(p, "validation-fraction", text, 0, 1, false);
        break;
    case KEY_VALIDATION:
        a->validation_output = text;
        break;
    case KEY_SEQUENCE:
        a->sequence_length = whole(p, "sequence-length", text, 1, 1e12);
        break;
    case KEY_SCHEDULE:
        a->schedule = true;
        break;
    case KEY_WORLD:
        a->world = whole(p, "world", text, 1, 1e6);
        break;
    case KEY_TRACE:
        a->trace = text;
        break;
    case KEY_TENSORS:
        a->tensors = true;
        break;
    case KEY_FULL:
        a->full = true;
        break;
    case KEY_ALL:
        a->all = true;
        break;
    case ARGP_KEY_ARG:
        word(p, text);
        break;
    case ARGP_KEY_ERROR:
        if (p->status == TR_OK)
            p->status = tr_fail(TR_ERR_USAGE,
                                "unknown option or missing value: '%s'; trireme %s --help lists "
                                "the options",
                                state->argv[state->next - 1], p->command->name);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return p->status == TR_OK ? 0 : EINVAL;
}

static void usage(FILE *to) {
    fprintf(to, "trireme %s - trains dense and mixture-of-experts transformers over MPI\n\n",
            TR_VERSION);
    for (const tr_command *c = tr_commands; c->name; c++)
        fprintf(to, "  trireme %-10s %-32s %s\n", c->name, c->words, c->about);
    fprintf(to,
            "\ntrireme COMMAND --help lists the options, trireme help config the settings.\n"
            "Exit codes: 0 done, 64 usage or config, 65 bad data, 66 missing file, 70 failure,\n"
            "74 input or output, 75 stopped by a signal after saving: run again to go on.\n");
}

static tr_status bad_usage(const char *what, const char *text) {
    return tr_fail(TR_ERR_USAGE, "%s '%s'; trireme --help lists the commands", what, text);
}

static const tr_command *find_command(const char *name) {
    const tr_command *c = tr_commands;
    while (c->name && strcmp(c->name, name)) c++;
    return c;
}

static struct argp argp_of(const tr_command *c, struct argp_option taken[OPTIONS + 1]) {
    options_of(c, taken);
    return (struct argp){taken, parse, c->words, c->about, NULL, NULL, NULL};
}

/* Rank 0 prints: on everything, on the settings, or on a command. */
static tr_status help(const char *topic) {
    bool speaks = tr_log_get_rank() == 0, config = topic && !strcmp(topic, "config");
    const tr_command *c = topic ? find_command(topic) : NULL;
    if (topic && !config && !c->name) return bad_usage("no help on", topic);
    if (!speaks) return TR_OK;
    if (!topic) {
        usage(stdout);
    } else if (config) {
        tr_config_help(stdout);
    } else {
        char program[64];
        struct argp_option taken[OPTIONS + 1];
        struct argp argp = argp_of(c, taken);
        snprintf(program, sizeof program, "trireme %s", c->name);
        argp_help(&argp, stdout, ARGP_HELP_USAGE | ARGP_HELP_DOC | ARGP_HELP_LONG, program);
    }
    return TR_OK;
}

tr_status tr_arguments_read(int argc, char **argv, const tr_command **command_p, tr_arguments *a) {
    *command_p = NULL;
    *a = (tr_arguments){.tokens = 200,
                        .temperature = 0.8,
                        .top_p = 0.95,
                        .seed = 1,
                        .sequence_length = 256,
                        .end_of_document = -1};
    if (argc < 2) return tr_fail(TR_ERR_USAGE, "no command; trireme --help lists them");
    const char *name = argv[1];
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) {
        tr_say("trireme %s%s%s", TR_VERSION, *tr_commit ? ", commit " : "", tr_commit);
        return TR_OK;
    }
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"))
        return help(argc > 2 ? argv[2] : NULL);
    const tr_command *c = find_command(name);
    if (!c->name) return bad_usage("unknown command", name);
    for (int i = 2; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return help(name);
    struct argp_option taken[OPTIONS + 1];
    struct argp argp = argp_of(c, taken);
    parser p = {.command = c, .out = a};
    argp_parse(&argp, argc - 1, argv + 1, ARGP_NO_EXIT | ARGP_NO_HELP | ARGP_NO_ERRS, NULL, &p);
    TR_TRY(p.status);
    if (strstr(c->words, "CONFIG") && !a->config)
        return tr_fail(TR_ERR_USAGE, "trireme %s needs a config file", c->name);
    *command_p = c;
    return TR_OK;
}

void tr_arguments_free(tr_arguments *a) {
    for (int i = 0; i < a->nsets; i++) free(a->sets[i]);
}
