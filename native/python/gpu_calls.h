// Calls on GPU buffers: from Python objects to work on streams, without Python in between where a call comes again.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/ledger.h"
#include "python/call_cache.h"
#include "python/plain_tensor.h"
#include "python/py_device_queue.h"
#include "python/py_engine.h"

namespace hetcoll {

// How a call is written down in one of the ledgers that this rank shares with others.
struct GpuNote {
  nb::object object;  // keeps the ledger
  Ledger* ledger;
  LedgerEntry entry;
};

// A call that is ready to be enqueued, and how it is written down for the other ranks.
struct GpuCall {
  std::shared_ptr<DeviceShape> program;  // one of these two
  std::shared_ptr<KernelShape> kernel;
  std::vector<GpuNote> notes;
  int number;  // by which others ask for it
  std::uint64_t descriptor;
  bool p2p;
  std::vector<std::uint64_t> descriptors;  // of the messages of a group; else empty
};

// What Python does for a call. The first two and `broken` raise.
struct GpuHooks {
  nb::callable differs;   // the rank at this place of this ledger called something else
  nb::callable refused;   // the driver does not take the stream, and why
  nb::callable captured;  // this program is to be captured on this stream: sees to what it needs, or raises. None: one
                          // kernel, which needs nothing
  nb::callable broken;    // a driver or a library refused to go on, with its words
  nb::callable started;   // something is or will be under way
  nb::callable work;      // a handle of calls, by a function that gives the current stream of their tensors' library
};

// The calls of one communicator on the GPU that is `device_id` of the type `device_type` (dlpack.h).
class GpuCalls {
 public:
  GpuCalls(PyEngine& engine, PyDeviceQueue& queue, int device_type, int device_id, GpuHooks hooks)
      : engine_(engine), queue_(queue), device_type_(device_type), device_id_(device_id), hooks_(std::move(hooks)) {}

  // The fast path: enqueues on the current stream what was called before with the same counts, and gives its handle.
  // None: it was not, or there is more to it, and nothing was done. Host memory is the engine's.
  nb::object Call(nb::handle number, nb::handle send, nb::handle recv, nb::handle op, nb::handle where) {
    const std::optional<GpuTensor> first = GpuTensor::Read(send.ptr());
    if (!first) return engine_.Call(number, send, recv, op, where);
    const std::int32_t collective = SmallNumber(number.ptr());
    if (collective < 0 || (collective < 32 && left_out_ >> collective & 1)) return nb::none();
    const std::int32_t root = SmallNumber(where.ptr());
    const int redop = engine_.OpNumber(op.ptr());
    if (root < 0 || redop < 0 || engine_.engine().forked() || engine_.engine().failed() || !Ours(*first)) {
      return nb::none();
    }
    std::optional<GpuTensor> second = first;
    if (!recv.is_none()) {
      second = GpuTensor::Read(recv.ptr());
      if (!second || !Ours(*second) || !Fit(collective, first->plain, second->plain)) return nb::none();
    }
    const bool in_place = first->plain.data == second->plain.data;
    if (in_place && collective == static_cast<int>(Collective::kAlltoall)) return nb::none();  // another program
    const std::shared_ptr<const GpuCall> call =  // its own: another thread may change the cache
        cache_.Find({static_cast<std::uint8_t>(collective), first->plain.dtype, static_cast<std::uint8_t>(redop), root,
                     first->plain.count, second->plain.count});
    const std::size_t nbytes = first->plain.count * ItemSize(first->plain.dtype);
    if (!call || engine_.sampling().IsDue(collective, nbytes, true)) return nb::none();
    Run(*call, reinterpret_cast<Address>(first->plain.data), reinterpret_cast<Address>(second->plain.data),
        reinterpret_cast<Address>(first->stream), true);
    return WorkOf(Py_TYPE(send.ptr()), first->stream);
  }

  // From now on `Call` knows it.
  void Remember(int collective, int dtype, int op, int root, std::size_t send_count, std::size_t recv_count,
                std::shared_ptr<const GpuCall> call) {
    cache_.Insert({static_cast<std::uint8_t>(collective), static_cast<DType>(dtype), static_cast<std::uint8_t>(op),
                   root, send_count, recv_count},
                  std::move(call));
  }

  // `Call` leaves these collectives to Python, by the bits of their numbers: where their buffers are counts.
  void LeaveOut(std::uint32_t collectives) { left_out_ = collectives; }

  // Enqueues a call after what is on `stream` now; with `join`, what comes on it later begins after the call.
  // `residual`: what is kept of what compression lost, or 0.
  void Run(const GpuCall& call, Address send, Address recv, Address stream, bool join, Address residual = 0) {
    Enter(call, stream, [&](bool capturing) {
      const std::uint64_t signature = engine_.engine().Enter(call.number, call.descriptor, call.p2p);
      if (call.kernel) {
        queue_.RunKernel(call.kernel, send, recv, stream, capturing);
      } else {
        queue_.Run(call.program, send, recv, (capturing ? capture_scratch_ : scratch_).load(std::memory_order_relaxed),
                   signature, stream, join, capturing, residual);
      }
    });
  }

  // The same for a group of messages, with the buffer of each: first all sends, then all receives.
  void RunGroup(const GpuCall& call, const std::vector<Address>& addresses, Address stream, bool join) {
    if (call.descriptors.empty() || addresses.size() != call.descriptors.size())
      throw nb::value_error("a buffer for each message of a group was wanted");
    std::vector<std::byte*> buffers;
    for (const Address address : addresses) buffers.push_back(As<std::byte*>(address));
    Enter(call, stream, [&](bool capturing) {
      std::vector<std::uint64_t> signatures;
      for (const std::uint64_t each : call.descriptors)
        signatures.push_back(engine_.engine().Enter(call.number, each, true));
      queue_.RunGroup(call.program, buffers, signatures, stream, join, capturing);
    });
  }

  // Device memory of at least the `scratch_bytes` of each program.
  void SetScratch(Address scratch) { scratch_.store(scratch, std::memory_order_relaxed); }
  // The same for captured programs.
  void SetCaptureScratch(Address scratch) { capture_scratch_.store(scratch, std::memory_order_relaxed); }

 private:
  // Writes the call down for the other ranks and enqueues it; `enqueue` is told whether it is captured.
  template <class Enqueue>
  void Enter(const GpuCall& call, Address stream, Enqueue&& enqueue) {
    const bool capturing = Capturing(call, stream);
    for (const GpuNote& note : call.notes) {
      if (const int peer = Write(note, capturing); peer >= 0) hooks_.differs(note.object, peer);
    }
    std::optional<std::string> broken;
    {
      const PyDeviceQueue::Entering entering(queue_);
      hooks_.started();
      try {
        enqueue(capturing);
      } catch (const Fault& fault) {
        broken = fault.what();
      }
    }
    if (broken) hooks_.broken(broken->c_str());  // in the middle of a call: others wait for this rank
  }

  // One at a time: a ledger of this rank may be that of several communicators.
  static int Write(const GpuNote& note, bool capturing) {
    const nb::ft_object_guard lock(note.object);
    return note.ledger->Note(capturing ? Ledger::Captured(note.entry) : note.entry);
  }

  // Whether a graph is being captured; refuses the call, before anything is said to the others, where it cannot be.
  bool Capturing(const GpuCall& call, Address stream) {
    bool capturing = false;
    try {
      capturing = queue_.Capturing(stream);
    } catch (const Fault& fault) {
      hooks_.refused(fault.what());
    }
    if (!capturing) return false;
    // A collective's part here may be its vendor's library's alone, or nothing, where other ranks' parts are not.
    if (call.program && (!call.program->p2p || call.program->program.by_copies())) {
      hooks_.captured(call.program, stream);
    } else if (call.kernel || !call.program->messages.empty()) {
      hooks_.captured(nb::none(), stream);
    }
    return true;
  }

  // The handle of calls on tensors of this type that were enqueued on their library's current stream. It says when all
  // that was enqueued so far is done, so there is one for all of them.
  nb::object WorkOf(PyTypeObject* type, void* on) {
    const KnownTypes::TensorType* tensor = KnownTypes::Instance().FindTensorType(type);
    if (tensor == nullptr) {  // Memory, which says itself on which stream it is: one handle for each of the last ones
      const auto fixed = [on] { return reinterpret_cast<Address>(on); };
      return Kept(memory_works_, on, kMostStreams, fixed);
    }
    const auto current = [find = tensor->current_stream, kind = device_type_, index = device_id_] {
      void* stream = nullptr;
      if (find(kind, index, &stream) != 0) throw nb::python_error();
      return reinterpret_cast<Address>(stream);
    };
    return Kept(works_, type, SIZE_MAX, current);
  }

  template <class Key>
  using Works = std::vector<std::pair<Key, nb::object>>;

  // The handle of `key`. Where there is none it is made, and those there are go where they are `most`.
  template <class Key, class Stream>
  nb::object Kept(Works<Key>& works, Key key, std::size_t most, const Stream& stream) {
    const auto find = [&] {
      const auto at = std::find_if(works.begin(), works.end(), [&](const auto& each) { return each.first == key; });
      return at == works.end() ? nb::object() : at->second;
    };
    {
      const nb::ft_lock_guard lock(works_mutex_);
      if (nb::object found = find(); found.is_valid()) return found;
    }
    nb::object made = hooks_.work(nb::cpp_function(stream));  // which runs Python, without the lock
    Works<Key> over;
    const nb::ft_lock_guard lock(works_mutex_);
    if (nb::object found = find(); found.is_valid()) return found;  // another thread's
    if (works.size() >= most) over.swap(works);
    return works.emplace_back(key, std::move(made)).second;
  }

  bool Ours(const GpuTensor& t) const { return t.device_type == device_type_ && t.device_id == device_id_; }

  bool Fit(int collective, const PlainTensor& send, const PlainTensor& recv) const {
    const std::size_t item = ItemSize(send.dtype);
    return send.dtype == recv.dtype &&
           AliasingAllowed(collective, send.data, send.count * item, recv.data, recv.count * item, engine_.rank());
  }

  PyEngine& engine_;
  PyDeviceQueue& queue_;
  std::int32_t device_type_;
  std::int32_t device_id_;
  GpuHooks hooks_;
  std::atomic<Address> scratch_{0};
  std::atomic<Address> capture_scratch_{0};
  std::uint32_t left_out_ = 0;
  CallCache<const GpuCall> cache_;
  static constexpr std::size_t kMostStreams = 16;
  nb::ft_mutex works_mutex_;  // of what follows
  Works<PyTypeObject*> works_;
  Works<void*> memory_works_;
};

}  // namespace hetcoll
