/* check.h - conditions of the SIMT tests, and the texts that the runtime reported. */
#pragma once
#include "kernels/simt/simt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <vector>

/* Counts and prints a failure; the test goes on. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                 \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            check_failures()++;                                                                    \
        }                                                                                          \
    } while (0)

static inline int &check_failures() {
    static int failures;
    return failures;
}

template <class T> static inline T *device_array(size_t n) {
    return static_cast<T *>(simt_malloc(n * sizeof(T)));
}

template <class T> static inline T *to_device(const std::vector<T> &values) {
    T *device = device_array<T>(values.size());
    simt_h2d(device, values.data(), values.size() * sizeof(T));
    return device;
}

template <class T> static inline std::vector<T> to_host(const T *device, size_t n) {
    std::vector<T> values(n);
    simt_d2h(values.data(), device, n * sizeof(T));
    return values;
}

/* What main returns. */
static inline int check_result(const char *property) {
    printf("%s: %s, %d failures, %d reports\n", property, check_failures() ? "FAILED" : "ok",
           check_failures(), simt_errors());
    return check_failures() ? 1 : 0;
}
