// One vendor's GPU driver, as far as the engine calls it: everything here is enqueued on a stream and returns at once.
//
// Nothing is linked and no vendor header is read. Python has opened the library (src/hetcoll/vendors/devices/) and
// passes the addresses of its functions by name; cuda.cc and hip.cc know their signatures. Streams, events and
// functions are the driver's own handles. A call that fails is a Fault that names the function and the driver's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace hetcoll {

using DriverFunctions = std::map<std::string, std::uintptr_t>;
using DeviceStream = void*;
using DeviceEvent = void*;
using DeviceFunction = void*;

class Driver {
 public:
  virtual ~Driver() = default;
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Makes the device this thread's own, before anything else, on every thread; `Restore` makes it what it was. See
  // `Current`.
  virtual std::intptr_t Activate() = 0;
  virtual void Restore(std::intptr_t before) noexcept = 0;

  // Any direction; host memory must be page-locked.
  virtual void Copy(void* dst, const void* src, std::size_t n, DeviceStream stream) = 0;
  virtual void Launch(DeviceFunction function, unsigned grid, unsigned block, void** params, DeviceStream stream) = 0;

  // Counters in host memory that the device has mapped. A write becomes visible after everything before it on the
  // stream; a wait ends when the counter has reached `value`.
  virtual void WriteValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) = 0;
  virtual void WaitValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) = 0;

  // One that does not wait for the default stream. What is beyond the driver's priorities is the nearest of them.
  virtual DeviceStream MakeStream(int priority) = 0;
  virtual void DestroyStream(DeviceStream stream) noexcept = 0;

  virtual DeviceEvent MakeEvent() = 0;
  virtual void DestroyEvent(DeviceEvent event) noexcept = 0;
  virtual void Record(DeviceEvent event, DeviceStream stream) = 0;
  virtual void WaitEvent(DeviceEvent event, DeviceStream stream) = 0;

  // Whether what was recorded is done; what never was is.
  virtual bool Done(DeviceEvent event) = 0;

  // Whether all work on the stream is done. A Fault when the device has failed.
  virtual bool Idle(DeviceStream stream) = 0;

  // Whether what is enqueued on the stream becomes a part of a graph; a Fault where that graph is beyond repair.
  virtual bool Capturing(DeviceStream stream) = 0;
  // Which graph, by a number that each capture has of its own; 0: none.
  virtual std::uint64_t Capture(DeviceStream stream) = 0;
};

// For as long as it lives the device is this thread's own. A process may use several: what its other libraries believe
// to be current stays so.
class Current {
 public:
  explicit Current(Driver& driver) : driver_(driver), before_(driver.Activate()) {}
  ~Current() { driver_.Restore(before_); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Driver& driver_;
  std::intptr_t before_;
};

// Signals and waits as kernels of one thread (devices/kernels/signals.h), for graphs and for streams that can do
// neither. They come with `functions`: "bump" and "await", and the addresses of 8 bytes that stay 0 and of a word that
// ends all waits.
class SignalKernels {
 public:
  explicit SignalKernels(const DriverFunctions& functions);

  bool wanted() const { return bump_ != nullptr; }
  void Write(Driver& driver, std::uint64_t* counter, std::uint64_t value, DeviceStream stream) const {
    Write(driver, counter, zero_, value, stream);
  }
  void Wait(Driver& driver, std::uint64_t* counter, std::uint64_t value, DeviceStream stream) const {
    Wait(driver, counter, zero_, value, stream);
  }
  // Of what `base` holds when the stream gets there, and `more`.
  void Write(Driver& driver, std::uint64_t* counter, const std::uint64_t* base, std::uint64_t more,
             DeviceStream stream) const;
  void Wait(Driver& driver, std::uint64_t* counter, const std::uint64_t* base, std::uint64_t more,
            DeviceStream stream) const;

 private:
  DeviceFunction bump_ = nullptr;
  DeviceFunction await_ = nullptr;
  const std::uint64_t* zero_ = nullptr;
  void* abort_ = nullptr;
};

// `vendor` is "cuda" or "hip". PlanError-free, but throws Fault where a function is missing.
std::unique_ptr<Driver> MakeDriver(const std::string& vendor, const DriverFunctions& functions);

std::unique_ptr<Driver> MakeCudaDriver(const DriverFunctions& functions);
std::unique_ptr<Driver> MakeHipDriver(const DriverFunctions& functions);

// The function called `name`. A Fault where it is missing.
std::uintptr_t Find(const DriverFunctions& functions, const char* name);

// While it lives, this thread may ask the driver things that would end a capture that any thread has begun.
class Relaxed {
 public:
  explicit Relaxed(int (*exchange)(int*)) : exchange_(exchange) { exchange_(&mode_); }
  ~Relaxed() { exchange_(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  int (*exchange_)(int*);
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed; then the one before
};

// An event of a driver, destroyed with its owner.
class Event {
 public:
  explicit Event(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), event_(driver_->MakeEvent()) {}
  Event(Event&& other) noexcept : driver_(std::move(other.driver_)), event_(other.event_) { other.event_ = nullptr; }
  Event& operator=(Event&&) = delete;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) driver_->DestroyEvent(event_);
  }
  DeviceEvent get() const { return event_; }

 private:
  std::shared_ptr<Driver> driver_;
  DeviceEvent event_;
};

// A stream of a driver, destroyed with its owner.
class Stream {
 public:
  Stream(std::shared_ptr<Driver> driver, int priority)
      : driver_(std::move(driver)), stream_(driver_->MakeStream(priority)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() { driver_->DestroyStream(stream_); }
  DeviceStream get() const { return stream_; }

 private:
  std::shared_ptr<Driver> driver_;
  DeviceStream stream_;
};

// How far work on streams has come of which only the last end is known: it counts ends that it has waited for.
class Milestones {
 public:
  explicit Milestones(const std::shared_ptr<Driver>& driver) : driver_(driver), event_(driver) {}

  // Behind some work on this stream.
  void Pass(DeviceStream stream) {
    if (set_) return;
    driver_->Record(event_.get(), stream);
    set_ = true;
  }

  std::uint64_t Count() {
    if (set_ && driver_->Done(event_.get())) {
      ++count_;
      set_ = false;
    }
    return count_;
  }

 private:
  std::shared_ptr<Driver> driver_;
  Event event_;
  bool set_ = false;
  std::uint64_t count_ = 0;
};

}  // namespace hetcoll
