// Reading a Python object through the buffer protocol, for the path that a repeated call takes.
//
// Whatever this does not understand at once (DLPack exporters, ml_dtypes arrays, strided or read-only memory) is left
// to src/hetcoll/buffers.py, which either understands it or says what is wrong.
#pragma once

#include <Python.h>

#include <cstddef>
#include <optional>

#include "engine/types.h"

namespace hetcoll {

class HostBuffer {
 public:
  HostBuffer() = default;
  ~HostBuffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // False (and no Python error set) where the object is not a plain C-contiguous buffer of a known type.
  bool Read(PyObject* object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &view_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    held_ = true;
    const std::optional<DType> type = ParseFormat(view_.format, view_.itemsize);
    if (!type) return false;
    dtype_ = *type;
    return true;
  }

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }
  std::size_t count() const { return nbytes() / static_cast<std::size_t>(view_.itemsize); }
  DType dtype() const { return dtype_; }

 private:
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
  DType dtype_ = DType::kUint8;
};

}  // namespace hetcoll
