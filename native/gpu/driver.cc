#include "gpu/driver.h"

#include "transport/transport.h"

namespace hetcoll {

std::uintptr_t Find(const DriverFunctions& functions, const char* name) {
  const auto found = functions.find(name);
  if (found == functions.end() || found->second == 0) {
    throw Fault(FaultKind::kSystem, -1, std::string("the GPU driver has no function ") + name);
  }
  return found->second;
}

SignalKernels::SignalKernels(const DriverFunctions& functions) {
  if (!functions.contains("bump")) return;
  bump_ = reinterpret_cast<DeviceFunction>(Find(functions, "bump"));
  await_ = reinterpret_cast<DeviceFunction>(Find(functions, "await"));
  zero_ = reinterpret_cast<const std::uint64_t*>(Find(functions, "zero"));
  abort_ = reinterpret_cast<void*>(Find(functions, "abort"));
}

void SignalKernels::Write(Driver& driver, std::uint64_t* counter, const std::uint64_t* base, std::uint64_t more,
                          DeviceStream stream) const {
  void* params[] = {&counter, &base, &more};
  driver.Launch(bump_, 1, 1, params, stream);
}

void SignalKernels::Wait(Driver& driver, std::uint64_t* counter, const std::uint64_t* base, std::uint64_t more,
                         DeviceStream stream) const {
  void* abort = abort_;
  void* params[] = {&counter, &base, &more, &abort};
  driver.Launch(await_, 1, 1, params, stream);
}

std::unique_ptr<Driver> MakeDriver(const std::string& vendor, const DriverFunctions& functions) {
  if (vendor == "cuda") return MakeCudaDriver(functions);
  if (vendor == "hip") return MakeHipDriver(functions);
  throw Fault(FaultKind::kSystem, -1, "wanted a driver of cuda or hip, got " + vendor);
}

}  // namespace hetcoll
