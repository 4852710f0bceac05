/* alloc.h - tables on the heap. Floor: data. */
#pragma once
#include <stdint.h>

/* Local. `count` zeroed elements, one at least; free() gives them back. Ends the process (exit 70)
 * when memory is out, as the arena does. */
void *tr_data_alloc(int64_t count, uint64_t elem_bytes);
/* Local. Doubles a table when `count` of `*capacity_p` elements are used; moves it as realloc. */
void *tr_data_grow(void *table, int64_t count, int64_t *capacity_p, uint64_t elem_bytes);
char *tr_data_copy_text(const char *text);
