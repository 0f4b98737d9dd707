// A collective that is started again and again with the same memory: MPI's persistent operations.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "python/call_cache.h"
#include "python/py_engine.h"

namespace hetcoll {

// Over what the fast path keeps of the call. `slow` begins it by the slow path and gives its Work, or raises what is in
// the way; it also keeps the call's arrays.
class Persistent {
 public:
  // `fast`: it is on host memory, so the fast path may know it by `key`.
  Persistent(PyEngine& engine, const CallKey& key, bool fast, std::uintptr_t send, std::uintptr_t recv,
             nb::callable slow)
      : engine_(engine),
        key_(key),
        fast_(fast),
        send_(reinterpret_cast<void*>(send)),
        recv_(reinterpret_cast<void*>(recv)),
        slow_(std::move(slow)) {}
  ~Persistent() {
    if (begun_.task) engine_.KeepUntilDone(std::move(begun_.task), std::move(slow_));
  }
  Persistent(const Persistent&) = delete;
  Persistent& operator=(const Persistent&) = delete;

  void Start() {
    if (!Leave(State::kIdle, State::kStarting)) {
      PyErr_SetString(nb::module_::import_("hetcoll.errors").attr("ArgumentError").ptr(),
                      "start(): wanted wait() since the last start(), got none");
      throw nb::python_error();
    }
    Begun begun;
    try {
      if (!fast_ || !engine_.Start(key_, send_, recv_, begun.task)) begun.work = slow_();
    } catch (...) {
      static_cast<void>(Leave(State::kStarting, State::kIdle));
      throw;
    }
    const nb::ft_lock_guard lock(mutex_);
    begun_ = std::move(begun);
    state_ = State::kActive;
  }

  // Several threads may wait for one start: all of them until it is over.
  void Wait() {
    const Begun begun = Look();
    try {
      if (begun.task) engine_.Await(begun.task);
      if (begun.work.is_valid()) begun.work.attr("wait")();
    } catch (...) {
      End(begun);
      throw;
    }
    End(begun);
  }

  bool done() {
    const Begun begun = Look();
    if (begun.task) return begun.task->state.load() != Task::State::kRunning;
    return !begun.work.is_valid() || nb::cast<bool>(begun.work.attr("done"));
  }

  nb::handle slow() const { return slow_; }
  nb::handle work() const { return begun_.work; }

 private:
  enum class State { kIdle, kStarting, kActive };
  struct Begun {
    std::shared_ptr<Task> task;  // by the fast path
    nb::object work;             // by the slow path
  };

  // False, and nothing done, where it is in another state.
  bool Leave(State from, State to) {
    const nb::ft_lock_guard lock(mutex_);
    if (state_ != from) return false;
    state_ = to;
    return true;
  }

  Begun Look() {
    const nb::ft_lock_guard lock(mutex_);
    return begun_;
  }

  // What was begun is over, unless another thread has said so and perhaps started anew.
  void End(const Begun& begun) {
    Begun over;  // what dies may run Python, and does so once the lock is free
    const nb::ft_lock_guard lock(mutex_);
    if (state_ != State::kActive || begun_.task != begun.task || !begun_.work.is(begun.work)) return;
    std::swap(over, begun_);
    state_ = State::kIdle;
  }

  PyEngine& engine_;
  CallKey key_;
  bool fast_;
  void* send_;
  void* recv_;
  nb::object slow_;
  nb::ft_mutex mutex_;  // of what follows
  State state_ = State::kIdle;
  Begun begun_;  // and not over; nothing where it was over at once
};

inline int TraversePersistent(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Persistent& op = *nb::inst_ptr<Persistent>(self);
  Py_VISIT(op.slow().ptr());
  Py_VISIT(op.work().ptr());
  return 0;
}

inline void BindPersistent(nb::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(TraversePersistent)}, {0, nullptr}};
  nb::class_<Persistent>(m, "Persistent", nb::type_slots(slots))
      .def(
          "__init__",
          [](Persistent* self, PyEngine& engine, int collective, int dtype, int op, int root, std::size_t send_count,
             std::size_t recv_count, bool fast, std::uintptr_t send, std::uintptr_t recv, nb::callable slow) {
            const CallKey key{static_cast<std::uint8_t>(collective),
                              static_cast<DType>(dtype),
                              static_cast<std::uint8_t>(op),
                              root,
                              send_count,
                              recv_count};
            new (self) Persistent(engine, key, fast, send, recv, std::move(slow));
          },
          nb::keep_alive<1, 2>())
      .def("start", &Persistent::Start, "Begin the operation. ArgumentError where the last one was not waited for.")
      .def("wait", &Persistent::Wait, "Block until what `start` has begun is complete, within the communicator's time.")
      .def_prop_ro("done", &Persistent::done, "Whether what `start` has begun is over. Never blocks.");
}

}  // namespace hetcoll
