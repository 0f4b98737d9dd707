#include "fiber.h"

#include <algorithm>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, std::size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, std::size_t* size);
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void* fiber);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
#endif

// Keeps what a call keeps (System V ABI for AMD64, figure 3.4) on the stack, notes its top, and goes on on another.
// swapcontext(3) would ask the operating system for the signal mask each time: half of what GPU kernels took here.
extern "C" void fake_switch(void** from, void* to);
asm(R"(
  .text
  .p2align 4
  .hidden fake_switch
  .globl fake_switch
  .type fake_switch, @function
fake_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size fake_switch, .-fake_switch
)");

namespace fake {
namespace {

thread_local Fiber* arriving = nullptr;

}  // namespace

Fiber::Fiber() {
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(void (*run)())
    : stack_(std::make_unique_for_overwrite<unsigned char[]>(kStack)), run_(run), bottom_(stack_.get()) {
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_create_fiber(0);
#endif
  auto end = (reinterpret_cast<std::uintptr_t>(stack_.get()) + kStack) / 16 * 16;
  auto** words = reinterpret_cast<void**>(end);
  words[-1] = nullptr;  // what a call would have left: the stack is aligned as a function expects it
  words[-2] = reinterpret_cast<void*>(&Fiber::enter);
  std::fill(words - 8, words - 2, nullptr);
  top_ = words - 8;
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  if (stack_) __tsan_destroy_fiber(sanitizer_);
#endif
}

void Fiber::enter() {
  arriving->arrived();
  arriving->run_();
}

void Fiber::resume(Fiber& from) {
  before_ = &from;
  arriving = this;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, bottom_, size_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(sanitizer_, 0);
#endif
  fake_switch(&from.top_, top_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &arriving->before_->bottom_, &arriving->before_->size_);
#endif
}

// The first thing on a new stack.
void Fiber::arrived() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &before_->bottom_, &before_->size_);
#endif
}

}  // namespace fake
