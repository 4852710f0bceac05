/* ends.h - tests that jump out of calls which end a program. What such a call had on the host
 * nobody gives back, so the leak sanitizer leaves out what is allocated in them, and in them alone.
 */
#pragma once
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

static inline int ends_begin(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    __lsan_disable();
#endif
    return 0;
}

static inline int ends_end(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    __lsan_enable();
#endif
    return 0;
}

/* As cmocka_unit_test; include after cmocka.h. */
#define ENDING_TEST(function) cmocka_unit_test_setup_teardown(function, ends_begin, ends_end)
