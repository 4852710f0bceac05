/* fixture.c - see fixture.h. Floor: tests. */
#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

const tr_tensor_info fx_tensors[] = {
    {"model.embed_tokens.weight", 2, {67, 32}},
    {"model.layers.0.input_layernorm.weight", 1, {32}},
    {"model.layers.0.mlp.experts.gate_proj.weight", 3, {6, 24, 32}},
    {"model.layers.0.mlp.gate.weight", 2, {6, 32}},
    {"model.layers.0.self_attn.q_proj.weight", 2, {33, 35}},
    {"model.odd", 4, {3, 5, 1, 7}},
    {"model.one", 1, {1}},
    {"model.two", 1, {2}},
};
const int64_t fx_ntensors = sizeof fx_tensors / sizeof *fx_tensors;

static void add(fx_part *part, tr_piece piece) {
    if (part->npieces == part->capacity) {
        part->capacity = 2 * part->capacity + 64;
        part->pieces = realloc(part->pieces, (size_t)part->capacity * sizeof *part->pieces);
    }
    part->pieces[part->npieces++] = piece;
    part->elems += piece.count;
}

/* The box cut into runs of random length, each on a random rank. */
static void add_runs(fx_part *part, tr_piece piece, uint64_t seed, int rank, int size) {
    int64_t n = tr_box_elems(&piece.box);
    for (uint64_t k = 0; piece.first < n; k++) {
        uint64_t random = tr_random_u64(seed, (uint64_t)piece.tensor, k);
        int64_t count = 1 + (int64_t)(random % (uint64_t)(n / 3 + 1));
        piece.count = count < n - piece.first ? count : n - piece.first;
        if ((int)((random >> 32) % (uint64_t)size) == rank) add(part, piece);
        piece.first += piece.count;
    }
}

static void add_tensor(fx_part *part, fx_mode mode, uint64_t seed, int rank, int size, int64_t t,
                       const tr_tensor_info *info) {
    tr_piece piece = {.tensor = t, .box.ndim = info->ndim};
    memcpy(piece.box.extent, info->shape, sizeof info->shape);
    int last = info->ndim - 1;
    tr_range range;
    switch (mode) {
    case FX_EVEN:
        range = tr_block_of(tr_box_elems(&piece.box), size, rank);
        piece.first = range.first;
        piece.count = range.count;
        add(part, piece);
        break;
    case FX_LAST:
    case FX_REPLICAS:
        piece.count = tr_box_elems(&piece.box);
        if (mode == FX_REPLICAS || rank == size - 1) add(part, piece);
        break;
    case FX_RANDOM:
        add_runs(part, piece, seed, rank, size);
        break;
    case FX_EXPERTS:
        for (int64_t b = 0; b < 3; b++) {
            range = tr_block_of(info->shape[0], 3, b);
            piece.box.offset[0] = range.first;
            piece.box.extent[0] = range.count;
            piece.first = 0;
            if (range.count > 0) add_runs(part, piece, seed + (uint64_t)b, rank, size);
        }
        break;
    case FX_COLUMNS:
        range = tr_block_of(info->shape[last], size, rank);
        piece.box.offset[last] = range.first;
        piece.box.extent[last] = range.count;
        piece.count = tr_box_elems(&piece.box);
        if (piece.count > 0) add(part, piece);
        break;
    case FX_MODES:
        break;
    }
}

fx_part fx_part_make(fx_mode mode, uint64_t seed, int rank, int size, int64_t ntensors,
                     const tr_tensor_info *tensors) {
    fx_part part = {0};
    for (int64_t t = 0; t < ntensors; t++)
        add_tensor(&part, mode, seed, rank, size, t, &tensors[t]);
    int64_t stride =
        part.elems + part.npieces; /* every third piece does not follow the one before */
    size_t bytes = (size_t)(3 * stride + 1) * sizeof(float);
    part.memory = malloc(bytes);
    memset(part.memory, 0xff, bytes);
    float *at = part.memory;
    for (int64_t p = 0; p < part.npieces; p++) {
        part.pieces[p].master = at;
        part.pieces[p].m = at + stride;
        part.pieces[p].v = at + 2 * stride;
        at += part.pieces[p].count + (p % 3 == 2);
    }
    return part;
}

void fx_part_free(fx_part *part) {
    free(part->pieces);
    free(part->memory);
}

/* The flattened global index of element k of a box. */
static int64_t global_index(const tr_tensor_info *info, const tr_box *box, int64_t k) {
    int64_t index = 0, place[TR_MAX_DIM];
    for (int d = box->ndim - 1; d >= 0; d--) {
        place[d] = box->offset[d] + k % box->extent[d];
        k /= box->extent[d];
    }
    for (int d = 0; d < box->ndim; d++) index = index * info->shape[d] + place[d];
    return index;
}

static int64_t visit(const fx_part *part, int64_t step, int arrays, const tr_tensor_info *tensors,
                     bool fill) {
    int64_t wrong = 0;
    for (int64_t p = 0; p < part->npieces; p++) {
        const tr_piece *piece = &part->pieces[p];
        const tr_tensor_info *info = &tensors[piece->tensor];
        uint64_t stream = tr_stream_of_name(info->name);
        for (int a = 0; a < arrays; a++) {
            float *data = a == 0 ? piece->master : a == 1 ? piece->m : piece->v;
            for (int64_t k = 0; k < piece->count; k++) {
                uint64_t index = (uint64_t)global_index(info, &piece->box, piece->first + k);
                uint32_t bits = (uint32_t)tr_random_u64((uint64_t)(3 * step + a), stream, index);
                if (fill)
                    memcpy(&data[k], &bits, 4);
                else
                    wrong += memcmp(&data[k], &bits, 4) != 0;
            }
        }
    }
    return wrong;
}

void fx_fill(fx_part *part, int64_t step, const tr_tensor_info *tensors) {
    visit(part, step, 3, tensors, true);
}

int64_t fx_wrong(const fx_part *part, int64_t step, int arrays, const tr_tensor_info *tensors) {
    return visit(part, step, arrays, tensors, false);
}

static char config[] = "run:\n  name: fixture\n  seed: 1234\nmodel:\n  hidden_size: 32\n";

tr_progress_state fx_state(int64_t step) {
    return (tr_progress_state){.step = step,
                               .samples = 32 * step,
                               .tokens = 1000000 * step,
                               .updates = step - 1,
                               .skipped_in_row = 1,
                               .data_fingerprint = tr_mix64((uint64_t)step),
                               .config = config};
}

bool fx_state_right(const tr_progress_state *state, int64_t step) {
    tr_progress_state want = fx_state(step);
    return state->step == want.step && state->samples == want.samples &&
           state->tokens == want.tokens && state->updates == want.updates &&
           state->skipped_in_row == want.skipped_in_row &&
           state->data_fingerprint == want.data_fingerprint &&
           strcmp(state->config, want.config) == 0;
}
