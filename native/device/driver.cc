#include "device/driver.h"

#include "transport/transport.h"

namespace hetcoll {

std::uintptr_t Find(const DriverFunctions& functions, const char* name) {
  const auto found = functions.find(name);
  if (found == functions.end() || found->second == 0) {
    throw Fault(FaultKind::kSystem, -1, std::string("the GPU driver has no function ") + name);
  }
  return found->second;
}

std::unique_ptr<Driver> MakeDriver(const std::string& vendor, const DriverFunctions& functions) {
  if (vendor == "cuda") return MakeCudaDriver(functions);
  if (vendor == "hip") return MakeHipDriver(functions);
  throw Fault(FaultKind::kSystem, -1, "wanted a driver of cuda or hip, got " + vendor);
}

}  // namespace hetcoll
