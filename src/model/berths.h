/* berths.h - memory for a few stretches (param.h) at a time, of weights or of gradients. Floor:
 * model.
 *
 * Who gets which berth depends on the order of requests alone, never on time, so that all ranks of
 * a group, which make the same requests, choose the same place: they work in each other's memory.
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t offset, elems;
    /* state */
    int64_t holds; /* a stretch, -1: nothing */
    int users;     /* it stays while there are any */
    bool moving;   /* a transfer into or out of it has begun and is not ended */
    int64_t since; /* when it was last used: later is larger */
} tr_berth;

typedef struct {
    tr_berth *berth; /* those of layers, then one for what is larger than any layer */
    int count;
    int64_t elems; /* of all */
    int64_t now;
} tr_berths;

/* Local. `few` berths for the largest of the layers (or fewer, if there are fewer), and one for the
 * largest of the others if no layer is as large. */
void tr_berths_plan(tr_berths *berths, int few, int64_t layers, int64_t layer_elems,
                    int64_t other_elems);
void tr_berths_free(tr_berths *berths);

/* Local. A berth for so many elements, its number: an empty one, or the one least recently used of
 * those without users, for the caller to empty (with `patient`, also one in motion, but rather
 * not); -1: none. */
int tr_berths_find(const tr_berths *berths, int64_t elems, bool patient);
/* Local. The berth holds the stretch from now on. */
void tr_berths_fill(tr_berths *berths, int i, int64_t stretch);
/* Local. It is used now. */
void tr_berths_touch(tr_berths *berths, int i);
/* Local. It holds nothing and nobody uses it. */
void tr_berths_empty(tr_berths *berths, int i);
