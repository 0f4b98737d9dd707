#include "fiber.h"

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

namespace fake {
namespace {

thread_local Fiber* arriving = nullptr;

}  // namespace

Fiber::Fiber() {
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(void (*run)()) : stack_(std::make_unique_for_overwrite<unsigned char[]>(kStack)), bottom_(stack_.get()) {
#if defined(__SANITIZE_THREAD__)
  sanitizer_ = __tsan_create_fiber(0);
#endif
  restart(run);
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  if (stack_) __tsan_destroy_fiber(sanitizer_);
#endif
}

void Fiber::restart(void (*run)()) {
  run_ = run;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStack;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::enter, 0);
}

void Fiber::enter() {
  arriving->arrived();
  arriving->run_();  // never returns: it switches away for good
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
  swapcontext(&from.context_, &context_);
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
