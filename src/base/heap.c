/* heap.c - tables and texts on the heap. Floor: base. */
#include "base/heap.h"

#include "base/log.h"
#include "base/status.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static void (*end_job)(const char *text); /* nullable; set once */

void tr_out_of_memory_ends(void (*end)(const char *text)) {
    end_job = end;
}

void tr_out_of_memory(const char *format, ...) {
    char text[1024];
    int front = snprintf(text, sizeof text, "out of memory: ");
    va_list args;
    va_start(args, format);
    vsnprintf(text + front, sizeof text - (size_t)front, format, args);
    va_end(args);
    if (end_job) end_job(text);
    tr_print_error(text);
    exit(TR_ERR_INTERNAL);
}

static void *or_end(void *memory, int64_t count, size_t elem_bytes) {
    if (!memory)
        tr_out_of_memory("%.0f bytes wanted for a table or text on this machine; use fewer ranks "
                         "a machine, end what else runs there, or raise its limit (ulimit -v)",
                         (double)count * (double)elem_bytes);
    return memory;
}

static int64_t at_least_one(int64_t count) {
    return count > 0 ? count : 1;
}

void *tr_heap_alloc(int64_t count, size_t elem_bytes) {
    count = at_least_one(count);
    return or_end(calloc((size_t)count, elem_bytes), count, elem_bytes);
}

void *tr_heap_resize(void *table, int64_t count, size_t elem_bytes) {
    count = at_least_one(count);
    return or_end(reallocarray(table, (size_t)count, elem_bytes), count, elem_bytes);
}

void *tr_heap_grow(void *table, int64_t count, int64_t *capacity_p, size_t elem_bytes) {
    if (count < *capacity_p) return table;
    *capacity_p = *capacity_p ? 2 * *capacity_p : 64;
    return tr_heap_resize(table, *capacity_p, elem_bytes);
}

char *tr_heap_copy(const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(tr_heap_alloc((int64_t)bytes, 1), text, bytes);
}

char *tr_heap_vformat(const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (length < 0) or_end(NULL, 1, BUFSIZ); /* it needed memory itself */
    char *text = tr_heap_alloc((int64_t)length + 1, 1);
    vsnprintf(text, (size_t)length + 1, format, args);
    return text;
}

char *tr_heap_format(const char *format, ...) {
    va_list args;
    va_start(args, format);
    char *text = tr_heap_vformat(format, args);
    va_end(args);
    return text;
}

/* open_memstream would lose what it has no memory for, and not tell. */
static ssize_t add_to_text(void *self, const char *from, size_t bytes) {
    tr_heap_text *text = self;
    while (text->capacity < text->bytes + (int64_t)bytes)
        text->text = tr_heap_grow(text->text, text->capacity, &text->capacity, 1);
    memcpy(text->text + text->bytes, from, bytes);
    text->bytes += (int64_t)bytes;
    return (ssize_t)bytes;
}

void tr_heap_text_begin(tr_heap_text *text) {
    *text = (tr_heap_text){0};
    text->to =
        or_end(fopencookie(text, "w", (cookie_io_functions_t){.write = add_to_text}), 1, BUFSIZ);
}

char *tr_heap_text_end(tr_heap_text *text) {
    fclose(text->to);
    add_to_text(text, "", 1); /* the NUL */
    return text->text;
}
