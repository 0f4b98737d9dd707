// Python types whose memory the fast path reads although the buffer protocol cannot describe it:
//
// * NumPy arrays of ml_dtypes types, which have no format character, by the identity of their dtype;
// * tensors that export a DLTensor by a C function (dmlc/dlpack, dlpack.h 1.3: DLPackExchangeAPI), which costs no
//   Python call.
//
// src/hetcoll/calls/buffers.py adds an entry when it has read such an object by the slow path. What is looked up at
// each call is the type alone; address, size and dtype are read anew each time.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/types.h"

namespace hetcoll {

// dlpack.h: DLTensor, with its DLDevice and DLDataType.
struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48);

// dlpack.h: DLPackExchangeAPI, of which two functions are of use here. Non-zero: a Python error is set.
struct DlExchange {
  std::uint32_t major;
  std::uint32_t minor;
  const DlExchange* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*export_borrowed)(void* object, DlTensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

// One per process, used under the interpreter's lock. What it refers to is never given back: there are few.
class KnownTypes {
 public:
  static KnownTypes& Instance() {
    static KnownTypes known;
    return known;
  }

  void AddDtype(PyObject* dtype, DType number) {
    if (dtypes_.size() >= kMost || FindDtype(dtype)) return;
    dtypes_.push_back({Py_NewRef(dtype), number});
  }

  // False where the type exports no such function.
  bool AddTensorType(PyObject* type) {
    if (FindExport(reinterpret_cast<PyTypeObject*>(type)) != nullptr) return true;
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const void* table = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    PyErr_Clear();
    const auto* api = static_cast<const DlExchange*>(table);
    while (api != nullptr && api->major != 1) api = api->previous;
    if (api == nullptr || api->export_borrowed == nullptr || tensors_.size() >= kMost) return false;
    tensors_.push_back({reinterpret_cast<PyTypeObject*>(Py_NewRef(type)), api->export_borrowed, api->current_stream});
    return true;
  }

  void SetArrayType(PyTypeObject* type) {
    array_type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type)));
  }
  bool IsArray(PyObject* object) const { return Py_TYPE(object) == array_type_; }

  void SetMemoryType(PyTypeObject* type) {
    memory_type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type)));
  }
  bool IsMemory(PyObject* object) const { return Py_TYPE(object) == memory_type_; }

  // The type of the elements, where AddDtype was told of it.
  std::optional<DType> FindDtype(PyObject* dtype) const {
    for (const KnownDtype& known : dtypes_) {
      if (known.dtype == dtype) return known.number;
    }
    return std::nullopt;
  }

  using Export = int (*)(void*, DlTensor*);
  struct TensorType {
    PyTypeObject* type;
    Export function;
    int (*current_stream)(std::int32_t, std::int32_t, void**);
  };
  const TensorType* FindTensorType(PyTypeObject* type) const {
    for (const TensorType& known : tensors_) {
      if (known.type == type) return &known;
    }
    return nullptr;
  }
  Export FindExport(PyTypeObject* type) const {
    const TensorType* known = FindTensorType(type);
    return known == nullptr ? nullptr : known->function;
  }

 private:
  struct KnownDtype {
    PyObject* dtype;
    DType number;
  };
  static constexpr std::size_t kMost = 16;

  PyTypeObject* array_type_ = nullptr;   // numpy.ndarray, where its fields are known
  PyTypeObject* memory_type_ = nullptr;  // our own Memory
  std::vector<KnownDtype> dtypes_;
  std::vector<TensorType> tensors_;
};

}  // namespace hetcoll
