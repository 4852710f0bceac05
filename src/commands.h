/* commands.h - the command line: what each command takes, and the functions behind them.
 * Floor: main. */
#pragma once
#include "config/config.h"
#include "dist/comm.h"

/* What the words after the command said. Strings are borrowed from argv. */
typedef struct {
    const char *config;     /* CONFIG */
    const char *operation;  /* info, verify, build */
    const char *paths[256]; /* further words */
    int npaths;
    char *sets[256]; /* --set section.key=value; owned */
    int nsets;
    const char *checkpoint, *prompt, *output, *format, *documents, *validation_output, *trace;
    double validation_fraction, temperature, top_p;
    int64_t tokens, seed, sequence_length, end_of_document;
    int64_t world; /* 0: not given */
    bool dry_run, schedule, full, all, tensors;
} tr_arguments;

/* Groups of options a command takes. */
enum {
    TR_TAKES_SET = 1,
    TR_TAKES_TRAIN = 2,
    TR_TAKES_CHECKPOINT = 4,
    TR_TAKES_SAMPLE = 8,
    TR_TAKES_DATA = 16,
    TR_TAKES_VERIFY = 32,
    TR_TAKES_PLAN = 64,
    TR_TAKES_INFO = 128
};

typedef struct {
    const char *name, *words, *about;
    int takes;
    tr_status (*run)(const tr_arguments *arguments, tr_comm *world);
} tr_command;

extern const tr_command tr_commands[]; /* ends with a NULL name; in main.c */

/* Local; the same on every rank. Finds the command and reads its words; prints help and errors on
 * rank 0 alone. *command_p is NULL when there is nothing to run (help, version). */
tr_status tr_arguments_read(int argc, char **argv, const tr_command **command_p,
                            tr_arguments *arguments);
void tr_arguments_free(tr_arguments *arguments);

/* plan CONFIG, checkpoint info|verify, data build|info (commands.c) */
tr_status tr_command_plan(const tr_arguments *arguments, tr_comm *world);
tr_status tr_command_checkpoint(const tr_arguments *arguments, tr_comm *world);
tr_status tr_command_data(const tr_arguments *arguments, tr_comm *world);
