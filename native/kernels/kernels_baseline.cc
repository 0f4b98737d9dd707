#define HETCOLL_ISA_NAMESPACE baseline
#include "kernels/kernels.inc.h"
