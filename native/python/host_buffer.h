// Reading a Python object's memory, for the path that a repeated call takes.
//
// Whatever this does not understand at once (other DLPack exporters, strided or read-only memory) is left to
// src/hetcoll/calls/buffers.py, which either understands it or says what is wrong.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/types.h"
#include "python/known_types.h"
#include "python/memory.h"
#include "python/numpy_array.h"
#include "python/plain_tensor.h"

namespace hetcoll {

class HostBuffer {
 public:
  HostBuffer() = default;
  ~HostBuffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // False (and no Python error set) where the object is not plain C-contiguous memory of a known type. The memory stays
  // as long as this and `object` do.
  bool Read(PyObject* object, bool writable) {
    const KnownTypes& known = KnownTypes::Instance();
    if (known.IsArray(object)) return ReadArray(*reinterpret_cast<const NumpyArray*>(object), writable);
    if (const KnownTypes::Export function = known.FindExport(Py_TYPE(object))) return ReadTensor(object, function);
    if (known.IsMemory(object)) return ReadMemory(*nanobind::inst_ptr<Memory>(object));
    return !known.IsMasked(object) && ReadBuffer(object, writable);
  }

  // From now on instances of `probe`'s very type, numpy.ndarray, are read directly; false where they do not look as
  // they did in NumPy 1 and 2. See NumpyArray::Fits.
  static bool KnowArrays(PyObject* probe) {
    HostBuffer buffer;
    if (!buffer.ReadBuffer(probe, true) || !NumpyArray::Fits(probe, buffer.data())) return false;
    KnownTypes::Instance().SetArrayType(Py_TYPE(probe));
    return true;
  }

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  std::size_t count() const { return count_; }
  DType dtype() const { return dtype_; }

 private:
  bool ReadArray(const NumpyArray& array, bool writable) {
    if (!array.Plain(writable)) return false;
    std::optional<DType> type = array.Element();
    if (!type) type = KnownTypes::Instance().FindDtype(reinterpret_cast<PyObject*>(array.descr));
    if (!type) return false;
    data_ = reinterpret_cast<std::byte*>(array.data);
    count_ = array.Count();
    nbytes_ = count_ * ItemSize(*type);
    dtype_ = *type;
    return true;
  }

  bool ReadMemory(const Memory& memory) {
    if (memory.device_type != Memory::kCpu) return false;
    data_ = memory.data;
    count_ = memory.count;
    nbytes_ = count_ * ItemSize(memory.dtype);
    dtype_ = memory.dtype;
    return true;
  }

  bool ReadBuffer(PyObject* object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &view_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    held_ = true;
    const std::optional<DType> type = ParseFormat(view_.format, view_.itemsize);
    if (!type) return false;
    data_ = static_cast<std::byte*>(view_.buf);
    nbytes_ = static_cast<std::size_t>(view_.len);
    count_ = nbytes_ / static_cast<std::size_t>(view_.itemsize);
    dtype_ = *type;
    return true;
  }

  // PyTorch's, which writes wherever it can read. The function does not refuse what its `__dlpack__` does: tensors with
  // a gradient, and lazily conjugated ones, which only complex numbers can be.
  bool ReadTensor(PyObject* object, KnownTypes::Export function) {
    DlTensor t{};
    const std::optional<PlainTensor> plain = PlainTensor::Read(object, function, t);
    if (!plain || !t.OnHost()) return false;
    data_ = plain->data;
    count_ = plain->count;
    nbytes_ = count_ * ItemSize(plain->dtype);
    dtype_ = plain->dtype;
    return true;
  }

  static std::optional<DType> ParseFormat(const char* f, Py_ssize_t itemsize) {
    if (f == nullptr) return DType::kUint8;
    if (*f == '@' || *f == '=' || *f == '<') ++f;
    const bool complex = *f == 'Z';
    if (complex) ++f;
    if (*f == '\0' || f[1] != '\0') return std::nullopt;
    if (complex) {
      if (*f == 'f') return DType::kComplex64;
      if (*f == 'd') return DType::kComplex128;
      return std::nullopt;
    }
    switch (*f) {
      case 'f':
        return DType::kFloat32;
      case 'd':
        return DType::kFloat64;
      case 'e':
        return DType::kFloat16;
      case '?':
        return DType::kBool;
      case 'b':
        return DType::kInt8;
      case 'B':
        return DType::kUint8;
      case 'h':
        return DType::kInt16;
      case 'H':
        return DType::kUint16;
      case 'i':
      case 'l':
      case 'q':
        return itemsize == 4 ? DType::kInt32 : DType::kInt64;
      case 'I':
      case 'L':
      case 'Q':
        return itemsize == 4 ? DType::kUint32 : DType::kUint64;
      default:
        return std::nullopt;
    }
  }

  Py_buffer view_{};
  bool held_ = false;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t count_ = 0;
  DType dtype_ = DType::kUint8;
};

}  // namespace hetcoll
