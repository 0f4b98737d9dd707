#define HETCOLL_ISA_NAMESPACE avx512
#include "device/kernels.inc.h"
