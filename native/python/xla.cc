// The one handler that XLA calls for all our operations, on every platform: it reads the frame and calls Python, where
// src/hetcoll/jax/handler.py runs the operation. What goes wrong there becomes XLA's error.

#include "python/xla.h"

#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "python/known_types.h"
#include "python/memory.h"
#include "python/xla_abi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hetcoll {
namespace {

PyObject* g_runner = nullptr;  // for as long as the process lives: XLA never forgets a handler

// Py_IsFinalizing, which is in the stable ABI from Python 3.13 on. Before, it has an underscore and the same type.
using Question = int (*)();
Question FindQuestion() {
  void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
  if (found == nullptr) found = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  if (found == nullptr) throw std::runtime_error("this Python has no Py_IsFinalizing");
  return reinterpret_cast<Question>(found);
}

bool ShuttingDown() {
  static const Question finalizing = FindQuestion();
  return !Py_IsInitialized() || finalizing() != 0;
}

// xla::PrimitiveType of xla_data.proto.
DType TypeOf(int xla_type) {
  switch (xla_type) {
    case 1:
      return DType::kBool;
    case 2:
      return DType::kInt8;
    case 3:
      return DType::kInt16;
    case 4:
      return DType::kInt32;
    case 5:
      return DType::kInt64;
    case 6:
      return DType::kUint8;
    case 7:
      return DType::kUint16;
    case 8:
      return DType::kUint32;
    case 9:
      return DType::kUint64;
    case 10:
      return DType::kFloat16;
    case 11:
      return DType::kFloat32;
    case 12:
      return DType::kFloat64;
    case 15:
      return DType::kComplex64;
    case 16:
      return DType::kBfloat16;
    case 18:
      return DType::kComplex128;
    case 19:
      return DType::kFloat8E5m2;
    case 20:
      return DType::kFloat8E4m3fn;
    case 24:
      return DType::kFloat8E5m2fnuz;
    case 25:
      return DType::kFloat8E4m3fnuz;
    default:
      throw std::invalid_argument("XLA passed elements of type " + std::to_string(xla_type));
  }
}

void Want(bool right, const char* what) {
  if (!right) throw std::invalid_argument(std::string("XLA passed ") + what);
}

// What XLA itself refused.
struct Refused {
  xla::Error* error;
};

// The only array among arguments or results; beside it there is the token that orders calls.
std::optional<Memory> FindArray(const xla::Values& values) {
  std::optional<Memory> found;
  for (std::int64_t i = 0; i < values.size; ++i) {
    Want(values.types[i] == xla::kBuffer, "something that is no array");
    const auto& buffer = *static_cast<const xla::Buffer*>(values.values[i]);
    Want(buffer.struct_size >= sizeof(xla::Buffer), "an array in a layout that hetcoll does not know");
    if (buffer.dtype == xla::kTypeToken) continue;
    Want(!found, "more than one array");
    found = {static_cast<std::byte*>(buffer.data), 1, TypeOf(buffer.dtype)};
    for (std::int64_t d = 0; d < buffer.rank; ++d) found->count *= static_cast<std::size_t>(buffer.dims[d]);
  }
  return found;
}

// The attribute "call", see Operation.call in src/hetcoll/jax/operations.py. It begins with the device.
std::string_view FindCall(const xla::Attrs& attrs) {
  for (std::int64_t i = 0; i < attrs.size; ++i) {
    const xla::ByteSpan& name = *attrs.names[i];
    if (attrs.types[i] != xla::kAttrString || std::string_view(name.ptr, name.len) != "call") continue;
    const auto& text = *static_cast<const xla::ByteSpan*>(attrs.attrs[i]);
    return {text.ptr, text.len};
  }
  Want(false, "no attribute named call");
  return {};
}

struct Order {
  explicit Order(const xla::CallFrame& frame) {
    const bool known = frame.args.struct_size == sizeof(xla::Values) && frame.rets.struct_size == sizeof(xla::Values) &&
                       frame.attrs.struct_size == sizeof(xla::Attrs) && frame.api->struct_size >= sizeof(xla::Api);
    Want(known, "a call in a layout that hetcoll does not know");
    Want(frame.stage == xla::kStageExecute, "a call of another stage than execute");
    what = FindCall(frame.attrs);
    in = FindArray(frame.args);
    out = FindArray(frame.rets);
    if (!what.starts_with("cpu ")) ReadDevice(frame, what.starts_with("cuda ") ? Memory::kCuda : Memory::kRocm);
  }

  void ReadDevice(const xla::CallFrame& frame, std::int32_t type) {
    xla::StreamGetArgs stream_args{sizeof(stream_args), nullptr, frame.ctx, nullptr};
    if (xla::Error* error = frame.api->stream_get(&stream_args)) throw Refused{error};
    stream = stream_args.stream;
    xla::DeviceOrdinalGetArgs ordinal_args{sizeof(ordinal_args), nullptr, frame.ctx, 0};
    if (xla::Error* error = frame.api->device_ordinal_get(&ordinal_args)) throw Refused{error};
    for (std::optional<Memory>* memory : {&in, &out}) {
      if (!*memory) continue;
      (*memory)->device_type = type;
      (*memory)->device = ordinal_args.device_ordinal;
    }
  }

  std::string_view what;
  std::optional<Memory> in;
  std::optional<Memory> out;
  void* stream = nullptr;
};

// (status code, message) of what went wrong; None otherwise.
nb::object Run(const Order& order) {
  const auto object = [](const std::optional<Memory>& memory) { return memory ? nb::cast(*memory) : nb::none(); };
  return nb::handle(g_runner)(nb::bytes(order.what.data(), order.what.size()), object(order.in), object(order.out),
                              reinterpret_cast<std::uintptr_t>(order.stream));
}

xla::Error* Fail(const xla::Api* api, int code, const std::string& text) {
  xla::ErrorCreateArgs args{sizeof(args), nullptr, text.c_str(), code};
  return api->error_create(&args);
}

xla::Error* Execute(const xla::CallFrame& frame) {
  const Order order(frame);
  if (ShuttingDown()) return Fail(frame.api, xla::kFailedPrecondition, "hetcoll: the interpreter is shutting down");
  const nb::gil_scoped_acquire gil;
  try {
    const nb::object failed = Run(order);
    if (failed.is_none()) return nullptr;
    return Fail(frame.api, nb::cast<int>(failed[0]), nb::cast<std::string>(failed[1]));
  } catch (const nb::python_error& e) {
    if (!e.matches(PyExc_KeyboardInterrupt)) return Fail(frame.api, xla::kInternal, e.what());
    PyErr_SetInterrupt();  // once more, for when the interpreter goes on outside of XLA
    return Fail(frame.api, xla::kCancelled, "hetcoll: interrupted");
  } catch (const std::exception& e) {
    return Fail(frame.api, xla::kInternal, e.what());
  }
}

xla::Error* Handle(xla::CallFrame* frame) {
  for (xla::Extension* e = frame->extension_start; e != nullptr; e = e->next) {
    if (e->type != xla::kExtensionMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(e)->metadata;
    metadata.api_version = {sizeof(xla::ApiVersion), nullptr, xla::kApiMajor, xla::kApiMinor};
    metadata.traits = 0;  // not to be recorded into a graph
    return nullptr;
  }
  try {
    return Execute(*frame);
  } catch (const Refused& refused) {
    return refused.error;
  } catch (const std::exception& e) {
    return Fail(frame->api, xla::kFailedPrecondition, std::string("hetcoll: ") + e.what());
  }
}

}  // namespace

void BindXla(nb::module_& m) {
  const nb::object memory =
      nb::class_<Memory>(m, "Memory")
          .def(
              "__init__",
              [](Memory* self, std::uintptr_t address, std::size_t count, int dtype, int device_type, int device,
                 std::uintptr_t stream) {
                new (self) Memory{reinterpret_cast<std::byte*>(address),
                                  count,
                                  static_cast<DType>(dtype),
                                  device_type,
                                  device,
                                  stream};
              },
              "address"_a, "count"_a, "dtype"_a, "device_type"_a, "device"_a, "stream"_a)
          .def_prop_ro(
              "stream",
              [](const Memory& x) -> nb::object { return x.stream ? nb::object(nb::int_(*x.stream)) : nb::none(); })
          .def_prop_ro("address", [](const Memory& x) { return reinterpret_cast<std::uintptr_t>(x.data); })
          .def_ro("count", &Memory::count)
          .def_prop_ro("dtype", [](const Memory& x) { return static_cast<int>(x.dtype); })
          .def_ro("device_type", &Memory::device_type)
          .def_ro("device", &Memory::device);
  KnownTypes::Instance().SetMemoryType(reinterpret_cast<PyTypeObject*>(memory.ptr()));
  m.def(
      "xla_handler",
      [](nb::callable runner) {
        Py_XDECREF(g_runner);
        g_runner = runner.release().ptr();
        return nb::capsule(reinterpret_cast<void*>(&Handle), "xla._CUSTOM_CALL_TARGET");
      },
      "runner"_a);
}

}  // namespace hetcoll
