/* fake_nccl.h - an NCCL that only writes down what is asked of it, in fake_runtime.h's log, and
 * fails on request (fake_fail with an ncclResult_t). Floor: tests. */
#pragma once
#include <nccl.h>

void fake_nccl_reset(void);
/* Every call on a communicator goes on for so many questions. */
void fake_nccl_polls(int polls);
/* What all communicators answer when they are asked, once nothing goes on. */
void fake_nccl_state(ncclResult_t state);
int fake_nccl_alive(void);  /* communicators made and neither destroyed nor aborted */
int fake_nccl_groups(void); /* started and not ended; -1: more ended */
