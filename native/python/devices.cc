// The GPU half of the engine for Python: src/hetcoll/_native.pyi says what each thing here is for.
#include "python/devices.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/clock.h"
#include "engine/device_queue.h"
#include "engine/ledger.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hetcoll {
namespace {

using Address = std::uintptr_t;
using KernelArgs = std::optional<std::tuple<Address, unsigned, unsigned, unsigned>>;

using LocalArgs = std::optional<std::tuple<int, int, unsigned>>;

LocalReduction LocalOf(const LocalArgs& args) {
  if (!args) return {};
  const auto& [dtype, op, elements] = *args;
  return {dtype, op, elements};
}

template <class Pointer>
Pointer As(Address address) {
  return reinterpret_cast<Pointer>(address);
}

Slots SlotsAt(Address slots, Address ready, Address credit, std::size_t slot_bytes, unsigned count) {
  return {As<std::byte*>(slots), As<std::uint64_t*>(ready), As<std::uint64_t*>(credit), slot_bytes, count};
}

DeviceKernel KernelOf(const KernelArgs& args) {
  if (!args) return {};
  const auto& [function, block, most_blocks, per_block] = *args;
  return {As<DeviceFunction>(function), block, most_blocks, per_block};
}

// A queue that several threads may use: calls take turns, and none holds the interpreter's lock while the driver is at
// work, since a driver whose own queue is full waits for the GPU.
class PyDeviceQueue {
 public:
  PyDeviceQueue(const std::string& vendor, const DriverFunctions& functions, const std::vector<Address>& streams,
                Address staging, std::size_t slot_bytes)
      : driver_(MakeDriver(vendor, functions)),
        queue_(driver_, Streams(streams), As<std::byte*>(staging), slot_bytes) {}

  std::uint16_t AddEdge(Address slots, Address ready, Address credit, unsigned count,
                        std::shared_ptr<RelayEdge> relay) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    return queue_.AddEdge({SlotsAt(slots, ready, credit, queue_.slot_bytes(), count), std::move(relay)});
  }

  void SetIsland(const DriverFunctions& functions, Address handle, int place, int members) {
    std::lock_guard lock(mutex_);
    queue_.SetIsland(std::make_unique<VendorCollectives>(functions, handle), place, members);
  }

  std::shared_ptr<DeviceShape> Bind(const nb::bytes& encoded, int rank, int size, int dtype, std::size_t send_count,
                                    std::size_t recv_count, const std::vector<std::size_t>& send_table,
                                    const std::vector<std::size_t>& recv_table, const std::vector<std::uint32_t>& order,
                                    const std::vector<std::uint16_t>& edges, const KernelArgs& reduce,
                                    const KernelArgs& scale, unsigned divisor, bool p2p, const LocalArgs& local) {
    const Plan plan({reinterpret_cast<const std::byte*>(encoded.c_str()), encoded.size()}, size);
    const auto type = static_cast<DType>(dtype);
    const BoundPlan bound(plan, rank, type, send_count, recv_count, send_table, recv_table);
    DeviceProgram program(bound, order, edges, queue_.slot_bytes());
    return std::make_shared<DeviceShape>(DeviceShape{std::move(program), KernelOf(reduce), KernelOf(scale),
                                                     ItemSize(type), divisor, LocalOf(local), p2p});
  }

  void Run(const std::shared_ptr<DeviceShape>& shape, Address send, Address recv, Address scratch,
           std::uint64_t signature, Address stream, bool join) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.Enqueue(*shape, As<const std::byte*>(send), As<std::byte*>(recv), As<std::byte*>(scratch), signature,
                   As<DeviceStream>(stream), join);
  }

  static std::shared_ptr<KernelShape> BindKernel(Address function, const nb::bytes& arguments, unsigned blocks,
                                                 unsigned threads) {
    const auto* bytes = reinterpret_cast<const std::byte*>(arguments.c_str());
    if (arguments.size() < 2 * sizeof(void*)) throw PlanError("a kernel's arguments begin with its two buffers");
    return std::make_shared<KernelShape>(
        KernelShape{As<DeviceFunction>(function), {bytes, bytes + arguments.size()}, blocks, threads});
  }

  void RunKernel(const std::shared_ptr<KernelShape>& shape, Address send, Address recv, Address stream) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.EnqueueKernel(*shape, As<const std::byte*>(send), As<std::byte*>(recv), As<DeviceStream>(stream));
  }

  void Join(Address stream) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    driver_->Activate();
    queue_.Join(As<DeviceStream>(stream));
  }

  bool Capturing(Address stream) {
    std::lock_guard lock(mutex_);
    return queue_.Capturing(As<DeviceStream>(stream));
  }

  bool Idle() {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    return queue_.Idle();
  }

 private:
  static std::vector<DeviceStream> Streams(const std::vector<Address>& addresses) {
    std::vector<DeviceStream> streams;
    for (const Address address : addresses) streams.push_back(As<DeviceStream>(address));
    return streams;
  }

  std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  DeviceQueue queue_;
};

}  // namespace

void BindDevices(nb::module_& m) {
  nb::class_<RelayEdge>(m, "RelayEdge");
  nb::class_<Relay>(m, "Relay")
      .def(nb::new_([](unsigned threads, bool oversubscribed, int rank, const std::string& fault) {
             return std::make_shared<Relay>(RelayOptions{threads, oversubscribed, rank, fault});
           }),
           nb::kw_only(), "threads"_a, "oversubscribed"_a, "rank"_a, "fault"_a = "")
      .def(
          "connect",
          [](Relay& r, int peer, int channel, const std::vector<int>& fds) { r.Connect(peer, channel, fds); }, "peer"_a,
          "channel"_a, "fds"_a)
      .def(
          "add_edge",
          [](Relay& r, int peer, int channel, bool out, Address slots, Address ready, Address credit,
             std::size_t slot_bytes, unsigned count) {
            return r.AddEdge(peer, channel, out, SlotsAt(slots, ready, credit, slot_bytes, count));
          },
          nb::kw_only(), "peer"_a, "channel"_a, "out"_a, "slots"_a, "ready"_a, "credit"_a, "slot_bytes"_a, "count"_a)
      .def_prop_ro("idle", &Relay::Idle)
      .def("fail", [](Relay& r, int kind, int peer,
                      const std::string& text) { r.Fail(static_cast<FaultKind>(kind), peer, text); })
      .def(
          "await_failure",
          [](Relay& r, double seconds) {
            Failure f;
            {
              nb::gil_scoped_release release;
              f = r.AwaitFailure(DeadlineNs(seconds));
            }
            return nb::make_tuple(static_cast<int>(f.kind), f.peer, f.text);
          },
          "seconds"_a)
      .def("close", &Relay::Close, nb::call_guard<nb::gil_scoped_release>())
      .def("describe", &Relay::Describe)
      .def_prop_ro("moves", &Relay::moves);
  nb::class_<DeviceShape>(m, "DeviceShape")
      .def_prop_ro("all_local", [](const DeviceShape& s) { return s.program.all_local; })
      .def_prop_ro("scratch_bytes", [](const DeviceShape& s) { return s.program.scratch_bytes; })
      .def_prop_ro("actions", [](const DeviceShape& s) { return s.program.actions.size(); });
  m.attr("LEDGER_BYTES") = kLedgerBytes;
  m.attr("DEVICE_LANES") = kDeviceLanes;
  m.attr("STAGED_MESSAGES") = kStagedMessages;
  nb::class_<LedgerEntry>(m, "LedgerEntry").def_static("make", [](std::uint64_t signature, const std::string& text) {
    return Ledger::Entry(signature, text);
  });
  nb::class_<Ledger>(m, "Ledger")
      .def("__init__", [](Ledger* self, Address pages, int rank,
                          int size) { new (self) Ledger(As<LedgerPage*>(pages), rank, size); })
      .def("note", &Ledger::Note, "entry"_a)
      .def("calls", &Ledger::calls, "rank"_a)
      .def("text", &Ledger::Text, "rank"_a, "number"_a);
  nb::class_<KernelShape>(m, "KernelShape");
  nb::class_<PyDeviceQueue>(m, "DeviceQueue")
      .def(nb::init<const std::string&, const DriverFunctions&, const std::vector<Address>&, Address, std::size_t>(),
           nb::kw_only(), "vendor"_a, "functions"_a, "streams"_a, "staging"_a, "slot_bytes"_a)
      .def("set_island", &PyDeviceQueue::SetIsland, "functions"_a, "handle"_a, "place"_a, "members"_a)
      .def("add_edge", &PyDeviceQueue::AddEdge, "slots"_a, "ready"_a, "credit"_a, "count"_a,
           "relay"_a.none() = nb::none())
      .def("bind", &PyDeviceQueue::Bind, nb::kw_only(), "plan"_a, "rank"_a, "size"_a, "dtype"_a, "send_count"_a,
           "recv_count"_a, "send_table"_a, "recv_table"_a, "order"_a, "edges"_a, "reduce"_a.none(), "scale"_a.none(),
           "divisor"_a, "p2p"_a = false, "local"_a.none() = nb::none())
      .def("run", &PyDeviceQueue::Run, "shape"_a, "send"_a, "recv"_a, "scratch"_a, "signature"_a, "stream"_a, "join"_a)
      .def_static("bind_kernel", &PyDeviceQueue::BindKernel, nb::kw_only(), "function"_a, "arguments"_a, "blocks"_a,
                  "threads"_a)
      .def("run_kernel", &PyDeviceQueue::RunKernel, "shape"_a, "send"_a, "recv"_a, "stream"_a)
      .def("join", &PyDeviceQueue::Join, "stream"_a)
      .def("capturing", &PyDeviceQueue::Capturing, "stream"_a)
      .def("idle", &PyDeviceQueue::Idle);
}

}  // namespace hetcoll
