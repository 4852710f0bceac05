/* on_device.h - the cases of comm.c on device memory. Between its including file and comm.h: every
 * operation on host memory becomes one on a late device's memory. What the caller has in its buffer
 * at the begin reaches the device late, on one of a few streams; tr_end orders copies back behind
 * the operation and what was sent is overwritten, on that stream too. So missing order shows as
 * wrong results. */
#pragma once
#include "dist/comm.h"

/* Local; collective on the world, nothing is in flight. With or without a fabric over MPI. */
void on_device_start(bool fabric, int rank);
void on_device_stop(tr_comm *world);
bool on_device_has_fabric(void);

tr_request *on_device_send(tr_comm *comm, tr_stream *none, int peer, int tag, const void *buffer,
                           int64_t bytes);
tr_request *on_device_recv(tr_comm *comm, tr_stream *none, int peer, int tag, void *buffer,
                           int64_t bytes);
tr_request *on_device_broadcast(tr_comm *comm, tr_stream *none, int root, void *buffer,
                                int64_t bytes);
tr_request *on_device_all_reduce(tr_comm *comm, tr_stream *none, tr_op op, tr_dtype t, void *buffer,
                                 int64_t n);
tr_request *on_device_reduce_scatter(tr_comm *comm, tr_stream *none, tr_dtype t, void *buffer,
                                     int64_t n);
tr_request *on_device_all_gather(tr_comm *comm, tr_stream *none, tr_dtype t, void *buffer,
                                 int64_t n);
tr_request *on_device_all_to_all(tr_comm *comm, tr_stream *none, const void *send,
                                 const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                 int64_t row_bytes);
void on_device_end(tr_request *request);

#ifdef TR_TEST_ON_DEVICE
#define tr_send_begin           on_device_send
#define tr_recv_begin           on_device_recv
#define tr_broadcast_begin      on_device_broadcast
#define tr_all_reduce_begin     on_device_all_reduce
#define tr_reduce_scatter_begin on_device_reduce_scatter
#define tr_all_gather_begin     on_device_all_gather
#define tr_all_to_all_begin     on_device_all_to_all
#define tr_end                  on_device_end
#endif
