/* planted.h - runs kernels with a planted bug and their correct twins, and checks what is reported.
 *
 * The lines that a report may name bear a comment with the word bug and the cases' names; the
 * test reads them from its own source. */
#pragma once
#include "tests/simt/check.h"

#include <fstream>
#include <set>
#include <sstream>

struct planted_case {
    const char *name;
    const char *kind; /* what the report begins with, after "simt: " */
    void (*broken)();
    void (*correct)(); /* NULL: none */
};

struct planted_reports {
    std::vector<std::string> texts;
};

static void planted_collect(const char *text, void *context) {
    static_cast<planted_reports *>(context)->texts.push_back(text);
}

static std::set<int> planted_lines(const char *file, const std::string &name) {
    std::ifstream source(std::string(SIMT_TEST_ROOT "/") + file);
    std::set<int> lines;
    std::string line;
    for (int number = 1; std::getline(source, line); number++) {
        size_t mark = line.find("/* bug ");
        if (mark == std::string::npos) continue;
        std::istringstream words(line.substr(mark + 7));
        for (std::string word; words >> word;)
            if (word == name) lines.insert(number);
    }
    return lines;
}

/* The numbers after every "file:" of a text. */
static std::set<int> named_lines(const char *file, const std::string &text) {
    std::set<int> lines;
    std::string key = std::string(file) + ":";
    for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1))
        lines.insert(atoi(text.c_str() + at + key.size()));
    return lines;
}

static void check_report(const planted_case &c, const char *file, const planted_reports &got) {
    std::set<int> allowed = planted_lines(file, c.name);
    bool found = false;
    for (const std::string &text : got.texts) {
        if (text.find(std::string("simt: ") + c.kind) != 0) continue;
        found = true;
        std::set<int> lines = named_lines(file, text);
        CHECK(allowed.empty() || !lines.empty(), "%s: no line in: %s", c.name, text.c_str());
        for (int line : lines)
            CHECK(allowed.count(line), "%s: line %d in: %s", c.name, line, text.c_str());
    }
    CHECK(found, "%s: no report of \"%s\", but %zu others%s%s", c.name, c.kind, got.texts.size(),
          got.texts.empty() ? "" : ", the first: ", got.texts.empty() ? "" : got.texts[0].c_str());
    if (found) printf("%-28s found: %s\n", c.name, got.texts[0].c_str());
}

static void run_case(const planted_case &c, const char *file) {
    planted_reports got;
    simt_on_report(planted_collect, &got);
    simt_reset_errors();
    c.broken();
    check_report(c, file, got);
    got.texts.clear();
    simt_reset_errors();
    if (c.correct) c.correct();
    CHECK(got.texts.empty(), "%s: false alarm: %s", c.name, got.texts[0].c_str());
    simt_reset_errors();
    simt_on_report(nullptr, nullptr);
}
