// The HIP runtime API (rocm.docs.amd.com, HIP API reference): every function returns 0 or an error number.
#include "gpu/driver.h"
#include "transport/transport.h"

namespace hetcoll {
namespace {

class HipDriver final : public Driver {
  static constexpr unsigned kWaitGeq = 0;                       // hipStreamWaitValueGte
  static constexpr std::uint64_t kAllBits = ~std::uint64_t{0};  // the mask of a wait
  static constexpr unsigned kNonBlocking = 1;                   // hipStreamNonBlocking
  static constexpr unsigned kDisableTiming = 2;                 // hipEventDisableTiming
  static constexpr int kCopyDefault = 4;          // hipMemcpyDefault: the runtime knows where pointers lie
  static constexpr int kNotReady = 600;           // hipErrorNotReady
  static constexpr int kCaptureStatusActive = 1;  // hipStreamCaptureStatusActive

 public:
  explicit HipDriver(const DriverFunctions& f) : signals_(f), device_(static_cast<int>(f.at("device"))) {
    Take(f, "hipGetDevice", get_device_);
    Take(f, "hipSetDevice", set_device_);
    Take(f, "hipMemcpyAsync", copy_);
    Take(f, "hipModuleLaunchKernel", launch_);
    Take(f, "hipStreamWriteValue64", write_);
    Take(f, "hipStreamWaitValue64", wait_);
    Take(f, "hipStreamCreateWithPriority", make_stream_);
    Take(f, "hipStreamDestroy", destroy_stream_);
    Take(f, "hipEventCreateWithFlags", make_event_);
    Take(f, "hipEventDestroy", destroy_event_);
    Take(f, "hipEventRecord", record_);
    Take(f, "hipStreamWaitEvent", wait_event_);
    Take(f, "hipEventQuery", query_event_);
    Take(f, "hipStreamQuery", query_);
    Take(f, "hipStreamIsCapturing", capturing_);
    Take(f, "hipStreamGetCaptureInfo", capture_info_);
    Take(f, "hipThreadExchangeStreamCaptureMode", exchange_mode_);
    Take(f, "hipGetErrorName", error_name_);
  }

  std::intptr_t Activate() override {
    int before = 0;
    Check(get_device_(&before), "hipGetDevice");
    if (before != device_) Check(set_device_(device_), "hipSetDevice");
    return before;
  }

  void Restore(std::intptr_t before) noexcept override {
    if (before != device_) set_device_(static_cast<int>(before));
  }

  void Copy(void* dst, const void* src, std::size_t n, DeviceStream stream) override {
    Check(copy_(dst, src, n, kCopyDefault, stream), "hipMemcpyAsync");
  }

  void Launch(DeviceFunction function, unsigned grid, unsigned block, void** params, DeviceStream stream) override {
    Check(launch_(function, grid, 1, 1, block, 1, 1, 0, stream, params, nullptr), "hipModuleLaunchKernel");
  }

  void WriteValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) override {
    if (signals_.wanted()) return signals_.Write(*this, counter, value, stream);
    Check(write_(stream, counter, value, 0), "hipStreamWriteValue64");
  }

  void WaitValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) override {
    if (signals_.wanted()) return signals_.Wait(*this, counter, value, stream);
    Check(wait_(stream, counter, value, kWaitGeq, kAllBits), "hipStreamWaitValue64");
  }

  DeviceStream MakeStream(int priority) override {
    DeviceStream stream = nullptr;
    Check(make_stream_(&stream, kNonBlocking, priority), "hipStreamCreateWithPriority");
    return stream;
  }

  void DestroyStream(DeviceStream stream) noexcept override { destroy_stream_(stream); }

  DeviceEvent MakeEvent() override {
    DeviceEvent event = nullptr;
    Check(make_event_(&event, kDisableTiming), "hipEventCreateWithFlags");
    return event;
  }

  void DestroyEvent(DeviceEvent event) noexcept override { destroy_event_(event); }
  void Record(DeviceEvent event, DeviceStream stream) override { Check(record_(event, stream), "hipEventRecord"); }
  void WaitEvent(DeviceEvent event, DeviceStream stream) override {
    Check(wait_event_(stream, event, 0), "hipStreamWaitEvent");
  }

  bool Done(DeviceEvent event) override {
    const Relaxed relaxed(exchange_mode_);
    const int code = query_event_(event);
    if (code == kNotReady) return false;
    Check(code, "hipEventQuery");
    return true;
  }

  bool Idle(DeviceStream stream) override {
    const Relaxed relaxed(exchange_mode_);
    const int code = query_(stream);
    if (code == kNotReady) return false;
    Check(code, "hipStreamQuery");
    return true;
  }

  bool Capturing(DeviceStream stream) override {
    int status = 0;
    Check(capturing_(stream, &status), "hipStreamIsCapturing");
    if (status > kCaptureStatusActive) throw Fault(FaultKind::kSystem, -1, "the capture on it has failed");
    return status == kCaptureStatusActive;
  }

  std::uint64_t Capture(DeviceStream stream) override {
    int status = 0;
    unsigned long long id = 0;
    Check(capture_info_(stream, &status, &id), "hipStreamGetCaptureInfo");
    return status == 0 ? 0 : id;
  }

 private:
  template <class Pointer>
  static void Take(const DriverFunctions& functions, const char* name, Pointer& pointer) {
    pointer = reinterpret_cast<Pointer>(Find(functions, name));
  }

  void Check(int code, const char* function) const {
    if (code == 0) return;
    const char* name = error_name_(code);
    throw Fault(FaultKind::kSystem, -1,
                std::string(function) + ": " + (name == nullptr ? "error " + std::to_string(code) : name));
  }

  SignalKernels signals_;
  int device_;
  int (*get_device_)(int*);
  int (*set_device_)(int);
  int (*copy_)(void*, const void*, std::size_t, int, void*);
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*write_)(void*, void*, std::uint64_t, unsigned);
  int (*wait_)(void*, void*, std::uint64_t, unsigned, std::uint64_t);
  int (*make_stream_)(void**, unsigned, int);
  int (*destroy_stream_)(void*);
  int (*make_event_)(void**, unsigned);
  int (*destroy_event_)(void*);
  int (*record_)(void*, void*);
  int (*wait_event_)(void*, void*, unsigned);
  int (*query_event_)(void*);
  int (*query_)(void*);
  int (*capturing_)(void*, int*);
  int (*capture_info_)(void*, int*, unsigned long long*);  // NOLINT: the runtime's type
  int (*exchange_mode_)(int*);
  const char* (*error_name_)(int);
};

}  // namespace

std::unique_ptr<Driver> MakeHipDriver(const DriverFunctions& functions) {
  return std::make_unique<HipDriver>(functions);
}

}  // namespace hetcoll
