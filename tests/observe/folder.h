/* folder.h - a throw-away folder and whole-file reads for the tests of observe. Floor: test. */
#pragma once
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[4096];

static inline const char *in_folder(const char *name) {
    static char path[2 * sizeof folder];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static inline int make_folder(void **state) {
    (void)state;
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/trireme-observe-XXXXXX", parent ? parent : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

/* The files of the folder; it has no folders in it. */
static inline int remove_folder(void **state) {
    (void)state;
    DIR *dir = opendir(folder);
    if (!dir) return -1;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.') unlink(in_folder(entry->d_name));
    closedir(dir);
    return rmdir(folder);
}

/* The bytes of a file and a NUL. Caller frees. */
static inline char *read_all(const char *path, size_t *bytes_p) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    char *text = NULL;
    size_t bytes = 0, room = 0, more = 1;
    while (more > 0) {
        text = realloc(text, room = 2 * room + 4096);
        more = fread(text + bytes, 1, room - bytes - 1, file);
        bytes += more;
    }
    fclose(file);
    text[bytes] = 0;
    if (bytes_p) *bytes_p = bytes;
    return text;
}

static inline void write_all(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    fputs(text, file);
    fclose(file);
}
