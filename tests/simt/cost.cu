/* Property: the cost lint finds bank conflicts and half-used sectors at their lines, with the
 * documented numbers, and calls a swizzled twin clean. */
#include "tests/simt/check.h"

/* 64 rows of 64 bf16: a column of eight 16-byte chunks lies in one bank group, unless the chunk is
 * swizzled by its row. */
template <bool SWIZZLED> __global__ void chunks(uint32_t *out) {
    SIMT_DYN_SMEM(bf16, s);
    int i = (int)threadIdx.x;
    for (int k = i; k < 32 * 64; k += 32) s[k] = f32_to_bf16((float)k); /* row of the loop */
    SYNCWARP(0xffffffffu);
    int row = i, chunk = SWIZZLED ? i % 8 : 0;
    uint32_t r[4];
    ldmatrix_x4(r, s + row * 64 + chunk * 8); /* the tile load */
    out[i] = r[0];                            /* whole sectors */
}

__global__ void strides(float *out, const float *in) {
    SIMT_DYN_SMEM(float, s);
    int i = (int)threadIdx.x;
    s[i * 33] = in[i * 2]; /* half-used sectors; stride 33 has no conflict */
    s[i * 32 + 1] = 1;     /* all in one bank */
    SYNCWARP(0xffffffffu);
    out[i] = s[0] + s[i * 33]; /* one word for all */
}

struct rows {
    std::vector<simt_cost_row> row;
    std::vector<std::string> site;
};

static rows collect() {
    rows r;
    simt_each_cost(
        [](const simt_cost_row &row, void *context) {
            rows *to = static_cast<rows *>(context);
            to->row.push_back(row);
            to->site.push_back(row.site);
        },
        &r);
    simt_reset_cost();
    return r;
}

/* The row of an access of that kind; the worst one if several lines have it. */
static simt_cost_row worst(const rows &r, bool shared, const char *kind, int bytes) {
    simt_cost_row found = {"none", kind, shared, bytes, 0, 0, 0};
    for (size_t i = 0; i < r.row.size(); i++) {
        const simt_cost_row &row = r.row[i];
        if (row.shared != shared || row.bytes != bytes || strcmp(row.kind, kind)) continue;
        printf("%s: %s %s of %d bytes: %g, needed %g\n", r.site[i].c_str(),
               shared ? "shared" : "global", kind, bytes, row.parts, row.ideal);
        CHECK(r.site[i].find("tests/simt/cost.cu:") == 0, "site %s", r.site[i].c_str());
        if (row.parts > found.parts) found = row;
    }
    return found;
}

template <bool SWIZZLED> static void check_chunks() {
    uint32_t *out = device_array<uint32_t>(32);
    simt_set_cost(true);
    LAUNCH(chunks<SWIZZLED>, 1, 32, 32 * 128, 0)(out);
    simt_set_cost(false);
    rows r = collect();
    simt_cost_row tile = worst(r, true, "read", 16), store = worst(r, true, "write", 2);
    CHECK(tile.requests == 1 && tile.ideal == 4, "four phases of eight rows");
    CHECK(tile.parts == (SWIZZLED ? 4 : 32), "8-way conflicts or none: %g", tile.parts);
    CHECK(store.requests == 64 && store.parts == 1, "consecutive halves: %g", store.parts);
    simt_cost_row write = worst(r, false, "write", 4);
    CHECK(write.parts == 4 && write.ideal == 4, "32 floats are 4 sectors: %g", write.parts);
    simt_free(out);
}

static void check_strides() {
    float *out = device_array<float>(32), *in = to_device(std::vector<float>(64));
    simt_set_cost(true);
    LAUNCH(strides, 1, 32, 33 * 32 * 4, 0)(out, in);
    simt_set_cost(false);
    rows r = collect();
    simt_cost_row read = worst(r, false, "read", 4), store = worst(r, true, "write", 4);
    simt_cost_row load = worst(r, true, "read", 4);
    CHECK(read.parts == 8 && read.ideal == 4, "every second float: %g sectors", read.parts);
    CHECK(store.parts == 32, "one bank for all lanes: %g", store.parts);
    CHECK(load.parts == 1, "a broadcast and a stride of 33: %g", load.parts);
    simt_free(out);
    simt_free(in);
}

int main() {
    check_chunks<false>();
    check_chunks<true>();
    check_strides();
    CHECK(simt_errors() == 0, "reports of correct kernels");
    return check_result("cost");
}
