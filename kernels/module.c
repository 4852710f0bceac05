/* module.c - finds and loads the shared object of a device. Floor: kernels. */
#include "kernels/module.h"

#include "kernels/kernels.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    const char *device, *file, *preset; /* which preset builds it */
    const char *driver;                 /* the library without which it is of no use; nullable */
} module;

static const module modules[] = {
    {"cuda", "libtrireme_cuda.so", "cuda", "libcuda.so.1"},
    {"simt", "libtrireme_simt.so", "release", NULL},
    {"simt-check", "libtrireme_simt_check.so", "release", NULL},
};

/* Where TRIREME_MODULE_DIR says, or beside the program, or (for tests) beside its folder. */
static void place_of(const module *m, char *path, size_t bytes) {
    const char *directory = getenv("TRIREME_MODULE_DIR");
    if (directory && *directory) {
        snprintf(path, bytes, "%s/%s", directory, m->file);
        return;
    }
    char program[4000] = ".";
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length > 0) program[length] = '\0';
    char *slash = strrchr(program, '/');
    if (slash) *slash = '\0';
    snprintf(path, bytes, "%s/../%s", program, m->file);
    if (access(path, F_OK) != 0) snprintf(path, bytes, "%s/%s", program, m->file);
}

/* False: the file was cut off (a full disk, a copy that stopped), which dlopen only notices by a
 * SIGBUS when it reads what is not there. Other damage is left to dlopen. */
static bool is_whole(const char *path) {
    Elf64_Ehdr header;
    FILE *file = fopen(path, "rb");
    if (!file) return true;
    bool whole = true;
    if (fread(&header, sizeof header, 1, file) == 1 &&
        memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && fseek(file, 0, SEEK_END) == 0)
        whole = (uint64_t)ftell(file) >=
                header.e_shoff + (uint64_t)header.e_shnum * header.e_shentsize; /* comes last */
    fclose(file);
    return whole;
}

static bool has_driver(const module *m) {
    void *library = m->driver ? dlopen(m->driver, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library) dlclose(library);
    return library || !m->driver;
}

static tr_device *refuse(const module *m, const char *path) {
    if (access(path, F_OK) == 0) {
        tr_fail(TR_ERR_USAGE, "run.device %s: %s cannot be loaded: %s", m->device, path, dlerror());
        return NULL;
    }
    tr_fail(TR_ERR_USAGE,
            "run.device %s needs %s, which is not there; `cmake --preset %s && cmake --build "
            "--preset %s` builds it with a program beside it, or set TRIREME_MODULE_DIR to its "
            "folder",
            m->device, path, m->preset, m->preset);
    if (!has_driver(m))
        tr_context(TR_ERR_USAGE, "there is no driver for %s on this machine (%s is not found)",
                   m->device, m->driver);
    return NULL;
}

static tr_device *open_in(const module *m, const char *path, void *library,
                          const tr_device_wish *wish) {
    tr_device *(*open_device)(tr_module_call *);
    void *symbol = dlsym(library, "tr_module_open");
    if (!symbol) return refuse(m, path);
    memcpy(&open_device, &symbol, sizeof symbol);
    char text[2048] = "";
    tr_module_call call = {.layout = tr_module_layout_here,
                           .wish = wish,
                           .text = text,
                           .text_bytes = sizeof text,
                           .status = TR_ERR_INTERNAL};
    tr_device *device = open_device(&call);
    if (!device) tr_fail(call.status, "run.device %s: %s", m->device, text);
    return device;
}

tr_device *tr_module_device(const tr_device_wish *wish) {
    char path[4096];
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        const module *m = &modules[i];
        if (strcmp(wish->name, m->device) != 0) continue;
        place_of(m, path, sizeof path);
        if (!is_whole(path)) {
            tr_fail(TR_ERR_USAGE, "run.device %s: %s is cut off; build it or copy it again",
                    m->device, path);
            return NULL;
        }
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* kept: its code serves the device */
        return library ? open_in(m, path, library, wish) : refuse(m, path);
    }
    tr_fail(TR_ERR_USAGE, "device '%s' is not known; use cpu, cuda, simt or simt-check",
            wish->name);
    return NULL;
}
