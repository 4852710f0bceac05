/* arena.h - memory that is taken in order and given back all at once. Floor: base.
 *
 * An arena is a list of chunks from an allocator (a device's, or the host's). Allocation bumps a
 * pointer; release goes back to a mark and keeps the chunks, so a training step allocates nothing
 * from the system once the largest step has been seen. An arena without allocator only counts:
 * planning memory and allocating it run the same code (pointers are then NULL). */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *(*alloc)(void *self, size_t bytes); /* NULL when there is no memory */
    void (*free)(void *self, void *memory, size_t bytes);
    void *self;
    /* nullable: says in `text` where the memory would be and how much is left there */
    void (*explain)(void *self, char *text, size_t text_bytes);
} tr_allocator;

/* Local. Memory of `allocator` for `what` ("optimizer state"); NULL with a message
 * (tr_error_message) that says how much was wanted for what, and how much is left where. */
void *tr_allocator_take(const tr_allocator *allocator, size_t bytes, const char *what);
/* Local. ", 5 of 80 MiB are free on ...", or "" where the allocator cannot say. */
void tr_allocator_explain(const tr_allocator *allocator, char *text, size_t text_bytes);
void tr_allocator_give(const tr_allocator *allocator, void *memory, size_t bytes); /* NULL-safe */
/* Local. Whether so much could be had now, in one piece. */
bool tr_allocator_has(const tr_allocator *allocator, size_t bytes);

/* Host memory, 4 KiB aligned, huge pages advised for large blocks. */
const tr_allocator *tr_host_allocator(void);

typedef struct tr_arena tr_arena;
typedef struct {
    int64_t chunk;
    size_t used, total;
} tr_arena_mark;

/* Local. `allocator` borrowed; NULL makes a counting arena. */
tr_arena *tr_arena_create(const tr_allocator *allocator, size_t chunk_bytes);
void tr_arena_destroy(tr_arena *arena); /* NULL-safe */
/* Local, while nothing of it is in use. Holds so many bytes from now on; false: there is no memory
 * for them. */
bool tr_arena_reserve(tr_arena *arena, size_t bytes);

/* Local. 64-byte aligned, contents undefined. 0 bytes gives a valid pointer. When
 * memory is out the job ends (tr_out_of_memory). */
void *tr_arena_alloc(tr_arena *arena, size_t bytes);
tr_arena_mark tr_arena_get_mark(const tr_arena *arena);
void tr_arena_release(tr_arena *arena, tr_arena_mark mark);
void tr_arena_reset(tr_arena *arena);

/* Bytes in use now, the most ever in use, and what is held from the allocator. */
size_t tr_arena_used_bytes(const tr_arena *arena);
size_t tr_arena_peak_bytes(const tr_arena *arena);
size_t tr_arena_held_bytes(const tr_arena *arena);
