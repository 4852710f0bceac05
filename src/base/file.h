/* file.h - files that a user names. Floor: base. */
#pragma once
#include "base/status.h"

/* Local. TR_OK for a regular file, or a link to one; `what` names it in messages ("config file").
 * TR_ERR_MISSING if it is not there; TR_ERR_USAGE for a folder, and for a pipe or device, whose
 * reader might wait for ever; TR_ERR_IO. */
tr_status tr_file_check(const char *path, const char *what);

/* Local. The folder and those above it, where they are missing. TR_ERR_IO naming `setting`, which
 * says where it is to be. */
tr_status tr_file_make_folder(const char *path, const char *setting);
