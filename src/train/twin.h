/* twin.h - a small config that takes the same path through the program as a large one. Floor:
 * train.
 */
#pragma once
#include "config/config.h"

/* Local, the same on every rank. A float32 job on the same grid with the same schedule and kinds of
 * layers, but fewer and narrower ones, few and short sequences, and no files. Kept are: the ratio
 * of query to key and value heads, every setting of experts but their widths, which kinds of layer
 * follow each other in a stage, uneven stages, the number of micro-batches (up to about 32),
 * recomputation, tied embeddings. A number shrinks to the first of a list of small ones with which
 * the program still accepts the config, so what divides what is nowhere said twice.
 * `config` must have passed tr_config_check_world. */
tr_status tr_twin_create(const tr_config *config, int world, tr_config **twin_p);
