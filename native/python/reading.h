// What Python asks of an object's memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "python/host_buffer.h"
#include "python/known_types.h"
#include "python/plain_tensor.h"

namespace hetcoll {

namespace nb = nanobind;

// What the fast path sees in an object: its address, count and type; None where it leaves it to the slow path.
inline nb::object ReadMemory(nb::handle object, bool writable) {
  HostBuffer buffer;
  if (!buffer.Read(object.ptr(), writable)) return nb::none();
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.count(),
                        static_cast<int>(buffer.dtype()));
}

// A tensor of a known type: address, count, type, DLPack's device type and number, and on a GPU the current stream.
// None for all else.
inline nb::object ReadTensor(nb::handle object) {
  const auto told = [](const PlainTensor& plain, int kind, int number, const nb::object& stream) {
    const auto address = reinterpret_cast<std::uintptr_t>(plain.data);
    return nb::make_tuple(address, plain.count, static_cast<int>(plain.dtype), kind, number, stream);
  };
  const KnownTypes::TensorType* type = KnownTypes::Instance().FindTensorType(Py_TYPE(object.ptr()));
  std::optional<GpuTensor> tensor;
  if (type != nullptr) {
    DlTensor t{};
    const std::optional<PlainTensor> plain = PlainTensor::Read(object.ptr(), type->function, t);
    if (plain && t.OnHost()) return told(*plain, Memory::kCpu, 0, nb::none());
    if (plain) tensor = GpuTensor::Of(*type, *plain, t);
  } else {
    tensor = GpuTensor::Read(object.ptr());
  }
  if (!tensor) return nb::none();
  const nb::int_ stream(reinterpret_cast<std::uintptr_t>(tensor->stream));
  return told(tensor->plain, tensor->device_type, tensor->device_id, stream);
}

}  // namespace hetcoll
