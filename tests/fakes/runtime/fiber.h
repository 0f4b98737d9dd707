// Threads of control that take turns on one thread of the host, each with a stack of its own. The sanitizers are told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fake {

class Fiber {
 public:
  static constexpr std::size_t kStack = 64 * 1024;

  Fiber();                        // the thread's own stack
  explicit Fiber(void (*run)());  // which never returns
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which runs, for this one; returns when somebody switches back to `from`.
  void resume(Fiber& from);
  bool holds(std::uintptr_t address) const { return address - reinterpret_cast<std::uintptr_t>(stack_.get()) < kStack; }

 private:
  static void enter();
  void arrived();

  std::unique_ptr<unsigned char[]> stack_;
  void* top_ = nullptr;  // of the stack, while another runs
  void (*run_)() = nullptr;
  Fiber* before_ = nullptr;  // which it was resumed from
  void* sanitizer_ = nullptr;
  const void* bottom_ = nullptr;
  std::size_t size_ = kStack;
};

}  // namespace fake
