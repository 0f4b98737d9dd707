#include "operations.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "memory.h"
#include "settings.h"

namespace fake {
namespace {

bool fits(std::uintptr_t address, std::size_t nbytes, bool must_be_device, Block* block) {
  if (Memory::instance().span(address, nbytes, block) != kOk) return false;
  return !must_be_device || block->kind != Kind::kPageable;
}

// With jitter, larger copies move the last part first, and take their time: as an engine may, and so that whoever reads
// before the end is found out.
Error move(std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes) {
  std::size_t parts = settings().jitter && nbytes >= 4096 ? 4 : 1, length = (nbytes + parts - 1) / parts;
  for (std::size_t part = parts; part-- > 0;) {
    std::size_t at = part * length;
    Memory::instance().transfer(destination + at, source + at, std::min(length, nbytes - at));
    timespec nap{0, static_cast<long>(settings().jitter_us) * 1000 / 8};
    if (part > 0) nanosleep(&nap, nullptr);
  }
  return kOk;
}

// What was an allocation when the copy was enqueued must still be one when it runs.
bool still(const Block& block, std::uintptr_t address) {
  return block.kind == Kind::kPageable || Memory::instance().find(address).id == block.id;
}

std::uint64_t load(std::uintptr_t address, std::size_t width) {
  if (width == 4) return __atomic_load_n(reinterpret_cast<const std::uint32_t*>(address), __ATOMIC_ACQUIRE);
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(address), __ATOMIC_ACQUIRE);
}

bool holds(std::uint64_t now, std::uint64_t value, Compare compare, std::uint64_t mask, std::size_t width) {
  now &= mask;
  value &= mask;
  switch (compare) {
    case Compare::kGreaterOrEqual:
      if (!kVendor.cyclic) return now >= value;
      return width == 4 ? static_cast<std::int32_t>(now - value) >= 0 : static_cast<std::int64_t>(now - value) >= 0;
    case Compare::kEqual:
      return now == value;
    case Compare::kAnd:
      return (now & value) != 0;
    case Compare::kNor:
      return (~(now | value) & (width == 4 ? 0xFFFFFFFFu : ~0ull)) != 0;
  }
  return false;
}

Error check_word(std::uintptr_t address, std::size_t width, Block* block) {
  if (!settings().stream_waits) return kNotSupported;
  if (address % width != 0 || !fits(address, width, true, block)) return kInvalidValue;
  return kOk;
}

// The one thread that runs host functions, one at a time, as the drivers' does.
class HostThread {
 public:
  static HostThread& instance() {
    static HostThread* const thread = new HostThread;
    return *thread;
  }

  CompletionPtr submit(void (*function)(void*), void* argument) {
    auto done = std::make_shared<Completion>();
    std::lock_guard lock(mutex_);
    calls_.push_back({function, argument, done});
    submitted_.notify_one();
    return done;
  }

 private:
  struct Call {
    void (*function)(void*);
    void* argument;
    CompletionPtr done;
  };

  HostThread() {
    start_thread([this] { run(); });
  }

  [[noreturn]] void run() {
    permit_calls(false);
    for (;;) {
      std::unique_lock lock(mutex_);
      submitted_.wait(lock, [this] { return !calls_.empty(); });
      Call call = calls_.front();
      calls_.pop_front();
      lock.unlock();
      call.function(call.argument);
      call.done->finish();
    }
  }

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<Call> calls_;
};

}  // namespace

bool reaches(const Device& device, std::uintptr_t address, std::size_t nbytes) {
  Block block;
  if (!fits(address, nbytes, true, &block)) return false;
  bool own = !block.on_device() || block.device == device.ordinal || block.kind == Kind::kManaged;
  return own || (device.peers.load() >> block.device & 1);
}

Error copy(Stream* stream, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes, Direction direction) {
  if (nbytes == 0) return kOk;
  Block to, from;
  bool to_device = direction == Direction::kHostToDevice || direction == Direction::kDeviceToDevice;
  bool from_device = direction == Direction::kDeviceToHost || direction == Direction::kDeviceToDevice;
  if (!fits(destination, nbytes, to_device, &to) || !fits(source, nbytes, from_device, &from)) return kInvalidValue;
  bool capturing = false;
  {
    std::lock_guard lock(state_mutex());
    capturing = stream->capture != nullptr;
  }
  Body body = [=](Execution&) {
    if (!still(to, destination) || !still(from, source)) return kIllegalAddress;
    return move(destination, source, nbytes);
  };
  if (from.kind == Kind::kPageable && !capturing) {
    auto* bytes = reinterpret_cast<const unsigned char*>(source);
    auto staged = std::make_shared<std::vector<unsigned char>>(bytes, bytes + nbytes);
    body = [=](Execution&) {
      if (!still(to, destination)) return kIllegalAddress;
      return move(destination, reinterpret_cast<std::uintptr_t>(staged->data()), nbytes);
    };
  }
  CompletionPtr done;
  if (Error error = enqueue(stream, "copy", std::move(body), {}, &done)) return error;
  if (to.kind == Kind::kPageable && done) {
    done->wait();
    return static_cast<Error>(stream->device->fault.load());
  }
  return kOk;
}

Error copy_and_wait(Stream* stream, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes,
                    Direction direction) {
  {
    std::lock_guard lock(state_mutex());
    if (Error error = refuse_any_capture()) return error;
  }
  if (Error error = copy(stream, destination, source, nbytes, direction)) return error;
  return synchronize_stream(stream);
}

Error fill(Stream* stream, std::uintptr_t destination, std::uint32_t value, std::size_t width, std::size_t count) {
  if (count == 0) return kOk;
  Block to;
  if (destination % width != 0 || !fits(destination, width * count, true, &to)) return kInvalidValue;
  return enqueue(stream, "fill", [=](Execution&) {
    if (!still(to, destination)) return kIllegalAddress;
    if (value == 0) {
      Memory::instance().clear(destination, width * count);
      return kOk;
    }
    auto* bytes = reinterpret_cast<unsigned char*>(destination);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(bytes + i * width, &value, width);
    return kOk;
  });
}

Error wait_value(Stream* stream, std::uintptr_t address, std::uint64_t value, Compare compare, std::uint64_t mask,
                 std::size_t width) {
  Block block;
  if (Error error = check_word(address, width, &block)) return error;
  if (settings().signal_only && (block.kind != Kind::kSignal || width != 8)) return kInvalidValue;
  return enqueue(stream, "wait value", [=](Execution& execution) {
    if (!still(block, address)) return kIllegalAddress;
    return execution.until([=] { return holds(load(address, width), value, compare, mask, width); },
                           [=] {
                             return "for the " + std::to_string(8 * width) + "-bit value at " +
                                    std::to_string(address - block.base) + " of a block of " +
                                    std::to_string(block.size) + " bytes: it is " +
                                    std::to_string(load(address, width)) + ", wanted (comparison " +
                                    std::to_string(static_cast<unsigned>(compare)) + ") " + std::to_string(value);
                           });
  });
}

Error write_value(Stream* stream, std::uintptr_t address, std::uint64_t value, std::size_t width) {
  Block block;
  if (Error error = check_word(address, width, &block)) return error;
  return enqueue(stream, "write value", [=](Execution&) {
    if (!still(block, address)) return kIllegalAddress;
    if (width == 4) {
      __atomic_store_n(reinterpret_cast<std::uint32_t*>(address), static_cast<std::uint32_t>(value), __ATOMIC_RELEASE);
    } else {
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(address), value, __ATOMIC_RELEASE);
    }
    return kOk;
  });
}

void start_host_thread() { HostThread::instance(); }

Error host_function(Stream* stream, void (*function)(void*), void* argument) {
  if (!function) return kInvalidValue;
  return enqueue(stream, "host function", [=](Execution&) {
    HostThread::instance().submit(function, argument)->wait();
    return kOk;
  });
}

Error release_in_order(Stream* stream, std::uintptr_t base) {
  Block block = Memory::instance().find(base);
  if (block.base != base || block.kind == Kind::kPageable) return kInvalidValue;
  return enqueue(stream, "free", [base](Execution&) {
    Error error = Memory::instance().release(base, Kind::kDevice);
    return error == kInvalidValue ? kIllegalAddress : error;
  });
}

}  // namespace fake
