#define HETCOLL_ISA_NAMESPACE avx2
#include "device/kernels.inc.h"
