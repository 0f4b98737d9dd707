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
    if (task_) engine_.KeepUntilDone(std::move(task_), std::move(slow_));
  }
  Persistent(const Persistent&) = delete;
  Persistent& operator=(const Persistent&) = delete;

  void Start() {
    if (active_) {
      PyErr_SetString(nb::module_::import_("hetcoll.errors").attr("ArgumentError").ptr(),
                      "start(): wanted wait() since the last start(), got none");
      throw nb::python_error();
    }
    if (!fast_ || !engine_.Start(key_, send_, recv_, task_)) work_ = slow_();
    active_ = true;
  }

  void Wait() {
    active_ = false;
    if (task_) engine_.Await(std::exchange(task_, nullptr));
    if (work_.is_valid()) std::exchange(work_, nb::object()).attr("wait")();
  }

  bool done() const {
    if (task_) return task_->state.load() != Task::State::kRunning;
    return !work_.is_valid() || nb::cast<bool>(work_.attr("done"));
  }

  nb::handle slow() const { return slow_; }
  nb::handle work() const { return work_; }

 private:
  PyEngine& engine_;
  CallKey key_;
  bool fast_;
  void* send_;
  void* recv_;
  nb::object slow_;
  std::shared_ptr<Task> task_;  // what the fast path has begun and not ended
  nb::object work_;             // what the slow path has begun
  bool active_ = false;
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
