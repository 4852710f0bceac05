/* crc32c.c - bit by bit: a record of scalars has about 300 bytes, once a step. Floor: observe. */
#include "observe/crc32c.h"

uint32_t tr_crc32c(const void *data, size_t bytes) {
    const uint8_t *byte = data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= byte[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

uint32_t tr_crc32c_masked(const void *data, size_t bytes) {
    uint32_t crc = tr_crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}
