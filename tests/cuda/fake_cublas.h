/* fake_cublas.h - a cuBLAS on the host: carries out products as its documentation says, in plain
 * loops over columns, and writes down what it is asked. Floor: tests. */
#pragma once
#include <cublas_v2.h>

/* Forgets everything; no call fails. */
void fake_reset(void);
/* The next call of this name fails. */
void fake_fail(const char *name);
/* The calls so far, one a line, without products: "cublasSetStream 0x5". */
const char *fake_log(void);
int fake_products(void);
/* Of the last product. */
cublasComputeType_t fake_compute(void);
