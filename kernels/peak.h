/* peak.h - what the processor or device could do at best: the base of utilisation figures.
 * Floor: kernels. */
#pragma once
#include "base/device.h"
#include "base/dtype.h"

/* Local. Floating-point operations a second of `threads` threads (at most the processors this
 * process may use) that do nothing but multiply and add in registers, measured in at most
 * `seconds`: fused multiply-adds for TR_F32, bf16 dot products for TR_BF16 where the processor has
 * fast ones, else as F32. Every thread reports its fastest millisecond, so a busy machine hardly
 * lowers the figure. */
double tr_peak_flops(tr_dtype t, int threads, double seconds);
/* Local. What those are: "fp32 multiply-add" or "bf16 dot product". */
const char *tr_peak_instruction(tr_dtype t);

/* Local. The same of a device. Where it is not the CPU, the fastest of its own square products that
 * fit in `seconds`: less than its data sheet says, by what the kernel leaves. */
double tr_device_peak(tr_device *device, tr_dtype t, int threads, double seconds);
