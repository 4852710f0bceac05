/* signals.c - the flag that a signal sets. Floor: train. */
#include "train/signals.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t stop_asked;

static void ask_stop(int signal_number) {
    (void)signal_number;
    stop_asked = 1;
}

void tr_signals_install(void) {
    struct sigaction action = {.sa_handler = ask_stop, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

bool tr_signals_stop_asked(void) {
    return stop_asked != 0;
}
