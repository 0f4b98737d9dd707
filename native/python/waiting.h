// That a thread waits, for who must not look at its frames.
#pragma once

#include <nanobind/nanobind.h>

namespace hetcoll {

// Of a wait, for as long as it lives. `on_wait` is told, with true, that the wait has taken a moment, and says whether
// that is news; if so it is told the end of it, with false. None: nobody is.
class Waiting {
 public:
  explicit Waiting(nanobind::handle on_wait) : on_wait_(on_wait) {}
  ~Waiting() {
    if (!told_) return;
    try {
      on_wait_(false);
    } catch (nanobind::python_error& error) {
      error.discard_as_unraisable("hetcoll: the end of a wait");
    }
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  void Tell() {
    if (!told_ && !on_wait_.is_none()) told_ = nanobind::cast<bool>(on_wait_(true));
  }

 private:
  nanobind::handle on_wait_;
  bool told_ = false;
};

}  // namespace hetcoll
