/* report.cc - what a check found, in words, with the source lines.
 * Floor: kernels. */
#include "kernels/simt/internal.h"

#include <dlfcn.h>
#include <elf.h>
#include <set>
#include <stdarg.h>

namespace simt {

namespace {

struct {
    int errors;
    std::set<std::string> seen;
    void (*sink)(const char *text, void *context);
    void *context;
} reports;

std::string formatted(const char *format, va_list arguments) {
    va_list again;
    va_copy(again, arguments);
    std::string text((size_t)vsnprintf(nullptr, 0, format, again) + 1, '\0');
    va_end(again);
    vsnprintf(&text[0], text.size(), format, arguments);
    text.pop_back();
    return text;
}

/* The address that the object's debug information knows this one by. */
uintptr_t address_in_object(uintptr_t address, const Dl_info &object) {
    const Elf64_Ehdr *header = static_cast<const Elf64_Ehdr *>(object.dli_fbase);
    return header->e_type == ET_DYN ? address - (uintptr_t)object.dli_fbase : address;
}

/* Without the directory of the sources. */
std::string shortened(const std::string &file) {
    static const std::string root = SIMT_SOURCE_ROOT "/";
    return file.compare(0, root.size(), root) == 0 ? file.substr(root.size()) : file;
}

bool is_ours(const std::string &line) {
    return line.find("kernels/simt/simt_") != std::string::npos ||
           line.find("/include/c++/") != std::string::npos;
}

/* The same text for other threads and lanes; lines of sources ("file:12") stay. */
std::string without_numbers(const std::string &text) {
    std::string kept;
    bool line = false;
    for (char c : text) {
        bool digit = c >= '0' && c <= '9';
        if (!digit || line) kept += c;
        line = c == ':' || (line && digit);
    }
    return kept;
}

} // namespace

std::string where(const void *pc) {
    Dl_info object;
    if (!pc || !dladdr(pc, &object)) return "unknown";
    uintptr_t call = (uintptr_t)pc - 1; /* a return address belongs to the call before it */
    char command[1024], line[1024];
    snprintf(command, sizeof command, "addr2line -Cie '%s' %#zx 2>/dev/null", object.dli_fname,
             address_in_object(call, object));
    std::string found;
    FILE *pipe = popen(command, "r");
    while (pipe && found.empty() && fgets(line, sizeof line, pipe)) {
        std::string text(line, strcspn(line, " \n")); /* without " (discriminator 2)" */
        if (!is_ours(text) && text.find('?') == std::string::npos) found = shortened(text);
    }
    if (pipe) pclose(pipe);
    if (!found.empty()) return found;
    snprintf(line, sizeof line, "%s+%#zx", object.dli_fname, address_in_object(call, object));
    return line;
}

void report(const char *kind, const void *pc, const void *other, const char *format, ...) {
    pause nobody;
    va_list arguments;
    va_start(arguments, format);
    std::string text = formatted(format, arguments);
    va_end(arguments);
    reports.errors++;
    char key[64];
    snprintf(key, sizeof key, " %p %p", pc, other);
    if (!reports.seen.insert(kind + (pc ? "" : without_numbers(text)) + key).second) return;
    std::string head = std::string("simt: ") + kind;
    if (now.name) {
        char place[96];
        snprintf(place, sizeof place, ", block (%u, %u, %u)", simt_block_index.x,
                 simt_block_index.y, simt_block_index.z);
        head += std::string(" in kernel ") + now.name + place;
    }
    text = head + ": " + text;
    if (pc) text += "\n    here:  " + where(pc);
    if (other) text += "\n    other: " + where(other);
    if (reports.sink)
        reports.sink(text.c_str(), reports.context);
    else
        fprintf(stderr, "%s\n", text.c_str());
}

} // namespace simt

using simt::reports;

int simt_errors() {
    return reports.errors;
}

void simt_reset_errors() {
    reports.errors = 0;
    reports.seen.clear();
}

void simt_on_report(void (*sink)(const char *text, void *context), void *context) {
    reports.sink = sink;
    reports.context = context;
}
