/* log.h - lines for people, on standard error or standard output. Floor: base.
 * Only rank 0 speaks (tr_log_rank sets who we are); lines are flushed so that they survive a kill.
 */
#pragma once

/* Local. Called once, after MPI tells the rank; before that a process counts as rank 0. */
void tr_log_rank(int rank);
int tr_log_get_rank(void);

/* Local. One line on standard output, from rank 0 only. The newline is added. */
void tr_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Local. "warning: ..." on standard error, from rank 0 only. */
void tr_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Local. "error: ..." on standard error, from whoever calls. */
void tr_print_error(const char *text);
