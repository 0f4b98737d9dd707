// The Python face of the engine: src/hetcoll/_native.pyi says what each thing here is for.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/clock.h"
#include "engine/engine.h"
#include "python/call_cache.h"
#include "python/devices.h"
#include "python/host_buffer.h"
#include "python/xla.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hetcoll {
namespace {

constexpr std::size_t kHoldGilBytes = 16 << 10;  // longer messages release the interpreter's lock before they start
// The two halves of Collective.P2P, as src/hetcoll/selection.py calls them.
constexpr int kCallSend = 13;
constexpr int kCallSendRecv = 15;
constexpr std::int64_t kSignalSliceNs = 50'000'000;

// What a call ended with. kTimedOut: it is still in flight.
enum class Status : int { kDone = 1, kFailed = 2, kTimedOut = 3 };

struct Ticket {
  std::shared_ptr<Task> task;
};

// Where the two buffers of a collective may coincide: the same rule as communicator.py's.
bool AliasingAllowed(int collective, const HostBuffer& send, const HostBuffer& recv, int rank) {
  const std::byte* s = send.data();
  const std::byte* r = recv.data();
  if (s + send.nbytes() <= r || r + recv.nbytes() <= s) return true;
  switch (collective) {
    case 1:  // allgather
    case 5:  // gather
      return s == r + static_cast<std::size_t>(rank) * send.nbytes();
    case 2:  // reduce_scatter
    case 6:  // scatter
      return r == s + static_cast<std::size_t>(rank) * recv.nbytes();
    case kCallSendRecv:
      return false;
    default:
      return s == r && send.nbytes() == recv.nbytes();
  }
}

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

// A Python int from 0 on that fits; -1 for any other object.
std::int32_t SmallNumber(PyObject* object) {
  if (!PyLong_CheckExact(object)) return -1;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow != 0 || value < 0 || value > INT32_MAX ? -1 : static_cast<std::int32_t>(value);
}

class PyEngine {
 public:
  PyEngine(const EngineOptions& options, double timeout) : rank_(options.rank), timeout_(timeout), engine_(options) {}

  Engine& engine() { return engine_; }

  // Runs a collective that was run before with the same counts. False: it was not, and nothing was done.
  bool Call(int collective, nb::handle send, nb::handle recv, nb::handle op, nb::handle where) {
    // Only what needs no conversion: the rest is for the long way, and so are all errors.
    const std::int32_t root = SmallNumber(where.ptr());
    if (engine_.forked() || !op_labels_ || root < 0) return false;
    const bool in_place = recv.is_none();
    HostBuffer send_buffer;
    HostBuffer recv_buffer;
    if (!send_buffer.Read(send.ptr(), in_place && collective != kCallSend)) return false;
    if (!in_place) {
      if (!recv_buffer.Read(recv.ptr(), true) || recv_buffer.dtype() != send_buffer.dtype() ||
          !AliasingAllowed(collective, send_buffer, recv_buffer, rank_)) {
        return false;
      }
    }
    const int redop = OpNumber(op.ptr());
    if (redop < 0) return false;
    const HostBuffer& out = in_place ? send_buffer : recv_buffer;
    const CallKey key{static_cast<std::uint8_t>(collective),
                      send_buffer.dtype(),
                      static_cast<std::uint8_t>(redop),
                      root,
                      send_buffer.count(),
                      out.count()};
    const std::shared_ptr<Shape>* shape = cache_.Find(key);
    if (shape == nullptr) return false;
    // A message's shape has one buffer; which of the two it is, its plan knows.
    const std::size_t nbytes = std::max(send_buffer.nbytes(), out.nbytes());
    const Status status = Run(*shape, send_buffer.data(), out.data(), nbytes, timeout_);
    if (status != Status::kDone) on_stuck_(status);  // raises, or has waited until it was done
    TellNews();
    return true;
  }

  // Whether a message such as this went over the short way before: then RunMessages will know it, too.
  bool Knows(int kind, nb::handle object, nb::handle peer) {
    HostBuffer buffer;
    const std::int32_t rank = SmallNumber(peer.ptr());
    return rank >= 0 && buffer.Read(object.ptr(), kind != kCallSend) && FindMessage(kind, buffer, rank) != nullptr;
  }

  // Runs messages, each (kind, object, peer), beside each other to their end. False: one of them is not known, and
  // nothing was done.
  bool RunMessages(const nb::list& messages) {
    std::deque<HostBuffer> buffers;  // never moved
    std::vector<std::pair<std::shared_ptr<Shape>, void*>> parts;
    for (nb::handle message : messages) {
      const int kind = nb::cast<int>(message[0]);
      HostBuffer& buffer = buffers.emplace_back();
      if (!buffer.Read(nb::object(message[1]).ptr(), kind != kCallSend)) return false;
      const std::shared_ptr<Shape>* shape = FindMessage(kind, buffer, nb::cast<int>(message[2]));
      if (shape == nullptr) return false;
      parts.emplace_back(*shape, buffer.data());
    }
    std::vector<Ticket> tickets;
    {
      nb::gil_scoped_release release;
      for (const auto& [shape, data] : parts) tickets.push_back({engine_.Submit(shape, data, data)});
    }
    const std::int64_t deadline = DeadlineNs(timeout_);
    for (Ticket& ticket : tickets) {
      const Status status = DriveTo(*ticket.task, deadline);
      if (status == Status::kTimedOut) t_pending = ticket;
      if (status != Status::kDone) on_stuck_(status);  // raises, or has waited until it was done
    }
    return true;
  }

  Status RunShape(const std::shared_ptr<Shape>& shape, std::uintptr_t send, std::uintptr_t recv, double timeout) {
    const std::size_t nbytes = std::max(shape->bound.send_bytes, shape->bound.recv_bytes);
    const Status status = Run(shape, reinterpret_cast<void*>(send), reinterpret_cast<void*>(recv), nbytes, timeout);
    TellNews();
    return status;
  }

  Ticket Submit(const std::shared_ptr<Shape>& shape, std::uintptr_t send, std::uintptr_t recv, bool background) {
    nb::gil_scoped_release release;
    Ticket ticket{engine_.Submit(shape, reinterpret_cast<void*>(send), reinterpret_cast<void*>(recv))};
    if (background) engine_.DriveInBackground();
    return ticket;
  }

  Status Wait(const Ticket& ticket, double timeout) {
    const Status status = DriveTo(*ticket.task, DeadlineNs(timeout));
    TellNews();
    return status;
  }

  void Remember(int collective, int dtype, int op, int root, std::size_t send_count, std::size_t recv_count,
                std::shared_ptr<Shape> shape) {
    cache_.Insert({static_cast<std::uint8_t>(collective), static_cast<DType>(dtype), static_cast<std::uint8_t>(op),
                   root, send_count, recv_count},
                  std::move(shape));
  }

  // `nbytes` of memory that this host's ranks share, or nothing where there is none (a single rank, or TCP only).
  nb::object Empty(std::size_t nbytes) {
    std::shared_ptr<Heap> heap = engine_.heap();
    if (heap == nullptr) return nb::none();
    std::byte* at = heap->Allocate(nbytes);
    if (at == nullptr) {
      throw nb::value_error(("shared memory: wanted " + std::to_string(nbytes) + " bytes in one piece of this rank's " +
                             std::to_string(heap->capacity()))
                                .c_str());
    }
    struct Loan {
      std::shared_ptr<Heap> heap;
      std::byte* at;
      std::size_t nbytes;
    };
    auto loan = std::make_unique<Loan>(Loan{std::move(heap), at, nbytes});
    nb::capsule owner(loan.get(), [](void* p) noexcept {
      const std::unique_ptr<Loan> ended(static_cast<Loan*>(p));
      ended->heap->Free(ended->at, ended->nbytes);
    });
    static_cast<void>(loan.release());  // the capsule's now
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(at, {nbytes}, owner));
  }

  int AddNic(std::uintptr_t pd, int port, int gid_index, const nb::bytes& gid, int lid, std::uint32_t mtu,
             bool ethernet, const std::string& device, int traffic_class, int service_level, int timeout, int retries,
             int rnr_retries, double gbps) {
    std::string why;
    const VerbsApi* api = SystemVerbs(why);
    if (api == nullptr) throw Fault(FaultKind::kSystem, -1, why);
    if (gid.size() != 16) throw nb::value_error("a GID of 16 bytes was wanted");
    NicInfo info;
    info.device = device;
    info.pd = reinterpret_cast<ibv::Pd*>(pd);
    info.port = static_cast<std::uint8_t>(port);
    info.gid_index = static_cast<std::uint8_t>(gid_index);
    std::copy_n(reinterpret_cast<const std::uint8_t*>(gid.c_str()), 16, info.gid.begin());
    info.lid = static_cast<std::uint16_t>(lid);
    info.mtu = mtu;
    info.ethernet = ethernet;
    info.traffic_class = static_cast<std::uint8_t>(traffic_class);
    info.service_level = static_cast<std::uint8_t>(service_level);
    info.timeout = static_cast<std::uint8_t>(timeout);
    info.retries = static_cast<std::uint8_t>(retries);
    info.rnr_retries = static_cast<std::uint8_t>(rnr_retries);
    if (gbps > 0) info.gbps = gbps;
    return engine_.AddNic(std::move(info), *api);
  }

  // Keys are (NIC, local key, remote key).
  int RegisterMemory(std::uintptr_t address, std::size_t nbytes,
                     const std::vector<std::tuple<int, std::uint32_t, std::uint32_t>>& keys,
                     std::optional<std::uintptr_t> seen_at) {
    std::vector<RegionKey> list;
    for (const auto& [nic, lkey, rkey] : keys) list.push_back({nic, lkey, rkey});
    return engine_.RegisterMemory(address, nbytes, list, seen_at.value_or(address));
  }

  nb::dict Counters() {
    using List = std::vector<std::pair<std::string, std::uint64_t>>;
    nb::dict out;
    for (const auto& [name, value] : engine_.AskVerbs([](VerbsHost& verbs) { return verbs.Counters(); }, List{})) {
      out[name.c_str()] = value;
    }
    return out;
  }

  // What the last call of this thread that timed out has in flight.
  static Ticket pending() { return std::move(t_pending); }

  // The interned strings that name the reductions, by number.
  void SetOps(nb::tuple labels, nb::callable on_stuck, nb::callable on_interrupt, nb::callable on_news) {
    op_labels_ = std::move(labels);
    on_stuck_ = std::move(on_stuck);
    on_interrupt_ = std::move(on_interrupt);
    on_news_ = std::move(on_news);
  }

 private:
  const std::shared_ptr<Shape>* FindMessage(int kind, const HostBuffer& buffer, int peer) {
    return cache_.Find({static_cast<std::uint8_t>(kind), buffer.dtype(), static_cast<std::uint8_t>(ReduceOp::kSum),
                        peer, buffer.count(), buffer.count()});
  }

  int OpNumber(PyObject* op) const {
    for (int i = 0; i < kReduceOps; ++i) {
      if (PyTuple_GET_ITEM(op_labels_.ptr(), i) == op) return i;
    }
    return -1;
  }

  // A link that has lost something says so once, at the end of the call that went on without it.
  void TellNews() {
    if (engine_.has_news() && on_news_) on_news_();
  }

  Status Run(const std::shared_ptr<Shape>& shape, void* send, void* recv, std::size_t nbytes, double timeout) {
    std::shared_ptr<Task> pending;
    Outcome outcome;
    if (nbytes <= kHoldGilBytes) {
      outcome = engine_.RunPrompt(shape, send, recv, pending);
    } else {
      const std::shared_ptr<Shape> held = shape;  // another thread may change the cache that it lies in
      nb::gil_scoped_release release;
      outcome = engine_.RunPrompt(held, send, recv, pending);
    }
    if (outcome == Outcome::kDone) return Status::kDone;
    if (outcome == Outcome::kFailed) return Status::kFailed;
    const Status status = DriveTo(*pending, DeadlineNs(timeout));
    if (status == Status::kTimedOut) t_pending = {pending};
    return status;
  }

  // Waits without the interpreter's lock, looking at signals now and then.
  Status DriveTo(const Task& task, std::int64_t deadline) {
    for (;;) {
      const std::int64_t until = std::min(deadline, NowNs() + kSignalSliceNs);
      Outcome outcome;
      {
        nb::gil_scoped_release release;
        outcome = engine_.Drive(task, until);
      }
      if (outcome == Outcome::kDone) return Status::kDone;
      if (outcome == Outcome::kFailed) return Status::kFailed;
      if (PyErr_CheckSignals() != 0) Interrupt();
      if (NowNs() >= deadline) return Status::kTimedOut;
    }
  }

  // A signal handler raised: nothing of ours may touch the caller's memory any more once the exception leaves here.
  [[noreturn]] void Interrupt() {
    nb::python_error error;
    engine_.Halt(FaultKind::kAborted, rank_, "rank " + std::to_string(rank_) + " was interrupted");
    if (on_interrupt_) on_interrupt_();
    throw error;
  }

  int rank_;
  double timeout_;
  Engine engine_;
  CallCache cache_;
  static thread_local Ticket t_pending;
  nb::object op_labels_;
  nb::object on_interrupt_;
  nb::object on_news_;
  nb::object on_stuck_;
};

thread_local Ticket PyEngine::t_pending;

std::span<const std::byte> AsBytes(const nb::bytes& b) {
  return {reinterpret_cast<const std::byte*>(b.c_str()), b.size()};
}

const Kernels& KernelsOf(int dtype, ReduceOp op) {
  const Kernels* kernels = dtype < 0 || dtype >= kDTypes ? nullptr : FindKernels(static_cast<DType>(dtype), op);
  if (kernels == nullptr) throw nb::value_error("this reduction is not defined on this type");
  return *kernels;
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
  kernels.reduce(d.data(), x.data(), y.data(), d.nbytes() / item, stream);
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

// What the short way sees in an object: its address, count and type; None where it leaves it to the long way.
nb::object ReadMemory(nb::handle object, bool writable) {
  HostBuffer buffer;
  if (!buffer.Read(object.ptr(), writable)) return nb::none();
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.count(),
                        static_cast<int>(buffer.dtype()));
}

// A tensor of a known type on a GPU: address, count, type, DLPack's device type and number, current stream. None for
// all else.
nb::object ReadGpuTensor(nb::handle object) {
  const std::optional<GpuTensor> tensor = GpuTensor::Read(object.ptr());
  if (!tensor) return nb::none();
  const PlainTensor& plain = tensor->plain;
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(plain.data), plain.count, static_cast<int>(plain.dtype),
                        tensor->device_type, tensor->device_id, reinterpret_cast<std::uintptr_t>(tensor->stream));
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
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("DONE", Status::kDone)
      .value("FAILED", Status::kFailed)
      .value("TIMED_OUT", Status::kTimedOut);
  nb::class_<Shape>(m, "Shape").def_ro("id", &Shape::id);
  nb::class_<Ticket>(m, "Ticket").def_prop_ro("state", [](const Ticket& t) {
    return static_cast<int>(t.task ? t.task->state.load() : Task::State::kDone);
  });

  nb::class_<PyEngine>(m, "Engine")
      .def(
          "__init__",
          [](PyEngine* self, int rank, int size, std::uint64_t identity, const std::string& doorbell_name,
             int local_rank, double spin_seconds, bool oversubscribed, double timeout, const std::string& fault) {
            new (self) PyEngine({rank, size, identity, doorbell_name, local_rank, spin_seconds, oversubscribed, fault},
                                timeout);
          },
          nb::kw_only(), "rank"_a, "size"_a, "identity"_a, "doorbell_name"_a, "local_rank"_a, "spin_seconds"_a,
          "oversubscribed"_a, "timeout"_a, "fault"_a = "")
      .def("call", &PyEngine::Call, "collective"_a, "send"_a.none(), "recv"_a.none(), "op"_a.none(), "root"_a.none())
      .def("knows", &PyEngine::Knows, "kind"_a, "buffer"_a.none(), "peer"_a.none())
      .def("run_messages", &PyEngine::RunMessages, "messages"_a)
      .def("run", &PyEngine::RunShape, "shape"_a, "send"_a, "recv"_a, "timeout"_a)
      .def("submit", &PyEngine::Submit, "shape"_a, "send"_a, "recv"_a, "background"_a)
      .def("wait", &PyEngine::Wait, "ticket"_a, "timeout"_a)
      .def(
          "enter",
          [](PyEngine& e, int shape, std::uint64_t descriptor, bool p2p) {
            return e.engine().Enter(shape, descriptor, p2p);
          },
          "shape"_a, "descriptor"_a, "p2p"_a)
      .def("new_shape", [](PyEngine& e) { return e.engine().NewShape(); })
      .def("remember", &PyEngine::Remember)
      .def("set_ops", &PyEngine::SetOps)
      .def(
          "close", [](PyEngine& e) { e.engine().Close(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("empty", &PyEngine::Empty)
      .def("attach_shm",
           [](PyEngine& e, int fd, std::size_t ring_bytes, const std::vector<int>& local_ranks, int stores, int reads) {
             e.engine().AttachShm(fd, ring_bytes, local_ranks,
                                  {static_cast<SlotStores>(stores), static_cast<PrivateReads>(reads)});
           })
      .def("attach_tcp", [](PyEngine& e, int peer, int channel,
                            const std::vector<int>& fds) { e.engine().AttachTcp(peer, channel, fds); })
      .def(
          "attach_slots",
          [](PyEngine& e, int peer, int channel, const SlotAddresses& out, const SlotAddresses& in,
             std::size_t slot_bytes, unsigned count, std::uintptr_t aborts, unsigned ranks) {
            e.engine().AttachSlots(peer, channel, SlotsAt(out, slot_bytes, count, aborts, ranks),
                                   SlotsAt(in, slot_bytes, count, aborts, ranks));
          },
          nb::kw_only(), "peer"_a, "channel"_a, "out"_a, "into"_a, "slot_bytes"_a, "count"_a, "aborts"_a, "ranks"_a)
      .def("add_nic", &PyEngine::AddNic, nb::kw_only(), "pd"_a, "port"_a, "gid_index"_a, "gid"_a, "lid"_a, "mtu"_a,
           "ethernet"_a, "device"_a, "traffic_class"_a, "service_level"_a, "timeout"_a, "retries"_a, "rnr_retries"_a,
           "gbps"_a)
      .def(
          "attach_verbs",
          [](PyEngine& e, int peer, int channel, const std::vector<int>& fds,
             const std::vector<std::pair<int, std::string>>& rails,
             std::size_t ring_bytes) { e.engine().AttachVerbs(peer, channel, rails, ring_bytes, fds); },
          "peer"_a, "channel"_a, "fds"_a, "rails"_a, "ring_bytes"_a)
      .def("register_memory", &PyEngine::RegisterMemory, "address"_a, "nbytes"_a, "keys"_a, "seen_at"_a = nb::none())
      .def("unregister_memory", [](PyEngine& e, int handle) { return e.engine().UnregisterMemory(handle); })
      .def("links",
           [](PyEngine& e) {
             return e.engine().AskVerbs([](VerbsHost& verbs) { return verbs.Describe(); }, std::string("[]"));
           })
      .def_prop_ro(
          "settled",
          [](PyEngine& e) { return e.engine().AskVerbs([](VerbsHost& verbs) { return verbs.Settled(); }, true); })
      .def("counters", &PyEngine::Counters)
      .def("events",
           [](PyEngine& e) {
             return e.engine().AskVerbs([](VerbsHost& verbs) { return verbs.TakeEvents(); },
                                        std::vector<std::string>{});
           })
      .def("linked", [](PyEngine& e, int peer, int channel) { return e.engine().Linked(peer, channel); })
      .def("add_plan", [](PyEngine& e, const nb::bytes& encoded) { return e.engine().AddPlan(AsBytes(encoded)); })
      .def(
          "bind",
          [](PyEngine& e, int plan, int dtype, int op, std::size_t send_count, std::size_t recv_count,
             const std::vector<std::size_t>& send_table, const std::vector<std::size_t>& recv_table,
             std::uint64_t descriptor, bool p2p, bool skip_empty) {
            return e.engine().Bind(plan, static_cast<DType>(dtype), static_cast<ReduceOp>(op), send_count, recv_count,
                                   send_table, recv_table, descriptor, p2p, skip_empty);
          },
          "plan"_a, "dtype"_a, "op"_a, "send_count"_a, "recv_count"_a, "send_table"_a, "recv_table"_a, "descriptor"_a,
          "p2p"_a, "skip_empty"_a = false)
      .def("fail", [](PyEngine& e, int kind, int peer,
                      const std::string& text) { e.engine().Halt(static_cast<FaultKind>(kind), peer, text); })
      .def_prop_ro("failed", [](PyEngine& e) { return e.engine().failed(); })
      .def_prop_ro("forked", [](PyEngine& e) { return e.engine().forked(); })
      .def_prop_ro("failure",
                   [](PyEngine& e) {
                     const Failure f = e.engine().failure();
                     return nb::make_tuple(static_cast<int>(f.kind), f.peer, f.text);
                   })
      .def("peer_left", [](PyEngine& e, int peer) { e.engine().PeerLeft(peer); })
      .def(
          "describe", [](PyEngine& e) { return e.engine().Describe(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("pending", [](const PyEngine&) { return PyEngine::pending(); })
      .def("history", [](PyEngine& e, std::uint64_t sequence) { return e.engine().History(sequence); })
      .def_prop_ro("collectives", [](PyEngine& e) { return e.engine().collectives(); })
      .def("message_history", [](PyEngine& e, std::uint64_t number) { return e.engine().MessageHistory(number); })
      .def_prop_ro("moves", [](PyEngine& e) { return e.engine().moves(); })
      .def_prop_ro("naps", [](PyEngine& e) { return e.engine().naps(); })
      .def_prop_ro("messages", [](PyEngine& e) { return e.engine().messages(); })
      .def_prop_ro("scratch_bytes", [](PyEngine& e) { return e.engine().scratch_bytes(); });

  m.def("read_memory", &ReadMemory, "object"_a.none(), "writable"_a);
  m.def("know_dtype",
        [](nb::object dtype, int number) { KnownTypes::Instance().AddDtype(dtype.ptr(), static_cast<DType>(number)); });
  m.def("know_arrays", [](nb::handle probe) { return HostBuffer::KnowArrays(probe.ptr()); });
  m.def("know_tensor_type", [](nb::type_object type) { return KnownTypes::Instance().AddTensorType(type.ptr()); });
  m.def("read_gpu_tensor", &ReadGpuTensor, "object"_a.none());
  m.def("verbs_library", [] {
    std::string why;
    static_cast<void>(SystemVerbs(why));
    return why;
  });
  m.def("shm_bytes",
        [](int local_size, std::size_t ring_bytes) { return ShmLayout(local_size, ring_bytes).total_bytes; });
  m.def("cut_offset",
        [](std::size_t count, std::uint32_t units, std::uint32_t unit) { return CutOffset(count, units, unit); });
  m.def("kernel_isa", &KernelIsa);
  m.def("set_kernel_isa", &SetKernelIsa);
  m.def("reduce_bytes", &ReduceBytes);
  m.def("scale_bytes", &ScaleBytes);
  m.def("copy_bytes", [](std::uintptr_t dst, std::uintptr_t src, std::size_t n) {
    CopyBytes(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n, false);
  });
  m.def("wire", &Wire);
  BindDevices(m);
  BindXla(m);
}

}  // namespace hetcoll
