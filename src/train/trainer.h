/* trainer.h - the training loop. Floor: train. */
#pragma once
#include "train/job.h"

/* Collective on world. Steps from job->at.step to training.steps: next samples, schedule,
 * gradients, clip, AdamW, metrics, evaluation, checkpoints. TR_STOPPED after a signal and its save;
 * TR_ERR_INTERNAL when too many steps in a row were not finite. */
tr_status tr_train(tr_job *job);
