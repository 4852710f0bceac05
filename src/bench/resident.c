/* resident.c - how much memory this process has, from the system's books. Floor: bench. */
#include "bench/lab.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

bool tr_resident_restart(void) {
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, "5", 1) == 1; /* 5: the peak starts from what is there now */
    if (fd >= 0) close(fd);
    return done;
}

/* The line `key: N kB` of a file in /proc/self, in bytes; 0 where there is none. */
static double books(const char *path, const char *key) {
    char line[256];
    long long kib = 0;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), ": %lld", &kib) == 1)
            break;
    if (f) fclose(f);
    return 1024.0 * (double)kib;
}

double tr_resident_now(void) {
    return books("/proc/self/status", "VmRSS");
}

double tr_resident_peak(void) {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? 1024.0 * (double)usage.ru_maxrss : 0;
}

double tr_resident_duplicate(void) {
    const char *path = "/proc/self/smaps_rollup"; /* Pss: a page of n processes counts 1/n */
    double pss = books(path, "Pss");
    return pss > 0 ? books(path, "Rss") - pss : 0;
}
