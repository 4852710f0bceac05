/* crc32c.h - the checksum of TensorBoard's records. Floor: observe. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Local. CRC-32C (Castagnoli; RFC 3720 appendix B.4): reflected polynomial 0x82f63b78. */
uint32_t tr_crc32c(const void *data, size_t bytes);

/* Local. A CRC that may itself be covered by a CRC: rotated right by 15, plus a constant. */
uint32_t tr_crc32c_masked(const void *data, size_t bytes);
