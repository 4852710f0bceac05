/* print.h - numbers and paths for people. Floor: data. */
#pragma once
#include <stdint.h>

enum { TR_PATH_COLUMNS = 40, TR_COUNT_CHARS = 32 };

/* Local. 1234567 as "1,234,567". */
void tr_print_count(int64_t n, char *text /* [TR_COUNT_CHARS] */);

/* Local. The path, or its end after "..." when it is longer than TR_PATH_COLUMNS. */
void tr_print_path(const char *path, char *text /* [TR_PATH_COLUMNS + 1] */);
