/* fail_alloc.c - makes one allocation of trireme fail; for LD_PRELOAD.
 *
 * Counted from 1 are the calls of malloc and its kin whose return address lies in the program
 * itself: its libraries get all they ask for. FAIL_ALLOC_AT=N says which of them fails, once;
 * FAIL_ALLOC_RANK=R on which rank of an mpirun (else on all); into the file FAIL_ALLOC_COUNT goes
 * how many there were, if the process comes to its end. Other programs are left alone. */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* glibc's own, which need no look-up: that would allocate. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);

static struct {
    uintptr_t first, end; /* addresses of the program's code and data; 0, 0: left alone */
    long long at;         /* 0: none */
    const char *count_file;
} plan;
static atomic_llong calls;

static int find_program(struct dl_phdr_info *info, size_t bytes, void *self) {
    (void)bytes;
    (void)self;
    plan.first = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD) continue;
        uintptr_t first = info->dlpi_addr + part->p_vaddr, end = first + part->p_memsz;
        if (first < plan.first) plan.first = first;
        if (end > plan.end) plan.end = end;
    }
    return 1; /* the first object is the program */
}

__attribute__((constructor)) static void begin(void) {
    if (strcmp(program_invocation_short_name, "trireme") != 0) return;
    const char *at = getenv("FAIL_ALLOC_AT"), *on = getenv("FAIL_ALLOC_RANK");
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (on && (!rank || strcmp(on, rank) != 0)) return;
    plan.at = at ? atoll(at) : 0;
    plan.count_file = getenv("FAIL_ALLOC_COUNT");
    dl_iterate_phdr(find_program, NULL);
}

__attribute__((destructor)) static void end(void) {
    FILE *file = plan.end && plan.count_file ? fopen(plan.count_file, "w") : NULL;
    if (!file) return;
    fprintf(file, "%lld\n", (long long)calls);
    fclose(file);
}

static bool fails(const void *caller) {
    uintptr_t from = (uintptr_t)caller;
    if (from < plan.first || from >= plan.end || ++calls != plan.at) return false;
    errno = ENOMEM;
    return true;
}
#define FAILS() fails(__builtin_return_address(0))

void *malloc(size_t bytes) {
    return FAILS() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    return FAILS() ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) {
    return FAILS() ? NULL : __libc_realloc(old, bytes);
}

void *reallocarray(void *old, size_t count, size_t bytes) {
    size_t all;
    if (FAILS() || __builtin_mul_overflow(count, bytes, &all)) return NULL;
    return __libc_realloc(old, all);
}

char *strndup(const char *text, size_t most) {
    size_t length = strnlen(text, most);
    char *copy = FAILS() ? NULL : __libc_malloc(length + 1);
    if (!copy) return NULL;
    copy[length] = 0;
    return memcpy(copy, text, length);
}

char *strdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = FAILS() ? NULL : __libc_malloc(bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

static int print(char **text_p, const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    *text_p = __libc_malloc((size_t)length + 1);
    return *text_p ? vsnprintf(*text_p, (size_t)length + 1, format, args) : -1;
}

int vasprintf(char **text_p, const char *format, va_list args) {
    return FAILS() ? -1 : print(text_p, format, args);
}

int asprintf(char **text_p, const char *format, ...) {
    if (FAILS()) return -1;
    va_list args;
    va_start(args, format);
    int length = print(text_p, format, args);
    va_end(args);
    return length;
}

FILE *fopencookie(void *self, const char *mode, cookie_io_functions_t functions) {
    if (FAILS()) return NULL;
    FILE *(*next)(void *, const char *, cookie_io_functions_t);
    *(void **)&next = dlsym(RTLD_NEXT, "fopencookie");
    return next(self, mode, functions);
}

ssize_t getline(char **line_p, size_t *room_p, FILE *in) {
    return FAILS() ? -1 : getdelim(line_p, room_p, '\n', in);
}
