/* alloc.c - tables on the heap. Floor: data. */
#include "data/alloc.h"

#include "base/log.h"
#include "base/status.h"

#include <stdlib.h>
#include <string.h>

static void *or_exit(void *memory) {
    if (!memory) {
        tr_print_error("out of memory for the tables of the data files");
        exit(TR_ERR_INTERNAL);
    }
    return memory;
}

void *tr_data_alloc(int64_t count, uint64_t elem_bytes) {
    return or_exit(calloc(count > 0 ? (size_t)count : 1, elem_bytes));
}

void *tr_data_grow(void *table, int64_t count, int64_t *capacity_p, uint64_t elem_bytes) {
    if (count < *capacity_p) return table;
    *capacity_p = *capacity_p ? 2 * *capacity_p : 64;
    return or_exit(reallocarray(table, (size_t)*capacity_p, elem_bytes));
}

char *tr_data_copy_text(const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(tr_data_alloc((int64_t)bytes, 1), text, bytes);
}
