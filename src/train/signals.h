/* signals.h - SIGTERM and SIGUSR1 ask for "save and stop". Floor: train. */
#pragma once
#include <stdbool.h>

/* Local, first thing in the process, before there are threads: they inherit what is set here. From
 * now on the two signals no longer end the process but wait for the question below. */
void tr_signals_install(void);
/* Local. Whether one has come to this process. */
bool tr_signals_stop_asked(void);
