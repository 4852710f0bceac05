/* signals.h - SIGTERM and SIGUSR1 ask for "save and stop". Floor: train. */
#pragma once
#include <stdbool.h>

/* Local. From now on the two signals set a flag instead of ending the process. */
void tr_signals_install(void);
bool tr_signals_stop_asked(void);
