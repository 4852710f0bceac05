/* dataset.h - token files and the order in which samples are read. Floor: data.
 *
 * A file is one long stream of tokens; sample i of a file covers tokens [i*S, i*S + S], S + 1 of
 * them (S inputs and, shifted by one, S labels), so a file of n tokens has (n-1)/S samples. Without
 * weights the samples of all files form one set and each epoch visits each exactly once in an order
 * that is a seeded permutation evaluated by index (a Feistel network with cycle walking: nothing is
 * stored), a new one each epoch. With weights, files are drawn in fixed proportion, each in its own
 * epochs. The position of a run is the number of samples consumed: nothing else has to be saved. */
#pragma once
#include "base/status.h"
#include "config/config.h"

typedef struct tr_dataset tr_dataset;

typedef struct {
    const tr_data_list *files; /* borrowed during open */
    bool synthetic;            /* no files: samples are drawn (synthetic.h) */
    int64_t sequence_length;
    int64_t vocab_size;
    int64_t pad_id; /* -1 none */
    bool mask;      /* FILE.mask beside each file */
    bool documents; /* tr_dataset_documents will be asked: each file has to say where they are */
    int64_t end_of_document; /* the token that ends one; -1: Megatron's index says */
    bool shuffle;            /* false: file order (validation) */
    uint64_t seed;
} tr_dataset_options;

/* Local. Maps the files and checks their headers. TR_ERR_MISSING, TR_ERR_IO, TR_ERR_DATA naming
 * file and fault (unknown header, wrong size, fewer than S + 1 tokens, ...), or TR_ERR_USAGE (no
 * file, vocab_size below 256 for bytes, weights that cannot be). Contents are not read: a token
 * outside the vocabulary is found by tr_dataset_sample. A file cut after this point ends the
 * process. */
tr_status tr_dataset_open(const tr_dataset_options *options, tr_dataset **dataset_p);
void tr_dataset_close(tr_dataset *dataset); /* NULL-safe */

/* Samples of all files together (an epoch, without weights), and their tokens. */
int64_t tr_dataset_samples(const tr_dataset *dataset);
int64_t tr_dataset_tokens(const tr_dataset *dataset);
/* Depends on the files' order, sizes, contents (above 64 MiB a sample of them), masks and weights,
 * not on their names: a moved file is the same data. */
uint64_t tr_dataset_fingerprint(const tr_dataset *dataset);

/* Local. The sample at `position` >= 0 of the endless order. input[S], label[S] (-1: not predicted:
 * pads, masked), valid[S] (0: pad). *id_p (nullable) gets the sample's number in the set (files in
 * order). TR_ERR_DATA naming file, token, position and vocabulary when a token is too large. */
tr_status tr_dataset_sample(const tr_dataset *dataset, int64_t position, int32_t *input,
                            int32_t *label, uint8_t *valid, int64_t *id_p);

/* Local, with options.documents. The sample at `position`, whose input is given, holds documents
 * one after the other, the first and the last perhaps only in part: token i is in the one that
 * begins at begin[i]. The token that ends a document is its last. */
void tr_dataset_documents(const tr_dataset *dataset, int64_t position,
                          const int32_t *input /* [S] */, int32_t *begin /* [S] */);

/* Local. The number in the set of the sample at `position`, without reading it. */
int64_t tr_dataset_id(const tr_dataset *dataset, int64_t position);
