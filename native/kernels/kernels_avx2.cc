#define HETCOLL_ISA_NAMESPACE avx2
#include "kernels/kernels.inc.h"
