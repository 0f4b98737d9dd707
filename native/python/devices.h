// The GPU half of the engine for Python: src/hetcoll/_native.pyi says what each thing here is for.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "gpu/copier.h"
#include "gpu/ledger.h"
#include "gpu/queue.h"
#include "python/copies.h"
#include "python/gpu_calls.h"
#include "python/mending.h"
#include "python/py_device_queue.h"
#include "python/verbs.h"

namespace hetcoll {

namespace nb = nanobind;

inline std::optional<PyGate> Closed(Gate gate) {
  if (!gate) return std::nullopt;
  return PyGate{std::move(gate)};
}

inline void BindCopies(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PyGate>(m, "Gate").def_prop_ro("open", [](const PyGate& g) { return g.gate(); });
  nb::class_<PyCopier>(m, "Copier")
      .def(nb::new_([](const std::string& vendor, const DriverFunctions& functions, Address in, Address out) {
             const std::array streams{As<DeviceStream>(in), As<DeviceStream>(out)};
             auto device = std::make_shared<DeviceCopier>(MakeDriver(vendor, functions), streams);
             return PyCopier{device, device};
           }),
           nb::kw_only(), "vendor"_a, "functions"_a, "into"_a, "out"_a)
      .def(
          "after", [](const PyCopier& c, Address stream) { return Closed(c.device->After(As<DeviceStream>(stream))); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("use_kernels",
           [](const PyCopier& c, Address few, Address many, Address table, std::size_t rows) {
             c.device->UseKernels(As<DeviceFunction>(few), As<DeviceFunction>(many), {As<Move*>(table), rows});
           })
      .def(
          "failure", [](const PyCopier& c) { return c.device->Failure(); }, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait",
          [](const PyCopier& c, Address word, std::uint64_t value, Address stream) {
            return Closed(c.device->Wait(As<std::uint64_t*>(word), value, As<DeviceStream>(stream)));
          },
          nb::call_guard<nb::gil_scoped_release>());
}

inline void BindDevices(nb::module_& m) {
  using namespace nb::literals;
  BindCopies(m);
  nb::class_<ProxyEdge>(m, "ProxyEdge");
  nb::class_<Proxy> proxy(m, "Proxy");
  BindVerbs(proxy, [](Proxy& r) -> Proxy& { return r; });
  BindMending(proxy, [](Proxy& r) -> Proxy& { return r; });
  proxy
      .def(nb::new_([](unsigned threads, bool oversubscribed, int rank, const std::string& fault, int integrity) {
             return std::make_shared<Proxy>(ProxyOptions{.threads = threads,
                                                         .oversubscribed = oversubscribed,
                                                         .rank = rank,
                                                         .fault = fault,
                                                         .integrity = static_cast<Integrity>(integrity)});
           }),
           nb::kw_only(), "threads"_a, "oversubscribed"_a, "rank"_a, "fault"_a = "", "integrity"_a = 0)
      .def(
          "connect",
          [](Proxy& r, int peer, int channel, const std::vector<int>& fds) { r.Connect(peer, channel, fds); }, "peer"_a,
          "channel"_a, "fds"_a)
      .def(
          "connect_verbs",
          [](Proxy& r, int peer, int channel, const std::vector<int>& fds,
             const std::vector<std::pair<int, std::string>>& rails, std::size_t ring_bytes, const PyCopier* copier,
             Address pinned, std::size_t pinned_bytes) {
            ProxyVerbs link{.ring_bytes = ring_bytes, .rails = rails};
            if (copier != nullptr) link.copier = copier->copier;
            link.pinned = {As<std::byte*>(pinned), pinned_bytes};
            r.ConnectVerbs(peer, channel, link, fds);
          },
          "peer"_a, "channel"_a, "fds"_a, "rails"_a, "ring_bytes"_a, "copier"_a = nb::none(), "pinned"_a = 0,
          "pinned_bytes"_a = 0)
      .def(
          "add_edge",
          [](Proxy& r, int peer, int channel, bool out, Address slots, Address ready, Address credit,
             std::size_t slot_bytes, unsigned count) {
            return r.AddEdge(peer, channel, out, SlotsAt(slots, ready, credit, slot_bytes, count));
          },
          nb::kw_only(), "peer"_a, "channel"_a, "out"_a, "slots"_a, "ready"_a, "credit"_a, "slot_bytes"_a, "count"_a)
      .def_prop_ro("idle", &Proxy::Idle)
      .def("try_links", &Proxy::Try, "on"_a)
      .def("problem", &Proxy::Problem, "peer"_a)
      .def("leave", &Proxy::Leave, "peer"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("fail", [](Proxy& r, int kind, int peer,
                      const std::string& text) { r.Fail(static_cast<FaultKind>(kind), peer, text); })
      .def(
          "await_failure",
          [](Proxy& r, double seconds) {
            Failure f;
            {
              nb::gil_scoped_release release;
              f = r.AwaitFailure(DeadlineNs(seconds));
            }
            return nb::make_tuple(static_cast<int>(f.kind), f.peer, f.text);
          },
          "seconds"_a)
      .def(
          "close", [](Proxy& r, double seconds) { r.Close(DeadlineNs(seconds)); }, "seconds"_a = 0.0,
          nb::call_guard<nb::gil_scoped_release>())
      .def("describe", &Proxy::Describe)
      .def_prop_ro("moves", &Proxy::moves);
  nb::class_<DeviceShape>(m, "DeviceShape")
      .def_prop_ro("p2p", [](const DeviceShape& s) { return s.p2p; })
      .def_rw("by_library", &DeviceShape::by_library)
      .def_prop_ro("by_copies", [](const DeviceShape& s) { return s.program.by_copies(); })
      .def_prop_ro("edges",
                   [](const DeviceShape& s) {
                     return std::vector<std::uint16_t>(s.program.edges.begin(), s.program.edges.end());
                   })
      .def_prop_ro("scratch_bytes", [](const DeviceShape& s) { return s.program.scratch_bytes; })
      .def_prop_ro("residuals", [](const DeviceShape& s) { return s.recipe ? s.recipe->plan.residuals : 0; })
      .def_prop_ro("compressed", [](const DeviceShape& s) {
        if (!s.recipe) return std::tuple(std::size_t{0}, std::size_t{0});
        return std::tuple(s.recipe->plan.compressed_before, s.recipe->plan.compressed_after);
      });
  m.attr("LEDGER_BYTES") = kLedgerBytes;
  m.attr("STAGED_MESSAGES") = kStagedMessages;
  nb::class_<LedgerEntry>(m, "LedgerEntry").def_static("make", [](std::uint64_t signature, const std::string& text) {
    return Ledger::Entry(signature, text);
  });
  nb::class_<Ledger>(m, "Ledger")
      .def("__init__", [](Ledger* self, Address pages, int rank,
                          int size) { new (self) Ledger(As<LedgerPage*>(pages), rank, size); })
      .def("note", &Ledger::Note, "entry"_a, nb::lock_self())
      .def("calls", &Ledger::calls, "rank"_a)
      .def("text", &Ledger::Text, "rank"_a, "number"_a);
  nb::class_<KernelShape>(m, "KernelShape");
  nb::class_<PyDeviceQueue>(m, "DeviceQueue")
      .def(nb::init<const std::string&, const DriverFunctions&, int, Address, std::size_t>(), nb::kw_only(), "vendor"_a,
           "functions"_a, "priority"_a, "staging"_a, "slot_bytes"_a)
      .def("set_island", &PyDeviceQueue::SetIsland, "functions"_a, "handle"_a, "place"_a, "members"_a)
      .def("add_edge", &PyDeviceQueue::AddEdge, "slots"_a, "ready"_a, "credit"_a, "count"_a,
           "proxy"_a.none() = nb::none(), "near"_a = false)
      .def("set_capture", &PyDeviceQueue::SetCapture, nb::kw_only(), "kernels"_a, "staging"_a, "words"_a, "seen"_a)
      .def("drop_capture", &PyDeviceQueue::DropCapture)
      .def("drop_lanes", &PyDeviceQueue::DropLanes)
      .def("add_capture_edge", &PyDeviceQueue::AddCaptureEdge, "edge"_a, "slots"_a, "ready"_a, "credit"_a, "count"_a)
      .def("capture_taken", &PyDeviceQueue::CaptureTaken, "stream"_a)
      .def("bind", &PyDeviceQueue::Bind, nb::kw_only(), "plan"_a, "size"_a, "dtype"_a, "send_count"_a, "recv_count"_a,
           "send_table"_a, "recv_table"_a, "order"_a, "levels"_a, "lag"_a, "edges"_a, "reduce"_a.none(),
           "scale"_a.none(), "divisor"_a, "p2p"_a = false, "ahead"_a = false, "local"_a.none() = nb::none(),
           "codec"_a.none() = nb::none(), "sends"_a = std::vector<std::size_t>(),
           "recvs"_a = std::vector<std::size_t>(), "kernels"_a = std::vector<MessagesArgs>())
      .def_static("bind_pulls", &PyDeviceQueue::BindPulls, nb::kw_only(), "readers"_a, "pulls"_a, "own"_a.none(),
                  "aside"_a)
      .def_static("bind_kernel", &PyDeviceQueue::BindKernel, nb::kw_only(), "function"_a, "arguments"_a, "captured"_a,
                  "blocks"_a, "threads"_a)
      .def("join", &PyDeviceQueue::Join, "stream"_a)
      .def("idle", &PyDeviceQueue::Idle)
      .def("passed", &PyDeviceQueue::Passed)
      .def("pulls_done", &PyDeviceQueue::PullsDone);
  nb::class_<GpuCall>(m, "GpuCall")
      .def(
          "__init__",
          [](GpuCall* self, const std::shared_ptr<DeviceShape>& program, const std::shared_ptr<KernelShape>& kernel,
             const std::vector<std::tuple<nb::object, LedgerEntry>>& notes, int number, std::uint64_t descriptor,
             bool p2p, std::vector<std::uint64_t> descriptors) {
            if ((program == nullptr) == (kernel == nullptr)) throw nb::value_error("a program or a kernel was wanted");
            std::vector<GpuNote> kept;
            for (const auto& [ledger, entry] : notes) kept.push_back({ledger, nb::cast<Ledger*>(ledger), entry});
            new (self) GpuCall{program, kernel, std::move(kept), number, descriptor, p2p, std::move(descriptors)};
          },
          nb::kw_only(), "program"_a.none(), "kernel"_a.none(), "notes"_a, "number"_a, "descriptor"_a, "p2p"_a,
          "descriptors"_a = std::vector<std::uint64_t>())
      .def_ro("program", &GpuCall::program);
  nb::class_<GpuCalls>(m, "GpuCalls")
      .def(
          "__init__",
          [](GpuCalls* self, PyEngine& engine, PyDeviceQueue& queue, int device_type, int device_id,
             nb::callable differs, nb::callable refused, nb::callable captured, nb::callable broken,
             nb::callable started, nb::callable work) {
            new (self) GpuCalls(engine, queue, device_type, device_id,
                                {std::move(differs), std::move(refused), std::move(captured), std::move(broken),
                                 std::move(started), std::move(work)});
          },
          nb::kw_only(), "engine"_a, "queue"_a, "device_type"_a, "device_id"_a, "differs"_a, "refused"_a, "captured"_a,
          "broken"_a, "started"_a, "work"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("call", &GpuCalls::Call, "collective"_a, "send"_a.none(), "recv"_a.none(), "op"_a.none(), "root"_a.none())
      .def("remember", &GpuCalls::Remember)
      .def("leave_out", &GpuCalls::LeaveOut, "collectives"_a)
      .def("run", &GpuCalls::Run, "call"_a, "send"_a, "recv"_a, "stream"_a, "join"_a, "residual"_a = 0)
      .def("run_group", &GpuCalls::RunGroup, "call"_a, "addresses"_a, "stream"_a, "join"_a)
      .def("set_scratch", &GpuCalls::SetScratch, "address"_a)
      .def("set_capture_scratch", &GpuCalls::SetCaptureScratch, "address"_a);
}

}  // namespace hetcoll
