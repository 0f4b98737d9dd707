#include "settings.h"

namespace fake {

const Vendor kVendor = {
    "CUDA", "cu", "sm_90", "Fake GPU", "CUDA_DEVICE_MAX_CONNECTIONS", 8, "CUDA_VISIBLE_DEVICES", 32, 0x10, true, false,
};

}  // namespace fake
