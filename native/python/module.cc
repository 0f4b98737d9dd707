// The Python face of the engine: src/hetcoll/_native.pyi says what each thing here is for.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <array>
#include <cerrno>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "host/engine.h"
#include "plan/timeline.h"
#include "python/devices.h"
#include "python/fast_path.h"
#include "python/host_buffer.h"
#include "python/mending.h"
#include "python/persistent.h"
#include "python/py_engine.h"
#include "python/reading.h"
#include "python/tls.h"
#include "python/verbs.h"
#include "python/windows.h"
#include "python/xla.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hetcoll {
namespace {

// Where slots, their `ready` and their `credit` words begin.
using SlotAddresses = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;

Slots SlotsAt(const SlotAddresses& at, std::size_t slot_bytes, unsigned count, std::uintptr_t aborts, unsigned ranks) {
  const auto [slots, ready, credit] = at;
  return {reinterpret_cast<std::byte*>(slots),
          reinterpret_cast<std::uint64_t*>(ready),
          reinterpret_cast<std::uint64_t*>(credit),
          slot_bytes,
          count,
          reinterpret_cast<const std::uint64_t*>(aborts),
          ranks};
}

std::span<const std::byte> AsBytes(const nb::bytes& b) {
  return {reinterpret_cast<const std::byte*>(b.c_str()), b.size()};
}

const Kernels& KernelsOf(int dtype, ReduceOp op) {
  const Kernels* kernels = dtype < 0 || dtype >= kDTypes ? nullptr : FindKernels(static_cast<DType>(dtype), op);
  if (kernels == nullptr) throw nb::value_error("this reduction is not defined on this type");
  return *kernels;
}

void* At(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

const Codec& CodecOf(int dtype, int format) {
  const Codec* codec = FindCodec(static_cast<DType>(dtype), static_cast<Format>(format));
  if (codec == nullptr) throw nb::value_error("this type has no such format");
  return *codec;
}

void ReduceBytes(nb::handle dst, nb::handle a, nb::handle b, int dtype, int op, bool stream) {
  if (op < 0 || op >= kReduceOps) throw nb::value_error("no such reduction");
  const Kernels& kernels = KernelsOf(dtype, static_cast<ReduceOp>(op));
  const std::size_t item = ItemSize(static_cast<DType>(dtype));
  HostBuffer d;
  HostBuffer x;
  HostBuffer y;
  const bool read = d.Read(dst.ptr(), true) && x.Read(a.ptr(), false) && y.Read(b.ptr(), false);
  if (!read || d.nbytes() != x.nbytes() || d.nbytes() != y.nbytes() || d.nbytes() % item != 0) {
    throw nb::value_error("three contiguous buffers of one size were wanted");
  }
  kernels.reduce(d.data(), x.data(), y.data(), d.nbytes() / item, stream ? Sweep::kAround : Sweep::kPlain);
}

// A view of an array that has as many bytes per element as T; `held` keeps it.
template <typename T>
std::span<const T> ArrayOf(nb::handle object, HostBuffer& held) {
  if (!held.Read(object.ptr(), false) || ItemSize(held.dtype()) != sizeof(T)) {
    throw nb::value_error("contiguous arrays of the types that the graph has were wanted");
  }
  return {reinterpret_cast<const T*>(held.data()), held.count()};
}

std::tuple<nb::bytes, nb::bytes, nb::bytes> RunTasks(const std::vector<nb::object>& arrays) {
  if (arrays.size() != 10) throw nb::value_error("ten arrays were wanted");
  std::array<HostBuffer, 10> held;
  TaskGraph graph;
  graph.pieces = ArrayOf<std::int32_t>(arrays[0], held[0]);
  graph.uses_at = ArrayOf<std::int64_t>(arrays[1], held[1]);
  graph.server = ArrayOf<std::int32_t>(arrays[2], held[2]);
  graph.each = ArrayOf<double>(arrays[3], held[3]);
  graph.first = ArrayOf<double>(arrays[4], held[4]);
  graph.then_at = ArrayOf<std::int64_t>(arrays[5], held[5]);
  graph.then = ArrayOf<std::int32_t>(arrays[6], held[6]);
  graph.paced = ArrayOf<std::uint8_t>(arrays[7], held[7]);
  graph.delay = ArrayOf<double>(arrays[8], held[8]);
  graph.slack = ArrayOf<double>(arrays[9], held[9]);
  Timeline found;
  {
    const nb::gil_scoped_release release;
    found = RunTimeline(graph);
  }
  const auto bytes = [](const std::vector<double>& v) { return nb::bytes(v.data(), v.size() * sizeof(double)); };
  return {bytes(found.begin), bytes(found.end), bytes(found.busy)};
}

void ScaleBytes(nb::handle x, int dtype, unsigned divisor) {
  const Kernels& kernels = KernelsOf(dtype, ReduceOp::kAvg);
  const std::size_t item = ItemSize(static_cast<DType>(dtype));
  HostBuffer d;
  if (!d.Read(x.ptr(), true) || d.nbytes() % item != 0 || divisor == 0) {
    throw nb::value_error("a writable buffer of whole elements and a divisor above 0 were wanted");
  }
  kernels.scale(d.data(), d.nbytes() / item, divisor);
}

void ConvertAt(std::uintptr_t dst, std::uintptr_t src, std::size_t count, int from, int to) {
  if (!ConvertFloat8(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), count, static_cast<DType>(from),
                     static_cast<DType>(to))) {
    throw nb::value_error("two kinds of one format of 8-bit floats were wanted");
  }
}

// Binds a plan for nobody, as an engine would: its steps, and its bytes of scratch memory.
nb::tuple BindPlan(const nb::bytes& encoded, int size, int dtype, std::size_t send_count, std::size_t recv_count) {
  if (size < 1 || dtype < 0 || dtype >= kDTypes) throw nb::value_error("no such size or type");
  const BoundPlan bound(Plan(AsBytes(encoded), size), static_cast<DType>(dtype), send_count, recv_count, {}, {});
  return nb::make_tuple(bound.steps.size(), bound.scratch_bytes);
}

nb::tuple Wire() {
  nb::list sizes;
  for (int i = 0; i < kDTypes; ++i) sizes.append(ItemSize(static_cast<DType>(i)));
  return nb::make_tuple(sizes, kReduceOps, kChannels, kMaxLanes, sizeof(PlanHeader), sizeof(StepRecord), kPlanMagic);
}

}  // namespace

NB_MODULE(_native, m) {
  // A forked child has the objects of the parent's threads, but not the threads that would let go of them.
  pthread_atfork(nullptr, nullptr, [] { nb::set_leak_warnings(false); });

  nb::exception<PlanError>(m, "PlanError", PyExc_ValueError);
  nb::exception<Fault>(m, "Fault", PyExc_OSError);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {  // no thread could be had, most often
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("DONE", Status::kDone)
      .value("FAILED", Status::kFailed)
      .value("TIMED_OUT", Status::kTimedOut);
  nb::class_<Shape>(m, "Shape")
      .def_ro("id", &Shape::id)
      .def_prop_ro("nbytes", [](const Shape& s) { return s.bound.nbytes(); })
      .def_prop_ro("residuals", [](const Shape& s) { return s.bound.residuals; })
      .def_prop_ro("compressed",
                   [](const Shape& s) { return nb::make_tuple(s.bound.compressed_before, s.bound.compressed_after); });
  nb::class_<Ticket>(m, "Ticket")
      .def_prop_ro("state",
                   [](const Ticket& t) { return static_cast<int>(t.task ? t.task->state.load() : Task::State::kDone); })
      .def_prop_ro("refused", [](const Ticket& t) { return t.task ? t.task->refused : 0; });

  nb::class_<PyEngine> engine(m, "Engine");
  const auto inner = [](PyEngine& e) -> Engine& { return e.engine(); };
  BindVerbs(engine, inner);
  BindMending(engine, inner);
  BindWindows(engine);
  BindRepeated(engine);
  engine
      .def(
          "__init__",
          [](PyEngine* self, int rank, int size, std::uint64_t identity, int local_rank, double spin_seconds,
             bool oversubscribed, double timeout, const std::string& fault, int integrity) {
            new (self) PyEngine({.rank = rank,
                                 .size = size,
                                 .identity = identity,
                                 .local_rank = local_rank,
                                 .spin_seconds = spin_seconds,
                                 .oversubscribed = oversubscribed,
                                 .fault = fault,
                                 .integrity = static_cast<Integrity>(integrity)},
                                timeout);
          },
          nb::kw_only(), "rank"_a, "size"_a, "identity"_a, "local_rank"_a, "spin_seconds"_a, "oversubscribed"_a,
          "timeout"_a, "fault"_a = "", "integrity"_a = 0)
      .def("set_starts", &PyEngine::SetStarts, "starts"_a)
      .def(
          "sample_calls", [](PyEngine& e, bool mixed) { e.sampling().Begin(mixed); }, "mixed"_a)
      .def(
          "take_due",
          [](PyEngine& e, int collective, std::size_t count, int dtype, bool on_gpu) {
            return e.sampling().TakeDue(collective, count * ItemSize(static_cast<DType>(dtype)), on_gpu);
          },
          "collective"_a, "count"_a, "dtype"_a, "on_gpu"_a)
      .def(
          "return_due",
          [](PyEngine& e, int collective, std::size_t count, int dtype, bool on_gpu, bool due) {
            e.sampling().Return(collective, count * ItemSize(static_cast<DType>(dtype)), on_gpu, due);
          },
          "collective"_a, "count"_a, "dtype"_a, "on_gpu"_a, "due"_a)
      .def("new_shape", [](PyEngine& e) { return e.engine().NewShape(); })
      .def("remember", &PyEngine::Remember)
      .def("set_ops", &PyEngine::SetOps, "labels"_a, "done"_a, "on_stuck"_a, "on_interrupt"_a, "on_news"_a,
           "on_wait"_a.none())
      .def("close", &PyEngine::Close)
      .def("empty", &PyEngine::Empty)
      .def("attach_shm",
           [](PyEngine& e, int fd, std::size_t ring_bytes, std::size_t most_heap, const std::vector<int>& local_ranks,
              int stores, int reads) {
             e.engine().AttachShm(fd, ring_bytes, most_heap, local_ranks,
                                  {static_cast<SlotStores>(stores), static_cast<PrivateReads>(reads)});
           })
      .def("attach_tcp", [](PyEngine& e, int peer, int channel,
                            const std::vector<int>& fds) { e.engine().AttachTcp(peer, channel, fds); })
      .def(
          "attach_slots",
          [](PyEngine& e, int peer, int channel, const SlotAddresses& out, const SlotAddresses& in,
             std::size_t slot_bytes, unsigned count, std::uintptr_t aborts, unsigned ranks, unsigned helpers) {
            e.engine().AttachSlots(peer, channel, SlotsAt(out, slot_bytes, count, aborts, ranks),
                                   SlotsAt(in, slot_bytes, count, aborts, ranks), helpers);
          },
          nb::kw_only(), "peer"_a, "channel"_a, "out"_a, "into"_a, "slot_bytes"_a, "count"_a, "aborts"_a, "ranks"_a,
          "helpers"_a)
      .def(
          "attach_verbs",
          [](PyEngine& e, int peer, int channel, const std::vector<int>& fds,
             const std::vector<std::pair<int, std::string>>& rails,
             std::size_t ring_bytes) { e.engine().AttachVerbs(peer, channel, rails, ring_bytes, fds); },
          "peer"_a, "channel"_a, "fds"_a, "rails"_a, "ring_bytes"_a)
      .def_prop_ro(
          "settled",
          [](PyEngine& e) { return e.engine().AskVerbs([](VerbsHost& verbs) { return verbs.Settled(); }, true); })
      .def("linked", [](PyEngine& e, int peer, int channel) { return e.engine().Linked(peer, channel); })
      .def("add_plan", [](PyEngine& e, const nb::bytes& encoded) { return e.engine().AddPlan(AsBytes(encoded)); })
      .def(
          "bind",
          [](PyEngine& e, int plan, int dtype, int op, std::size_t send_count, std::size_t recv_count,
             const std::vector<std::size_t>& send_table, const std::vector<std::size_t>& recv_table,
             std::uint64_t descriptor, bool p2p, bool skip_empty, int format) {
            return e.engine().Bind(plan, static_cast<DType>(dtype), static_cast<ReduceOp>(op), send_count, recv_count,
                                   send_table, recv_table, descriptor, p2p, skip_empty, static_cast<Format>(format));
          },
          "plan"_a, "dtype"_a, "op"_a, "send_count"_a, "recv_count"_a, "send_table"_a, "recv_table"_a, "descriptor"_a,
          "p2p"_a, "skip_empty"_a = false, "format"_a = 0)
      .def("fail", [](PyEngine& e, int kind, int peer,
                      const std::string& text) { e.engine().Halt(static_cast<FaultKind>(kind), peer, text); })
      .def_prop_ro("failed", [](PyEngine& e) { return e.engine().failed(); })
      .def_prop_ro("forked", [](PyEngine& e) { return e.engine().forked(); })
      .def("abandon", [](PyEngine& e) { e.engine().Abandon(); })
      .def_prop_ro("failure",
                   [](PyEngine& e) {
                     const Failure f = e.engine().failure();
                     return nb::make_tuple(static_cast<int>(f.kind), f.peer, f.text);
                   })
      .def("peer_left", [](PyEngine& e, int peer) { e.engine().PeerLeft(peer); })
      .def(
          "describe", [](PyEngine& e) { return e.engine().Describe(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("waits_for",
           [](PyEngine& e) {
             std::vector<Awaited> found;
             {
               nb::gil_scoped_release release;
               found = e.engine().WaitsFor();
             }
             nb::list rows;
             for (const Awaited& a : found) {
               rows.append(nb::make_tuple(a.peer, a.channel, a.sends, a.done, a.total, a.bytes, a.messages));
             }
             return rows;
           })
      .def(
          "through",
          [](PyEngine& e, int peer, int channel, bool sends) { return e.engine().Through(peer, channel, sends); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "sent", [](PyEngine& e) { return e.engine().Sent(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("still_seconds", [](PyEngine& e) { return e.engine().still_seconds(); })
      .def_prop_ro("pending", [](const PyEngine&) { return PyEngine::pending(); })
      .def("records",
           [](PyEngine& e, bool messages, std::size_t most) {
             nb::list rows;
             for (const CallRecord& r : e.engine().Records(messages, most)) {
               rows.append(nb::make_tuple(r.number, r.shape, r.begin_ns, r.end_ns));
             }
             return rows;
           })
      .def("history", [](PyEngine& e, std::uint64_t sequence) { return e.engine().History(sequence); })
      .def_prop_ro("collectives", [](PyEngine& e) { return e.engine().collectives(); })
      .def("message_history", [](PyEngine& e, std::uint64_t number) { return e.engine().MessageHistory(number); })
      .def_prop_ro("moves", [](PyEngine& e) { return e.engine().moves(); })
      .def_prop_ro("naps", [](PyEngine& e) { return e.engine().naps(); })
      .def_prop_ro("messages", [](PyEngine& e) { return e.engine().messages(); })
      .def("memory",
           [](PyEngine& e) {
             EngineMemory held;
             {
               nb::gil_scoped_release release;
               held = e.engine().Memory();
             }
             nb::dict out;
             out["slots"] = held.slots;
             out["arrays"] = held.arrays;
             out["pinned"] = held.links.pinned_bytes;
             out["plans"] = held.plans;
             out["scratch"] = held.scratch;
             out["sockets"] = held.links.socket_bytes;
             out["descriptors"] = held.links.descriptors;
             out["threads"] = held.threads;
             return out;
           })
      .def_prop_ro("scratch_bytes", [](PyEngine& e) { return e.engine().scratch_bytes(); });

  BindPersistent(m);
  m.def("read_memory", &ReadMemory, "object"_a.none(), "writable"_a);
  m.def("know_dtype",
        [](nb::object dtype, int number) { KnownTypes::Instance().AddDtype(dtype.ptr(), static_cast<DType>(number)); });
  m.def("know_arrays", [](nb::handle probe) { return HostBuffer::KnowArrays(probe.ptr()); });
  m.def("know_tensor_type", [](nb::type_object type) { return KnownTypes::Instance().AddTensorType(type.ptr()); });
  m.def("read_tensor", &ReadTensor, "object"_a.none());
  m.def("shm_bytes", [](int local_size, std::size_t ring_bytes, std::size_t most_heap) {
    return ShmLayout(local_size, ring_bytes, most_heap).total_bytes;
  });
  m.def("cut_offset",
        [](std::size_t count, std::uint32_t units, std::uint32_t unit) { return CutOffset(count, units, unit); });
  m.def("bind_plan", &BindPlan, "encoded"_a, "size"_a, "dtype"_a, "send_count"_a, "recv_count"_a);
  m.def("claims_slots", [](int stores) { return StorePolicy(static_cast<SlotStores>(stores)).claims(); });
  m.def("kernel_isa", &KernelIsa);
  m.def("set_kernel_isa", &SetKernelIsa);
  m.def("reduce_bytes", &ReduceBytes);
  m.def("scale_bytes", &ScaleBytes);
  m.def("run_tasks", &RunTasks, "arrays"_a);
  m.def("round_elements",
        [](std::uintptr_t dst, std::uintptr_t src, std::uintptr_t residual, std::size_t count, int dtype, int format) {
          CodecOf(dtype, format).round(At(dst), At(src), reinterpret_cast<float*>(residual), count);
        });
  m.def("encode_elements",
        [](std::uintptr_t wire, std::uintptr_t src, std::size_t count, int dtype, int format) -> std::size_t {
          const Codec& codec = CodecOf(dtype, format);
          codec.encode(static_cast<std::byte*>(At(wire)), At(src), count);
          return codec.Bytes(count);
        });
  m.def("decode_elements", [](std::uintptr_t dst, std::uintptr_t wire, std::size_t count, int dtype, int format) {
    CodecOf(dtype, format).decode(At(dst), static_cast<const std::byte*>(At(wire)), count);
  });
  m.def("copy_bytes", [](std::uintptr_t dst, std::uintptr_t src, std::size_t n) {
    CopyBytes(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n);
  });
  m.def("convert_float8", &ConvertAt, nb::call_guard<nb::gil_scoped_release>());
  m.def("wire", &Wire);
  BindTls(m);
  BindDevices(m);
  BindFastPath(m);
  BindXla(m);
}

}  // namespace hetcoll
