/* module.h - devices that shared objects bring, so that the program starts without their libraries.
 * Floor: kernels, internal.
 *
 * A module exports one function. It has no copy of the program's state: what fails while it opens
 * comes back as a text with a status, what fails later goes to wish->fatal. */
#pragma once
#include "kernels/kernels.h"

#include <module_interface.h> /* made by the build: TR_MODULE_INTERFACE, a sum of the headers */

#ifdef __cplusplus
extern "C" {
#endif

/* What the two sides must agree on: sizes of structs, and the headers that they were built with. */
typedef struct {
    size_t device_bytes, kernels_bytes, wish_bytes;
    int64_t interface;
} tr_module_layout;

static const tr_module_layout tr_module_layout_here = {sizeof(tr_device), sizeof(tr_kernels),
                                                       sizeof(tr_device_wish), TR_MODULE_INTERFACE};

typedef struct {
    tr_module_layout layout; /* the program's */
    const tr_device_wish *wish;
    char *text; /* the message, when NULL is returned */
    size_t text_bytes;
    tr_status status;
} tr_module_call;

/* NULL with text and status. `call` is not needed afterwards. */
__attribute__((visibility("default"))) tr_device *tr_module_open(tr_module_call *call);

/* Local. A device by a module's name ("cuda", "simt", "simt-check"); as tr_device_open. */
tr_device *tr_module_device(const tr_device_wish *wish);

#ifdef __cplusplus
}
#endif
