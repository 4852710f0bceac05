/* A shared library with a kernel that races, for modules.cc. */
#include "kernels/simt/simt.h"

#include <string>

__global__ void race(int *out) {
    SIMT_SHARED(int, s, 64);
    int i = (int)threadIdx.x;
    s[i] = i;           /* bug */
    out[i] = s[63 - i]; /* bug */
}

static void collect(const char *text, void *context) {
    *static_cast<std::string *>(context) += std::string(text) + "\n";
}

/* Runs the kernel; returns the number of reports so far and their texts. */
extern "C" __attribute__((visibility("default"))) int module_run(const char **texts_p) {
    static std::string texts;
    simt_on_report(collect, &texts);
    int *out = static_cast<int *>(simt_malloc(64 * sizeof(int)));
    LAUNCH(race, 1, 64, 0, 0)(out);
    simt_free(out);
    *texts_p = texts.c_str();
    return simt_errors();
}
