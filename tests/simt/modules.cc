/* Property: the runtime works inside shared libraries that are loaded later, each with a state of
 * its own, and reports name the source lines of their code. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*run_function)(const char **texts_p);

static run_function load(const char *file) {
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) printf("%s\n", dlerror());
    return library ? (run_function)dlsym(library, "module_run") : nullptr;
}

int main(int, char **arguments) {
    run_function fast = load(arguments[1]), check = load(arguments[2]);
    if (!fast || !check) return 1;
    const char *fast_texts = "", *check_texts = "";
    int fast_reports = fast(&fast_texts), check_reports = check(&check_texts);
    printf("fast: %d reports; checked: %d\n%s", fast_reports, check_reports, check_texts);
    if (fast_reports != 0 || check_reports == 0) return 1;
    if (check(&check_texts) <= check_reports || fast(&fast_texts) != 0) return 1;
    bool lines = strstr(check_texts, "here:  tests/simt/module.cu:10") ||
                 strstr(check_texts, "here:  tests/simt/module.cu:9");
    printf("modules: %s\n", lines ? "ok" : "FAILED: no source lines");
    return lines ? 0 : 1;
}
