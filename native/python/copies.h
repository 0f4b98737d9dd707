// A GPU's copies for windows as Python sees them: made where GPUs are, and handed to an engine, which knows none.
#pragma once

#include <memory>
#include <utility>

#include "base/copier.h"

namespace hetcoll {

class DeviceCopier;

struct PyCopier {
  std::shared_ptr<DeviceCopier> device;
  std::shared_ptr<Copier> copier;
};

struct PyGate {
  Gate gate;
};

}  // namespace hetcoll
