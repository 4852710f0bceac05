/* heap.h - tables and texts on the heap, and the end of a job that is out of memory. Floor: base.
 *
 * Shapes: `count` elements of `elem_bytes` each, both >= 0. What is returned is never NULL and goes
 * back with free(). All calls are local, from any thread.
 * Errors: none comes back. Where memory is out the job ends with exit code 70 and a text that says
 * how many bytes were wanted and what helps. For what must go on without memory, or must agree with
 * other ranks first, there is malloc. */
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

/* `count` zeroed elements, one at least. */
void *tr_heap_alloc(int64_t count, size_t elem_bytes);
/* Makes them `count`, one at least; moves them as realloc does. New ones are undefined. NULL: makes
 * the table. */
void *tr_heap_resize(void *table, int64_t count, size_t elem_bytes);
/* Room for element `count`, behind those there are: where all `*capacity_p` are used, doubles them.
 * Of a NULL table the capacity is 0. */
void *tr_heap_grow(void *table, int64_t count, int64_t *capacity_p, size_t elem_bytes);
char *tr_heap_copy(const char *text);
char *tr_heap_format(const char *format, ...) __attribute__((format(printf, 1, 2)));
char *tr_heap_vformat(const char *format, va_list args) __attribute__((format(printf, 1, 0)));

/* A text that is written as a file: begin, write to `to`, end. Stays where it is meanwhile. */
typedef struct {
    FILE *to;
    /* state */
    char *text;
    int64_t bytes, capacity;
} tr_heap_text;

void tr_heap_text_begin(tr_heap_text *text);
char *tr_heap_text_end(tr_heap_text *text);

/* Ends the job with this text: for whoever takes memory elsewhere and gets none. */
void tr_out_of_memory(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* How a job ends when memory is out, called with the text; does not return. Set once, at the start;
 * until then the text is printed and this process ends with code 70. */
void tr_out_of_memory_ends(void (*end)(const char *text));
