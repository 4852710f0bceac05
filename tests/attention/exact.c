/* Property: what must hold exactly does: known numbers, bits that a mask or the number of threads
 * must not change, empty and hidden parts. */
#include "problem.h"

const struct CMUnitTest exact_tests[1];
const int exact_tests_n = 0;
