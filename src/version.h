/* version.h - what the program says it is. Floor: main. */
#pragma once

/* "1f54b0a", with "-dirty" where files differed from it: the commit that was built, as git named it
 * then; "" where git knew none. Made by version.cmake. */
extern const char tr_commit[];
