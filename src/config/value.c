/* value.c - settings' values as text, both ways. Floor: config.
 * Scalars follow the core schema of YAML 1.2: `yes` is a word, 0o17 and 0x1f are integers, 1_000 is
 * no number. */
#include "config/settings.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *skip_digits(const char *s) {
    while (*s >= '0' && *s <= '9') s++;
    return s;
}

/* [-+]? ( \. [0-9]+ | [0-9]+ ( \. [0-9]* )? ) ( [eE] [-+]? [0-9]+ )? */
static bool looks_real(const char *s) {
    if (*s == '-' || *s == '+') s++;
    const char *digits = s;
    s = skip_digits(s);
    bool some = s != digits;
    if (*s == '.') {
        const char *fraction = ++s;
        s = skip_digits(s);
        some = some || s != fraction;
    }
    if (!some) return false;
    if (*s == 'e' || *s == 'E') {
        s++;
        if (*s == '-' || *s == '+') s++;
        const char *exponent = s;
        s = skip_digits(s);
        if (s == exponent) return false;
    }
    return *s == 0;
}

static bool one_of(const char *text, const char *const *words) {
    for (; *words; words++)
        if (!strcmp(text, *words)) return true;
    return false;
}

tr_number tr_yaml_real(const char *text, double *value_p) {
    static const char *const special[] = {".inf", ".Inf", ".INF", ".nan", ".NaN", ".NAN", NULL};
    const char *unsigned_text = text + (*text == '-' || *text == '+');
    if (one_of(unsigned_text, special)) return TR_NUMBER_HUGE;
    if (!looks_real(text)) return TR_NUMBER_NONE;
    *value_p = strtod(text, NULL);
    return isfinite(*value_p) ? TR_NUMBER_OK : TR_NUMBER_HUGE;
}

tr_number tr_yaml_int(const char *text, int64_t *value_p) {
    const char *digits = text + (*text == '-' || *text == '+');
    int base = 10;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'o')) {
        base = text[1] == 'x' ? 16 : 8;
        digits = text + 2;
    }
    const char *allowed = base == 16  ? "0123456789abcdefABCDEF"
                          : base == 8 ? "01234567"
                                      : "0123456789";
    if (*digits && digits[strspn(digits, allowed)] == 0) {
        errno = 0;
        long long value = strtoll(base == 10 ? text : digits, NULL, base);
        if (errno == ERANGE) return TR_NUMBER_HUGE;
        *value_p = value;
        return TR_NUMBER_OK;
    }
    double real;
    tr_number kind = tr_yaml_real(text, &real);
    if (kind != TR_NUMBER_OK) return kind;
    if (real != floor(real)) return TR_NUMBER_FRACTION;
    if (fabs(real) > 0x1p53) return TR_NUMBER_HUGE;
    *value_p = (int64_t)real;
    return TR_NUMBER_OK;
}

bool tr_yaml_bool(const char *text, bool *value_p) {
    static const char *const yes[] = {"true", "True", "TRUE", NULL};
    static const char *const no[] = {"false", "False", "FALSE", NULL};
    *value_p = one_of(text, yes);
    return *value_p || one_of(text, no);
}

bool tr_yaml_null(const char *text) {
    static const char *const words[] = {"", "~", "null", "Null", "NULL", NULL};
    return one_of(text, words);
}

/* Bytes of the character at s, at most `left`; 0 when it is no UTF-8 or NUL. */
static size_t character_bytes(const unsigned char *s, size_t left) {
    static const uint32_t least[] = {0, 1, 0x80, 0x800, 0x10000};
    size_t n = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    if (n == 0 || n > left) return 0;
    uint32_t code = n == 1 ? s[0] : s[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (s[i] >> 6 != 2) return 0;
        code = code << 6 | (s[i] & 0x3fu);
    }
    bool surrogate = code >= 0xd800 && code < 0xe000;
    return code < least[n] || code > 0x10ffff || surrogate ? 0 : n;
}

int64_t tr_utf8_fault(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        size_t n = character_bytes((const unsigned char *)text + i, bytes - i);
        if (n == 0) return (int64_t)i;
        i += n;
    }
    return -1;
}

void tr_write_real(FILE *to, double value) {
    char text[40];
    if (value == floor(value) && fabs(value) < 1e15) { /* 10000 rather than 1e4 */
        fprintf(to, "%.0f", value);
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    char *e = strchr(text, 'e');
    if (!e) {
        fputs(text, to);
        return;
    }
    fprintf(to, "%.*se%d", (int)(e - text), text, atoi(e + 1)); /* 1e-08 as 1e-8 */
}

/* Whether plain text reads back as this very string, in a block or in a list. */
static bool plain(const char *text) {
    static const char safe[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-";
    double real;
    int64_t integer;
    bool truth;
    if (tr_yaml_null(text) || text[0] == '-' || text[strspn(text, ".")] == 0) return false;
    if (tr_yaml_int(text, &integer) != TR_NUMBER_NONE) return false;
    if (tr_yaml_real(text, &real) != TR_NUMBER_NONE || tr_yaml_bool(text, &truth)) return false;
    return text[strspn(text, safe)] == 0;
}

void tr_write_string(FILE *to, const char *text) {
    if (plain(text)) {
        fputs(text, to);
        return;
    }
    fputc('"', to);
    const unsigned char *s = (const unsigned char *)text;
    for (size_t left = strlen(text), n; left > 0; s += n, left -= n) {
        n = character_bytes(s, left);
        if (n == 0) n = 1;
        bool control = s[0] < 0x20 || s[0] == 0x7f;
        bool c1 = n == 2 && s[0] == 0xc2 && s[1] < 0xa0;
        /* U+2028, U+2029 break lines; U+FEFF, U+FFFE, U+FFFF are no text */
        bool odd = n == 3 && ((s[0] == 0xe2 && s[1] == 0x80 && s[2] >> 1 == 0xa8 >> 1) ||
                              (s[0] == 0xef && s[1] == 0xbb && s[2] == 0xbf) ||
                              (s[0] == 0xef && s[1] == 0xbf && s[2] >= 0xbe));
        if (control) {
            fprintf(to, "\\x%02x", s[0]);
        } else if (c1) {
            fprintf(to, "\\x%02x", s[1]);
        } else if (odd) {
            fprintf(to, "\\u%04x", (unsigned)((s[0] & 15) << 12 | (s[1] & 63) << 6 | (s[2] & 63)));
        } else if (n == 1 && (s[0] == '"' || s[0] == '\\')) {
            fprintf(to, "\\%c", s[0]);
        } else {
            fwrite(s, 1, n, to);
        }
    }
    fputc('"', to);
}
