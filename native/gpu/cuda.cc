// The CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api): every function returns 0 or an error number.
#include "gpu/driver.h"
#include "transport/transport.h"

namespace hetcoll {
namespace {

using DevicePtr = unsigned long long;  // NOLINT: CUdeviceptr

class CudaDriver final : public Driver {
  static constexpr unsigned kWaitGeq = 0;         // CU_STREAM_WAIT_VALUE_GEQ
  static constexpr unsigned kWriteDefault = 0;    // CU_STREAM_WRITE_VALUE_DEFAULT: after a fence of the whole system
  static constexpr unsigned kNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
  static constexpr unsigned kDisableTiming = 2;   // CU_EVENT_DISABLE_TIMING
  static constexpr int kNotReady = 600;           // CUDA_ERROR_NOT_READY
  static constexpr int kCaptureStatusActive = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE

 public:
  explicit CudaDriver(const DriverFunctions& f) : signals_(f), context_(reinterpret_cast<void*>(Find(f, "context"))) {
    Take(f, "cuCtxGetCurrent", get_current_);
    Take(f, "cuCtxSetCurrent", set_current_);
    Take(f, "cuMemcpyAsync", copy_);
    Take(f, "cuLaunchKernel", launch_);
    Take(f, "cuStreamWriteValue64", write_);
    Take(f, "cuStreamWaitValue64", wait_);
    Take(f, "cuStreamCreateWithPriority", make_stream_);
    Take(f, "cuStreamDestroy", destroy_stream_);
    Take(f, "cuEventCreate", make_event_);
    Take(f, "cuEventDestroy", destroy_event_);
    Take(f, "cuEventRecord", record_);
    Take(f, "cuStreamWaitEvent", wait_event_);
    Take(f, "cuEventQuery", query_event_);
    Take(f, "cuStreamQuery", query_);
    Take(f, "cuStreamIsCapturing", capturing_);
    Take(f, "cuStreamGetCaptureInfo", capture_info_);
    Take(f, "cuThreadExchangeStreamCaptureMode", exchange_mode_);
    Take(f, "cuGetErrorName", error_name_);
  }

  std::intptr_t Activate() override {
    void* before = nullptr;
    Check(get_current_(&before), "cuCtxGetCurrent");
    if (before != context_) Check(set_current_(context_), "cuCtxSetCurrent");
    return reinterpret_cast<std::intptr_t>(before);
  }

  // A thread that had none keeps ours.
  void Restore(std::intptr_t before) noexcept override {
    auto* context = reinterpret_cast<void*>(before);
    if (context != nullptr && context != context_) set_current_(context);
  }

  void Copy(void* dst, const void* src, std::size_t n, DeviceStream stream) override {
    Check(copy_(reinterpret_cast<DevicePtr>(dst), reinterpret_cast<DevicePtr>(src), n, stream), "cuMemcpyAsync");
  }

  void Launch(DeviceFunction function, unsigned grid, unsigned block, void** params, DeviceStream stream) override {
    Check(launch_(function, grid, 1, 1, block, 1, 1, 0, stream, params, nullptr), "cuLaunchKernel");
  }

  void WriteValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) override {
    if (signals_.wanted()) return signals_.Write(*this, counter, value, stream);
    Check(write_(stream, reinterpret_cast<DevicePtr>(counter), value, kWriteDefault), "cuStreamWriteValue64");
  }

  void WaitValue(std::uint64_t* counter, std::uint64_t value, DeviceStream stream) override {
    if (signals_.wanted()) return signals_.Wait(*this, counter, value, stream);
    Check(wait_(stream, reinterpret_cast<DevicePtr>(counter), value, kWaitGeq), "cuStreamWaitValue64");
  }

  DeviceStream MakeStream(int priority) override {
    DeviceStream stream = nullptr;
    Check(make_stream_(&stream, kNonBlocking, priority), "cuStreamCreateWithPriority");
    return stream;
  }

  void DestroyStream(DeviceStream stream) noexcept override { destroy_stream_(stream); }

  DeviceEvent MakeEvent() override {
    DeviceEvent event = nullptr;
    Check(make_event_(&event, kDisableTiming), "cuEventCreate");
    return event;
  }

  void DestroyEvent(DeviceEvent event) noexcept override { destroy_event_(event); }
  void Record(DeviceEvent event, DeviceStream stream) override { Check(record_(event, stream), "cuEventRecord"); }
  void WaitEvent(DeviceEvent event, DeviceStream stream) override {
    Check(wait_event_(stream, event, 0), "cuStreamWaitEvent");
  }

  bool Done(DeviceEvent event) override {
    const Relaxed relaxed(exchange_mode_);
    const int code = query_event_(event);
    if (code == kNotReady) return false;
    Check(code, "cuEventQuery");
    return true;
  }

  bool Idle(DeviceStream stream) override {
    const Relaxed relaxed(exchange_mode_);
    const int code = query_(stream);
    if (code == kNotReady) return false;
    Check(code, "cuStreamQuery");
    return true;
  }

  bool Capturing(DeviceStream stream) override {
    int status = 0;
    Check(capturing_(stream, &status), "cuStreamIsCapturing");
    if (status > kCaptureStatusActive) throw Fault(FaultKind::kSystem, -1, "the capture on it has failed");
    return status == kCaptureStatusActive;
  }

  std::uint64_t Capture(DeviceStream stream) override {
    int status = 0;
    std::uint64_t id = 0;
    Check(capture_info_(stream, &status, &id, nullptr, nullptr, nullptr), "cuStreamGetCaptureInfo");
    return status == 0 ? 0 : id;
  }

 private:
  template <class Pointer>
  static void Take(const DriverFunctions& functions, const char* name, Pointer& pointer) {
    pointer = reinterpret_cast<Pointer>(Find(functions, name));
  }

  void Check(int code, const char* function) const {
    if (code == 0) return;
    const char* name = nullptr;
    error_name_(code, &name);
    throw Fault(FaultKind::kSystem, -1,
                std::string(function) + ": " + (name == nullptr ? "error " + std::to_string(code) : name));
  }

  SignalKernels signals_;
  void* context_;
  int (*get_current_)(void**);
  int (*set_current_)(void*);
  int (*copy_)(DevicePtr, DevicePtr, std::size_t, void*);
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*write_)(void*, DevicePtr, std::uint64_t, unsigned);
  int (*wait_)(void*, DevicePtr, std::uint64_t, unsigned);
  int (*make_stream_)(void**, unsigned, int);
  int (*destroy_stream_)(void*);
  int (*make_event_)(void**, unsigned);
  int (*destroy_event_)(void*);
  int (*record_)(void*, void*);
  int (*wait_event_)(void*, void*, unsigned);
  int (*query_event_)(void*);
  int (*query_)(void*);
  int (*capturing_)(void*, int*);
  int (*capture_info_)(void*, int*, std::uint64_t*, void**, const void**, std::size_t*);
  int (*exchange_mode_)(int*);
  int (*error_name_)(int, const char**);
};

}  // namespace

std::unique_ptr<Driver> MakeCudaDriver(const DriverFunctions& functions) {
  return std::make_unique<CudaDriver>(functions);
}

}  // namespace hetcoll
