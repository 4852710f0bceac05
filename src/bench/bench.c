/* bench.c - which groups of rows are measured. Floor: bench. */
#include "bench/bench.h"

#include "base/log.h"
#include "bench/groups.h"

#include <stdio.h>
#include <string.h>

/* "AMD EPYC 9354 32-Core Processor", as the system names it. */
static void processor(char *out, size_t bytes) {
    char line[256];
    snprintf(out, bytes, "a processor without a name");
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !value) continue;
        value[strcspn(value, "\n")] = 0;
        snprintf(out, bytes, "%s", value + 2);
        break;
    }
    if (f) fclose(f);
}

static void say_machine(const tr_lab *lab) {
    char cpu[80];
    const tr_model_config *m = &lab->config->model;
    processor(cpu, sizeof cpu);
    tr_say("%s (%s), %d rank%s x %d thread%s", cpu, lab->device->name, lab->ranks,
           lab->ranks == 1 ? "" : "s", lab->threads, lab->threads == 1 ? "" : "s");
    tr_say("model: %.1f M parameters, %lld layers, %lld wide, %lld heads, vocabulary %lld",
           (double)tr_registry_total(tr_model_registry(lab->plan->model)) / 1e6,
           (long long)m->num_hidden_layers, (long long)m->hidden_size,
           (long long)m->num_attention_heads, (long long)m->vocab_size);
}

static void say_what(const tr_lab *lab) {
    say_machine(lab);
    tr_say("targets are for 2 cores, as 1 rank x 2 threads or 2 ranks x 1 thread, and this model "
           "as it comes");
    tr_say("speeds are of all ranks together; medians of %lld repetition%s or more",
           (long long)lab->repeats, lab->repeats == 1 ? "" : "s");
}

/* Training comes first: its memory is measured before the kernels' rows leave work memory behind.
 */
static tr_status measure(tr_lab *lab, bool kernels, bool comm, bool train) {
    say_what(lab);
    tr_table_head();
    if (train) {
        TR_TRY(tr_bench_train(lab));
        TR_TRY(tr_bench_schedules(lab));
    }
    if (comm) {
        tr_bench_sum(lab);
        TR_TRY(tr_bench_overlap(lab));
        tr_bench_context(lab);
        tr_bench_exchange(lab);
        TR_TRY(tr_bench_checkpoint(lab));
    }
    if (kernels) {
        tr_bench_attention(lab);
        tr_bench_gemm(lab);
        tr_bench_experts(lab);
    }
    tr_table_foot(&lab->table);
    return TR_OK;
}

/* No targets: the share of the bound speaks for itself. */
static void single_kernels(tr_lab *lab) {
    say_machine(lab);
    tr_bench_rows(lab);
}

tr_status tr_bench(tr_comm *world, const char *what, int nsets, char *const *sets) {
    bool kernels = !what || !strcmp(what, "kernels"), comm = !what || !strcmp(what, "comm");
    bool train = !what || !strcmp(what, "train");
    bool rows = what && !strcmp(what, "rows");
    if (!kernels && !comm && !train && !rows)
        return tr_fail(TR_ERR_USAGE,
                       "bench '%s'? trireme bench kernels, comm, train or rows; no word: the first "
                       "three",
                       what);
    tr_lab lab;
    tr_status status = tr_lab_open(&lab, world, nsets, sets);
    if (status == TR_OK && lab.config->model.num_experts > 0 && (kernels || comm || rows))
        status = tr_fail(TR_ERR_USAGE,
                         "bench%s%s takes a dense model, and makes a layer of experts "
                         "of its size; leave model.num_experts at 0 (bench train "
                         "takes any)",
                         what ? " " : "", what ? what : "");
    if (status == TR_OK && rows)
        single_kernels(&lab);
    else if (status == TR_OK)
        status = measure(&lab, kernels, comm, train);
    tr_table_break(&lab.table);
    tr_lab_close(&lab);
    return status;
}
