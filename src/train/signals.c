/* signals.c - the flag that a signal sets. Floor: train.
 *
 * oneDNN's generated kernels move the stack pointer into a buffer of their own on the heap, and a
 * handler's frame put there writes over its neighbours. So the threads that compute block the two
 * signals: one that comes waits until it is asked for, or another thread (MPI has some) runs the
 * handler. */
#include "train/signals.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t stop_asked;

static void ask_stop(int signal_number) {
    (void)signal_number;
    stop_asked = 1;
}

void tr_signals_install(void) {
    sigset_t both;
    struct sigaction action = {.sa_handler = ask_stop, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &both, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

bool tr_signals_stop_asked(void) {
    sigset_t waiting;
    if (sigpending(&waiting) == 0)
        stop_asked |= sigismember(&waiting, SIGTERM) == 1 || sigismember(&waiting, SIGUSR1) == 1;
    return stop_asked;
}
