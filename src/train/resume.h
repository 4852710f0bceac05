/* resume.h - where a run starts: afresh, or from a checkpoint. Floor: train. */
#pragma once
#include "train/job.h"

/* Collective on world. Carries out checkpoint.resume: auto takes the newest complete checkpoint of
 * this run (damaged ones are named and passed over); never moves the old folders to NAME.old-N; a
 * path takes that file and moves this run's later checkpoints to NAME.old-N. Refuses (64) when
 * model or data differ, logs other changes. Leaves the weights ready and job->at at the step to go
 * on from. */
tr_status tr_resume_start(tr_job *job);
