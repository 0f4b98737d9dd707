// The queue of GPU work as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/capture.h"
#include "gpu/queue.h"

namespace hetcoll {

namespace nb = nanobind;

using Address = std::uintptr_t;
using KernelArgs = std::optional<std::tuple<Address, unsigned, unsigned, unsigned>>;

using CodecArgs = std::optional<std::tuple<int, KernelArgs, KernelArgs, KernelArgs, KernelArgs>>;  // the format first

// Function, arguments, those where it is captured, blocks, threads; and of each message its buffer and its end of a
// ring.
using MessagesArgs = std::tuple<Address, nb::bytes, nb::bytes, unsigned, unsigned, std::vector<std::uint16_t>,
                                std::vector<std::uint16_t>>;
using PlacedArgs = std::tuple<MessagesArgs, std::uint32_t, std::uint32_t>;  // MessagesPlace

// Of what a peer has: the edge, where it goes in RECV, its address here, bytes.
using PullArgs = std::tuple<std::uint16_t, std::size_t, Address, std::size_t>;

// Of this rank's own data: where it lies in SEND, where it goes in RECV, bytes.
using OwnArgs = std::optional<std::tuple<std::size_t, std::size_t, std::size_t>>;

using LocalArgs = std::optional<std::tuple<int, int, unsigned>>;

inline LocalReduction LocalOf(const LocalArgs& args) {
  if (!args) return {};
  const auto& [dtype, op, elements] = *args;
  return {dtype, op, elements};
}

inline constexpr std::size_t kMostMessages = 1 << 14;  // of a group: an Area is a small number

template <class Pointer>
Pointer As(Address address) {
  return reinterpret_cast<Pointer>(address);
}

inline Slots SlotsAt(Address slots, Address ready, Address credit, std::size_t slot_bytes, unsigned count) {
  return {As<std::byte*>(slots), As<std::uint64_t*>(ready), As<std::uint64_t*>(credit), slot_bytes, count};
}

inline DeviceKernel KernelOf(const KernelArgs& args) {
  if (!args) return {};
  const auto& [function, block, most_blocks, per_block] = *args;
  return {As<DeviceFunction>(function), block, most_blocks, per_block};
}

inline DeviceCodec CodecOf(const CodecArgs& args) {
  if (!args) return {};
  const auto& [format, round, encode, decode, add] = *args;
  return {KernelOf(round), KernelOf(encode), KernelOf(decode), KernelOf(add)};
}

// A queue that several threads may use: calls take turns, and none holds the interpreter's lock while the driver is at
// work, since a driver whose own queue is full waits for the GPU.
class PyDeviceQueue {
 public:
  PyDeviceQueue(const std::string& vendor, const DriverFunctions& functions, int priority, Address staging,
                std::size_t slot_bytes)
      : driver_(MakeDriver(vendor, functions)), queue_(driver_, priority, As<std::byte*>(staging), slot_bytes) {}

  std::uint16_t AddEdge(Address slots, Address ready, Address credit, unsigned count, std::shared_ptr<ProxyEdge> proxy,
                        bool near) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    return queue_.AddEdge({SlotsAt(slots, ready, credit, queue_.slot_bytes(), count), std::move(proxy), near});
  }

  void SetIsland(const DriverFunctions& functions, Address handle, int place, int members) {
    std::lock_guard lock(mutex_);
    queue_.SetIsland(std::make_unique<VendorCollectives>(functions, handle), place, members);
  }

  void SetCapture(const DriverFunctions& kernels, Address staging, Address words, Address seen) {
    std::lock_guard lock(mutex_);
    const Current current(*driver_);
    queue_.SetCapture(
        std::make_unique<DeviceCapture>(driver_, kernels, As<std::byte*>(staging),
                                        CaptureWords{As<std::uint64_t*>(words), As<const std::uint64_t*>(seen)}));
  }

  void DropCapture() {
    std::lock_guard lock(mutex_);
    const Current current(*driver_);
    queue_.SetCapture(nullptr);
  }

  void DropLanes() {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.DropLanes();
  }

  void AddCaptureEdge(std::uint16_t edge, Address slots, Address ready, Address credit, unsigned count) {
    std::lock_guard lock(mutex_);
    queue_.capture()->AddEdge(edge, SlotsAt(slots, ready, credit, queue_.slot_bytes(), count));
  }

  bool CaptureTaken(Address stream) {
    std::lock_guard lock(mutex_);
    return queue_.capture() != nullptr && queue_.capture()->Taken(As<DeviceStream>(stream));
  }

  std::shared_ptr<DeviceShape> Bind(const nb::bytes& encoded, int size, int dtype, std::size_t send_count,
                                    std::size_t recv_count, const std::vector<std::size_t>& send_table,
                                    const std::vector<std::size_t>& recv_table, const std::vector<std::uint32_t>& order,
                                    const std::vector<std::uint32_t>& levels, std::uint32_t lag,
                                    const std::vector<std::uint16_t>& edges, const KernelArgs& reduce,
                                    const KernelArgs& scale, unsigned divisor, bool p2p, bool ahead,
                                    const LocalArgs& local, const CodecArgs& codec, std::vector<std::size_t> sends,
                                    std::vector<std::size_t> recvs, const std::vector<PlacedArgs>& kernels) {
    const Plan plan({reinterpret_cast<const std::byte*>(encoded.c_str()), encoded.size()}, size);
    const auto type = static_cast<DType>(dtype);
    const Codec* sizes = codec ? FindCodec(type, static_cast<Format>(std::get<0>(*codec))) : nullptr;
    BoundPlan bound(plan, type, send_count, recv_count, send_table, recv_table, false, sizes);
    if (levels.size() != bound.steps.size() || lag == 0)
      throw PlanError("plan: a level for each step, and a lag wanted");
    if (sends.size() + recvs.size() > kMostMessages)
      throw PlanError("a group of more than " + std::to_string(kMostMessages) + " messages");
    std::vector<MessagesPlace> places;
    for (const auto& [args, before, level] : kernels) places.push_back({before, level});
    const Signals signals = ahead ? Signals::kTogether : p2p ? Signals::kApart : Signals::kFull;
    DeviceProgram program = Compile(bound, order, edges, signals, places);
    const bool apart = !sends.empty() || !recvs.empty();
    if (apart) program.Part(sends, recvs);
    auto recipe = std::make_shared<CaptureRecipe>(CaptureRecipe{std::move(bound), edges, levels, lag, std::move(sends),
                                                                std::move(recvs), std::move(places), program.near});
    auto shape =
        std::make_shared<DeviceShape>(DeviceShape{std::move(program), KernelOf(reduce), KernelOf(scale), ItemSize(type),
                                                  divisor, LocalOf(local), p2p, CodecOf(codec), std::move(recipe)});
    for (const auto& [args, before, level] : kernels) shape->messages.push_back(MessagesOf(args, apart));
    return shape;
  }

  static std::shared_ptr<DeviceShape> BindPulls(const std::vector<std::uint16_t>& readers,
                                                const std::vector<PullArgs>& pulls, const OwnArgs& own, bool aside) {
    std::vector<Pull> all;
    for (const auto& [edge, offset, peer, n] : pulls) all.push_back({edge, offset, As<const std::byte*>(peer), n});
    std::optional<OwnPart> part;
    if (own) part = OwnPart{std::get<0>(*own), std::get<1>(*own), std::get<2>(*own)};
    return std::make_shared<DeviceShape>(DeviceShape{DeviceProgram(readers, all, part, aside), {}, {}, 1, 1});
  }

  void Run(const std::shared_ptr<DeviceShape>& shape, Address send, Address recv, Address scratch,
           std::uint64_t signature, Address stream, bool join, bool capturing, Address residual) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.Enqueue(*shape, As<const std::byte*>(send), As<std::byte*>(recv), As<std::byte*>(scratch), signature,
                   As<DeviceStream>(stream), join, capturing, As<std::byte*>(residual));
  }

  void RunGroup(const std::shared_ptr<DeviceShape>& shape, const std::vector<std::byte*>& buffers,
                const std::vector<std::uint64_t>& signatures, Address stream, bool join, bool capturing) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.EnqueueGroup(*shape, buffers, signatures, As<DeviceStream>(stream), join, capturing);
  }

  static std::shared_ptr<KernelShape> BindKernel(Address function, const nb::bytes& arguments,
                                                 const nb::bytes& captured, unsigned blocks, unsigned threads) {
    const auto copy = [](const nb::bytes& from) {
      const auto* bytes = reinterpret_cast<const std::byte*>(from.c_str());
      if (from.size() < 2 * sizeof(void*)) throw PlanError("a kernel's arguments begin with its two buffers");
      return std::vector<std::byte>(bytes, bytes + from.size());
    };
    return std::make_shared<KernelShape>(
        KernelShape{As<DeviceFunction>(function), copy(arguments), copy(captured), blocks, threads});
  }

  void RunKernel(const std::shared_ptr<KernelShape>& shape, Address send, Address recv, Address stream,
                 bool capturing) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    queue_.EnqueueKernel(*shape, As<const std::byte*>(send), As<std::byte*>(recv), As<DeviceStream>(stream), capturing);
  }

  void Join(Address stream) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    const Current current(*driver_);
    queue_.Join(As<DeviceStream>(stream));
  }

  bool Capturing(Address stream) {
    nb::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    return queue_.Capturing(As<DeviceStream>(stream));
  }

  // While one lives the queue is not idle. A call makes one before it tells anybody to watch: who looked before it is
  // enqueued would see nothing, and would not look again.
  class Entering {
   public:
    explicit Entering(PyDeviceQueue& queue) : calls_(queue.entering_) { ++calls_; }
    ~Entering() { --calls_; }
    Entering(const Entering&) = delete;
    Entering& operator=(const Entering&) = delete;

   private:
    std::atomic<int>& calls_;
  };

  // Whoever enqueues may be held up, by a driver whose queue is full or a library that connects ranks; who looks after
  // that asks here.
  bool Idle() {
    if (entering_ > 0) return false;
    nb::gil_scoped_release release;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && queue_.Idle();
  }

  // No news while somebody enqueues.
  std::uint64_t Passed() {
    nb::gil_scoped_release release;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() ? passed_ = queue_.Passed() : passed_.load();
  }

  bool PullsDone() {
    nb::gil_scoped_release release;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && queue_.PullsDone();
  }

 private:
  MessagesKernel MessagesOf(const MessagesArgs& args, bool apart) {
    const auto& [function, arguments, captured, blocks, threads, buffers, rings] = args;
    const auto* bytes = reinterpret_cast<const std::byte*>(arguments.c_str());
    const auto* captured_bytes = reinterpret_cast<const std::byte*>(captured.c_str());
    if (buffers.empty() || buffers.size() != rings.size() || buffers.size() * kMessageStride > arguments.size() ||
        captured.size() != arguments.size())
      throw PlanError("a kernel of messages: wanted a buffer and a ring for each of them");
    std::vector<Place> places;
    for (const std::uint16_t buffer : buffers)
      places.push_back({static_cast<Area>(buffer + (apart ? static_cast<int>(Area::kMessages) : 0)), 0});
    const Current current(*driver_);
    return {As<DeviceFunction>(function),
            {bytes, bytes + arguments.size()},
            {captured_bytes, captured_bytes + captured.size()},
            blocks,
            threads,
            std::move(places),
            rings,
            std::make_shared<Event>(driver_)};
  }

  DeviceProgram Compile(const BoundPlan& plan, const std::vector<std::uint32_t>& order,
                        const std::vector<std::uint16_t>& edges, Signals signals,
                        const std::vector<MessagesPlace>& kernels) {
    std::lock_guard lock(mutex_);
    return queue_.Compile(plan, order, edges, signals, kernels);
  }

  std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  std::atomic<int> entering_{0};  // calls
  std::atomic<std::uint64_t> passed_{0};
  DeviceQueue queue_;
};

}  // namespace hetcoll
