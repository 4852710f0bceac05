/* stepper.h - training steps on random tokens. Floor: bench. */
#pragma once
#include "bench/lab.h"

/* A job and what its steps work on. */
typedef struct {
    tr_lab *lab;
    tr_comm *comm;
    tr_config *config;
    tr_job *job;
    int64_t T, updates;
    int32_t *token, *label; /* one micro-batch */
    uint8_t *valid;
    double norm; /* of the last step's gradient */
} tr_stepper;

/* Collective on comm. See tr_lab_job. To be closed even when it fails. */
tr_status tr_stepper_open(tr_stepper *stepper, tr_lab *lab, tr_comm *comm, tr_dtype t,
                          int64_t batch, const char *const *sets);
void tr_stepper_close(tr_stepper *stepper); /* Collective on its comm */
/* Local. Sequences are T long from now on, at most the lab's. */
tr_status tr_stepper_shape(tr_stepper *stepper, int64_t T);

/* Collective on its comm; for tr_lab_time. Forward, backward and reduction of one step. */
void tr_stepper_gradients(void *stepper);
/* The whole step: what the trainer does between reading samples and writing metrics. */
void tr_stepper_step(void *stepper);
