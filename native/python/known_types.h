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

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

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

  bool OnHost() const {
    constexpr std::int32_t kCpu = 1, kCudaHost = 3, kRocmHost = 11;
    return device_type == kCpu || device_type == kCudaHost || device_type == kRocmHost;
  }
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

// Entries that are only ever added, by one thread at a time; any thread may look at those that are there.
template <class Entry, std::size_t kMost>
class Grown {
 public:
  // Nothing happens where there is room for no more.
  void Add(const Entry& entry) {
    const std::size_t at = count_.load(std::memory_order_relaxed);
    if (at >= kMost) return;
    entries_[at] = entry;
    count_.store(at + 1, std::memory_order_release);
  }
  const Entry* begin() const { return entries_.data(); }
  const Entry* end() const { return entries_.data() + count_.load(std::memory_order_acquire); }

 private:
  std::array<Entry, kMost> entries_{};
  std::atomic<std::size_t> count_{0};
};

// One per process, for any thread. What it refers to is never given back: there are few.
class KnownTypes {
 public:
  static KnownTypes& Instance() {
    static KnownTypes known;
    return known;
  }

  void AddDtype(PyObject* dtype, DType number) {
    const std::lock_guard lock(mutex_);
    if (!FindDtype(dtype)) dtypes_.Add({Py_NewRef(dtype), number});
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
    if (api == nullptr || api->export_borrowed == nullptr) return false;
    const std::lock_guard lock(mutex_);  // under which no Python runs
    if (FindExport(reinterpret_cast<PyTypeObject*>(type)) == nullptr) {
      tensors_.Add({reinterpret_cast<PyTypeObject*>(Py_NewRef(type)), api->export_borrowed, api->current_stream});
    }
    return FindExport(reinterpret_cast<PyTypeObject*>(type)) != nullptr;
  }

  void SetArrayType(PyTypeObject* type) { array_type_.store(Kept(type), std::memory_order_release); }
  bool IsArray(PyObject* object) const { return Py_TYPE(object) == array_type_.load(std::memory_order_acquire); }
  // Of a kind of arrays whose masks say which elements count: numpy.ma.
  bool IsMasked(PyObject* object) const {
    PyTypeObject* array = array_type_.load(std::memory_order_acquire);
    return array != nullptr && PyObject_TypeCheck(object, array) != 0 &&
           PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "mask") != 0;
  }

  void SetMemoryType(PyTypeObject* type) { memory_type_.store(Kept(type), std::memory_order_release); }
  bool IsMemory(PyObject* object) const { return Py_TYPE(object) == memory_type_.load(std::memory_order_acquire); }

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

  static PyTypeObject* Kept(PyTypeObject* type) {
    return reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type)));
  }

  std::atomic<PyTypeObject*> array_type_{nullptr};   // numpy.ndarray, where its fields are known
  std::atomic<PyTypeObject*> memory_type_{nullptr};  // our own Memory
  std::mutex mutex_;                                 // of adding
  Grown<KnownDtype, kMost> dtypes_;
  Grown<TensorType, kMost> tensors_;
};

}  // namespace hetcoll
