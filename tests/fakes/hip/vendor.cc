#include "settings.h"

namespace fake {

const Vendor kVendor = {
    "HIP", "hip", "gfx942", "Fake Instinct", "GPU_MAX_HW_QUEUES", 4, "HIP_VISIBLE_DEVICES", 64, 0x40, false, true,
};

}  // namespace fake
