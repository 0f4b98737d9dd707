#define HETCOLL_ISA_NAMESPACE baseline
#include "device/kernels.inc.h"
