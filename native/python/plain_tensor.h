// Tensors of known types (known_types.h), wherever they lie.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/types.h"
#include "python/known_types.h"
#include "python/memory.h"

namespace hetcoll {

// C-contiguous elements of a type that the engine knows.
struct PlainTensor {
  std::byte* data;
  std::size_t count;
  DType dtype;

  // Nothing, and no Python error set, where the tensor is not plain. `t` is what it exported.
  static std::optional<PlainTensor> Read(PyObject* object, KnownTypes::Export function, DlTensor& t) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    PyObject* gradient = PyObject_GetAttr(object, name);
    const bool plain = gradient == Py_False;
    Py_XDECREF(gradient);
    if (!plain || function(object, &t) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    const std::optional<DType> type = ParseDlpack(t);
    if (!type) return std::nullopt;
    std::int64_t count = 1;
    for (std::int32_t i = 0; i < t.ndim; ++i) count *= t.shape[i];
    if (count > 0 && (t.data == nullptr || !Contiguous(t))) return std::nullopt;  // no data: its storage was given back
    return PlainTensor{static_cast<std::byte*>(t.data) + t.byte_offset, static_cast<std::size_t>(count), *type};
  }

 private:
  static bool Contiguous(const DlTensor& t) {
    std::int64_t stride = 1;
    for (std::int32_t i = t.ndim - 1; i >= 0; --i) {
      if (t.strides != nullptr && t.shape[i] != 1 && t.strides[i] != stride) return false;
      stride *= t.shape[i];
    }
    return true;
  }

  // calls/buffers.py has the whole table; complex numbers are missing here on purpose.
  static std::optional<DType> ParseDlpack(const DlTensor& t) {
    if (t.lanes != 1) return std::nullopt;
    switch (t.code << 8 | t.bits) {
      case 0x0008:
        return DType::kInt8;
      case 0x0010:
        return DType::kInt16;
      case 0x0020:
        return DType::kInt32;
      case 0x0040:
        return DType::kInt64;
      case 0x0108:
        return DType::kUint8;
      case 0x0110:
        return DType::kUint16;
      case 0x0120:
        return DType::kUint32;
      case 0x0140:
        return DType::kUint64;
      case 0x0210:
        return DType::kFloat16;
      case 0x0220:
        return DType::kFloat32;
      case 0x0240:
        return DType::kFloat64;
      case 0x0410:
        return DType::kBfloat16;
      case 0x0608:
        return DType::kBool;
      case 0x0a08:
        return DType::kFloat8E4m3fn;
      case 0x0b08:
        return DType::kFloat8E4m3fnuz;
      case 0x0c08:
        return DType::kFloat8E5m2;
      case 0x0d08:
        return DType::kFloat8E5m2fnuz;
      default:
        return std::nullopt;
    }
  }
};

// A plain tensor on a GPU, and the stream on which its library works there now; or our own memory and its stream.
struct GpuTensor {
  PlainTensor plain;
  std::int32_t device_type;  // dlpack.h: kDLCUDA, kDLROCM
  std::int32_t device_id;
  void* stream;

  // Nothing, and no Python error set, for all other objects.
  static std::optional<GpuTensor> Read(PyObject* object) {
    if (KnownTypes::Instance().IsMemory(object)) {
      const Memory& memory = *nanobind::inst_ptr<Memory>(object);
      if (!memory.stream || memory.device_type == Memory::kCpu) return std::nullopt;
      return GpuTensor{{memory.data, memory.count, memory.dtype},
                       memory.device_type,
                       memory.device,
                       reinterpret_cast<void*>(*memory.stream)};
    }
    const KnownTypes::TensorType* known = KnownTypes::Instance().FindTensorType(Py_TYPE(object));
    if (known == nullptr || known->current_stream == nullptr) return std::nullopt;
    DlTensor t{};
    const std::optional<PlainTensor> plain = PlainTensor::Read(object, known->function, t);
    return plain ? Of(*known, *plain, t) : std::nullopt;
  }

  // `plain`, of a tensor of this type that exported `t`; likewise.
  static std::optional<GpuTensor> Of(const KnownTypes::TensorType& type, const PlainTensor& plain, const DlTensor& t) {
    const bool on_gpu = t.device_type == Memory::kCuda || t.device_type == Memory::kRocm;
    if (!on_gpu || type.current_stream == nullptr) return std::nullopt;
    void* stream = nullptr;
    if (type.current_stream(t.device_type, t.device_id, &stream) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    return GpuTensor{plain, t.device_type, t.device_id, stream};
  }
};

}  // namespace hetcoll
