/* scratch.h - work memory of CPU kernels. Floor: kernels, internal. */
#pragma once
#include <stddef.h>

/* Work memory of the calling thread: at least `bytes`, 4 KiB aligned, contents undefined, valid
 * until the thread's next call. Grown when needed and kept, so that steps allocate nothing. Ends
 * the process (exit 70) when memory is out. */
void *tr_scratch(size_t bytes);
/* Gives the calling thread's work memory back. */
void tr_scratch_free(void);
