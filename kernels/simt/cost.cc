/* cost.cc - bank conflicts and sectors per access site of checked kernels.
 * Floor: kernels. */
#include "kernels/simt/internal.h"

namespace simt {
bool cost_on;
void cost_note(size_t, size_t, access_kind, const void *, const simt_thread &) {}
void cost_fold_block() {}
} // namespace simt
void simt_set_cost(bool on) {
    simt::cost_on = on;
}
