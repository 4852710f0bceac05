/* allocate.c - memory for a group's collectives, where the device has it. Floor: dist. */
#include "base/device.h"
#include "dist/comm.h"

void *tr_comm_alloc_on(tr_comm *comm, tr_device *device, int64_t bytes) {
    if (device->host_memory) return tr_comm_alloc(comm, bytes);
    size_t size = (size_t)tr_comm_memory_bytes(bytes);
    void *memory = tr_allocator_take(&device->allocator, size, "weights or gradients");
    if (!memory) tr_abort("%s", tr_error_message());
    device->zero(device->stream, memory, size);
    return memory;
}

void tr_comm_free_on(tr_comm *comm, tr_device *device, void *memory, int64_t bytes) {
    if (device->host_memory)
        tr_comm_free_memory(comm, memory);
    else
        tr_allocator_give(&device->allocator, memory, (size_t)tr_comm_memory_bytes(bytes));
}
