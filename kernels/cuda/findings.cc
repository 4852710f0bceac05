/* findings.cc - what the host runtime has found in kernels, for the device layer, which is C.
 * Floor: kernels, in the modules without a GPU. */
#include "kernels/simt/runtime.h"

extern "C" int64_t tr_simt_findings(void) {
    return simt_errors();
}
