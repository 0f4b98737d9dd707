// NumPy's arrays, read as every extension does that was compiled with NumPy's headers: PyArrayObject_fields in
// ndarraytypes.h, and of PyArray_Descr what 1.x and 2.x have in common. That takes two nanoseconds; their buffer
// protocol takes fifty, most of them for a format string.
#pragma once

#include <Python.h>

#include <cstddef>
#include <iterator>
#include <optional>

#include "base/types.h"

namespace hetcoll {

struct NumpyDescr {
  PyObject_HEAD PyTypeObject* typeobj;
  char kind, type, byteorder, former_flags;
  int type_num;
};

struct NumpyArray {
  PyObject_HEAD char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  NumpyDescr* descr;
  int flags;

  // Of at least these, whatever the type of its elements: contiguous in C order, aligned, writable if asked for.
  bool Plain(bool writable) const {
    constexpr int kContiguous = 0x1, kAligned = 0x100, kWritable = 0x400;  // NPY_ARRAY_*
    const int wanted = kContiguous | kAligned | (writable ? kWritable : 0);
    return (flags & wanted) == wanted;
  }

  std::size_t Count() const {
    std::size_t count = 1;
    for (int i = 0; i < nd; ++i) count *= static_cast<std::size_t>(dimensions[i]);
    return count;
  }

  // Nothing for types that are not NumPy's own, and for bytes in the other order.
  std::optional<DType> Element() const {
    constexpr bool kLong = sizeof(long) == 8;
    constexpr DType kTypes[] = {// NPY_TYPES
                                DType::kBool,
                                DType::kInt8,
                                DType::kUint8,
                                DType::kInt16,
                                DType::kUint16,
                                DType::kInt32,
                                DType::kUint32,
                                kLong ? DType::kInt64 : DType::kInt32,
                                kLong ? DType::kUint64 : DType::kUint32,
                                DType::kInt64,
                                DType::kUint64,
                                DType::kFloat32,
                                DType::kFloat64};
    const int number = descr->type_num;
    if (descr->byteorder != '=' && descr->byteorder != '|') return std::nullopt;
    if (number >= 0 && number < static_cast<int>(std::size(kTypes))) return kTypes[number];
    if (number == 14) return DType::kComplex64;
    if (number == 15) return DType::kComplex128;
    if (number == 23) return DType::kFloat16;
    return std::nullopt;
  }

  // Whether `probe`, a writable C-contiguous array of 2 x 3 float32 at `data`, looks as it must.
  static bool Fits(PyObject* probe, const void* data) {
    const auto& array = *reinterpret_cast<const NumpyArray*>(probe);
    return array.data == data && array.nd == 2 && array.dimensions[0] == 2 && array.dimensions[1] == 3 &&
           array.strides[0] == 12 && array.strides[1] == 4 && array.descr->typeobj != nullptr &&
           array.descr->kind == 'f' && array.Plain(true) && array.Element() == DType::kFloat32;
  }
};

}  // namespace hetcoll
