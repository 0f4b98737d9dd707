#include "settings.h"

namespace standin {

const Vendor kVendor = {
    "HIP", "hip", "gfx942", "Stand-in Instinct", "GPU_MAX_HW_QUEUES", 4, "HIP_VISIBLE_DEVICES", 64, 0x40, false,
};

}  // namespace standin
