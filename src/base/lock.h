/* lock.h - one job at a time writes in a folder. Floor: base.
 *
 * A lock is flock's on a file DIRECTORY/.NAME.lock beside the folder DIRECTORY/NAME, so that the
 * folder may be moved away under it. The system frees the locks of a process that ended, however it
 * ended: a file that was left over keeps nobody out. */
#pragma once
#include "base/status.h"

typedef struct tr_lock tr_lock;

/* Local. Adds a lock to those in *locks_p (NULL: none yet); one that is held there already is taken
 * again. Makes DIRECTORY, which `setting` names in messages. Waits a moment for a holder that is
 * being killed, then TR_ERR_USAGE naming its process and host; TR_ERR_IO. */
tr_status tr_lock_take(tr_lock **locks_p, const char *directory, const char *setting,
                       const char *name);
/* Local. Gives all back and removes their files, and directories made for them that are still
 * empty. NULL-safe. */
void tr_lock_release(tr_lock *locks);
