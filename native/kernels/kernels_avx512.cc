#define HETCOLL_ISA_NAMESPACE avx512
#include "kernels/kernels.inc.h"
