// For the tests of plans on GPU streams: a driver made of threads, and ranks whose actions, events, words, slots and
// proxies are the real ones.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <random>

#include "gpu/queue.h"
#include "harness.h"

namespace hetcoll::testing {

// One GPU. Its streams run on `queues` threads: fewer queues than streams make a waiting stream hold up the others.
class ThreadDriver final : public Driver {
 public:
  // `users` of its streams are the test's own, made first.
  ThreadDriver(int users, int queues, unsigned seed, bool late) : seed_(seed), late_(late) {
    for (int q = 0; q < queues; ++q) queues_.push_back(std::make_unique<Queue>());
    for (int s = 0; s < users; ++s) MakeStream(0);
    for (auto& queue : queues_) queue->thread = std::thread([this, q = queue.get()] { Work(*q); });
  }
  ~ThreadDriver() override {
    for (auto& queue : queues_) {
      Push(*queue, nullptr);
      queue->thread.join();
    }
  }
  DeviceStream stream(int i) { return &streams_[static_cast<std::size_t>(i)]; }

  std::intptr_t Activate() override { return 0; }
  void Restore(std::intptr_t) noexcept override {}
  void Copy(void* dst, const void* src, std::size_t n, DeviceStream s) override {
    On(s, [=] { std::memcpy(dst, src, n); });
  }
  void Launch(DeviceFunction function, unsigned, unsigned, void** params, DeviceStream s) override {
    const auto dst = *static_cast<std::byte**>(params[0]);
    const auto a = *static_cast<const std::byte**>(params[1]);
    const auto b = *static_cast<const std::byte**>(params[2]);
    const auto count = *static_cast<unsigned long long*>(params[3]);
    const auto* kernels = static_cast<const Kernels*>(function);
    On(s, [=] { kernels->reduce(dst, a, b, count, Sweep::kPlain); });
  }
  void WriteValue(std::uint64_t* counter, std::uint64_t value, DeviceStream s) override {
    On(s, [=] { std::atomic_ref(*counter).store(value, std::memory_order_release); });
  }
  void WaitValue(std::uint64_t* counter, std::uint64_t value, DeviceStream s) override {
    On(s, [=, this] {
      const std::int64_t until = NowNs() + std::int64_t{20'000'000'000};
      while (std::atomic_ref(*counter).load(std::memory_order_acquire) < value) {
        Nap();
        if (NowNs() > until) {
          stuck = true;
          return;
        }
      }
    });
  }
  DeviceStream MakeStream(int) override {
    streams_.push_back({queues_[streams_.size() % queues_.size()].get()});
    return &streams_.back();
  }
  void DestroyStream(DeviceStream) noexcept override {}
  DeviceEvent MakeEvent() override { return new std::shared_ptr<std::atomic<bool>>(); }
  void DestroyEvent(DeviceEvent e) noexcept override { delete static_cast<std::shared_ptr<std::atomic<bool>>*>(e); }
  void Record(DeviceEvent e, DeviceStream s) override {
    auto flag = std::make_shared<std::atomic<bool>>(false);
    *static_cast<std::shared_ptr<std::atomic<bool>>*>(e) = flag;
    On(s, [flag] { flag->store(true, std::memory_order_release); });
  }
  void WaitEvent(DeviceEvent e, DeviceStream s) override {
    const auto flag = *static_cast<std::shared_ptr<std::atomic<bool>>*>(e);
    On(s, [flag] {
      while (flag && !flag->load(std::memory_order_acquire)) Nap();
    });
  }
  bool Done(DeviceEvent e) override {
    const auto flag = *static_cast<std::shared_ptr<std::atomic<bool>>*>(e);
    return !flag || flag->load(std::memory_order_acquire);
  }
  bool Idle(DeviceStream s) override {
    Queue& queue = *static_cast<Stream*>(s)->queue;
    std::lock_guard lock(queue.mutex);
    return queue.left == 0;
  }
  bool Capturing(DeviceStream) override { return false; }
  std::uint64_t Capture(DeviceStream) override { return 0; }

  std::atomic<bool> stuck{false};

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::function<void()>> actions;
    std::size_t left = 0;
    std::thread thread;
  };
  struct Stream {
    Queue* queue;
  };

  void On(DeviceStream s, std::function<void()> action) { Push(*static_cast<Stream*>(s)->queue, std::move(action)); }
  static void Push(Queue& queue, std::function<void()> action) {
    std::lock_guard lock(queue.mutex);
    queue.actions.push_back(std::move(action));
    ++queue.left;
    queue.wake.notify_one();
  }
  void Work(Queue& queue) {
    std::minstd_rand random(seed_);
    for (;;) {
      std::unique_lock lock(queue.mutex);
      queue.wake.wait(lock, [&] { return !queue.actions.empty(); });
      const auto action = std::move(queue.actions.front());
      queue.actions.pop_front();
      lock.unlock();
      if (!action) return;
      if (late_ && random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      action();
      lock.lock();
      --queue.left;
    }
  }

  unsigned seed_;
  bool late_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::deque<Stream> streams_;
};

using Orders = std::vector<std::vector<std::uint32_t>>;

// For each rank the order of one possible run in which messages need free slots: what plan/order.py computes.
inline Orders SomeOrders(const std::vector<BoundPlan>& plans, unsigned slots, std::minstd_rand& random) {
  const std::size_t n = plans.size();
  Orders orders(n);
  std::vector<std::vector<bool>> done(n);
  std::vector<std::vector<std::uint32_t>> heads(n);
  std::map<std::tuple<std::size_t, std::size_t, int>, int> queued;
  std::size_t left = 0;
  for (std::size_t r = 0; r < n; ++r) {
    done[r].resize(plans[r].steps.size());
    left += plans[r].steps.size();
    heads[r].assign(plans[r].lane_begin.begin(), plans[r].lane_begin.end() - 1);
  }
  while (left > 0) {
    const std::size_t r = random() % n;
    const std::size_t lane = random() % heads[r].size();
    if (heads[r][lane] == plans[r].lane_begin[lane + 1]) continue;
    const std::uint32_t index = plans[r].order[heads[r][lane]];
    const BoundStep& s = plans[r].steps[index];
    bool ready = true;
    for (std::uint32_t d = s.dep_begin; d < s.dep_end; ++d) ready &= bool(done[r][plans[r].deps[d].step]);
    const auto peer = static_cast<std::size_t>(s.peer);
    if (ready && s.op == Op::kSend) {
      int& q = queued[{r, peer, s.channel}];
      ready = q < static_cast<int>(slots);
      q += ready;
    } else if (ready && s.op <= Op::kRecvReduce) {
      int& q = queued[{peer, r, s.channel}];
      ready = q > 0;
      q -= ready;
    }
    if (!ready) continue;
    done[r][index] = true;
    ++heads[r][lane];
    orders[r].push_back(index);
    --left;
  }
  return orders;
}

// The slots of all edges, and each rank's queue. Between hosts every rank has slots of its own, and proxies over
// stripes of sockets; `host` says where each rank is.
struct Gpus {
  Gpus(int n, int folded, unsigned seed, bool late, std::vector<int> where = {}, int links = 1,
       const std::string& fault = "", bool connect = true)
      : size(n),
        host(where.empty() ? std::vector<int>(static_cast<std::size_t>(n), 0) : std::move(where)),
        stripes(links),
        memory(static_cast<std::size_t>(2 * n * n) * kChannels * kEdge) {
    for (int rank = 0; rank < n; ++rank) {
      drivers.push_back(std::make_shared<ThreadDriver>(2, folded, seed + unsigned(rank), late));
      staging.emplace_back(kSlotBytes * kStagedMessages);
      queues.push_back(std::make_unique<DeviceQueue>(drivers.back(), 0, staging.back().data(), kSlotBytes));
      proxies.push_back(std::make_shared<Proxy>(ProxyOptions{2, true, rank, fault, kPartBytes}));
    }
    for (int a = 0; a < n; ++a) {
      for (int b = a + 1; b < n; ++b) {
        for (int channel = 0; connect && Apart(a, b) && channel < kChannels; ++channel) Connect(a, b, channel);
      }
    }
  }
  ~Gpus() {
    for (auto& proxy : proxies) proxy->Close();
  }

  // One of the two streams of a rank's user.
  DeviceStream User(int rank, int which) { return drivers[static_cast<std::size_t>(rank)]->stream(which); }

  bool Apart(int a, int b) const { return host[static_cast<std::size_t>(a)] != host[static_cast<std::size_t>(b)]; }

  void Connect(int a, int b, int channel) {
    const auto [mine, theirs] = SocketPairs(stripes);
    proxies[static_cast<std::size_t>(a)]->Connect(b, channel, mine);
    proxies[static_cast<std::size_t>(b)]->Connect(a, channel, theirs);
  }

  // What `rank` knows as the slots of an edge.
  Slots SlotsOf(int rank, int src, int dst, int channel) {
    const int copy = Apart(src, dst) && rank == dst;  // each end has its own slots
    const auto index = static_cast<std::size_t>(((src * size + dst) * kChannels + channel) * 2 + copy);
    std::byte* at = memory.data() + index * kEdge;
    const auto words = reinterpret_cast<std::uint64_t*>(at);
    const unsigned count = kSlots + static_cast<unsigned>(copy);  // ends that are apart may have different numbers
    return {at + 4096, words, words + count * kWordStride, kSlotBytes, count};
  }

  std::uint16_t Edge(int rank, int src, int dst, int channel) {
    auto [found, fresh] = edges.try_emplace({rank, src, dst, channel}, 0);
    if (fresh) {
      const auto r = static_cast<std::size_t>(rank);
      const Slots slots = SlotsOf(rank, src, dst, channel);
      const bool out = rank == src;
      auto edge = Apart(src, dst) ? proxies[r]->AddEdge(out ? dst : src, channel, out, slots) : nullptr;
      const bool near = !Apart(src, dst) && (src + dst + channel) % 2 == 1;
      found->second = queues[r]->AddEdge({slots, std::move(edge), near});
    }
    return found->second;
  }

  static constexpr std::size_t kSlotBytes = 1024;
  static constexpr unsigned kSlots = 2;
  static constexpr std::size_t kPartBytes = 100;  // so that longer messages go in parts
  static constexpr std::size_t kEdge = 4096 + (kSlots + 1) * kSlotBytes;

  int size;
  std::vector<int> host;
  int stripes;
  std::vector<std::byte> memory;
  std::vector<Bytes> staging;
  std::vector<std::shared_ptr<ThreadDriver>> drivers;
  std::vector<std::unique_ptr<DeviceQueue>> queues;
  std::vector<std::shared_ptr<Proxy>> proxies;
  std::uint64_t calls = 0;
  std::map<std::tuple<int, int, int, int>, std::uint16_t> edges;
};

// An all-reduce bound on every rank, and its memory.
struct Reduction {
  // `has_gpu` says which ranks have one; empty: all.
  Reduction(Gpus& gpus, Algorithm algorithm, std::size_t n, std::minstd_rand& random,
            const std::vector<bool>& has_gpu = {})
      : count(n), want(Sum(gpus.size, n, kType)) {
    std::vector<BoundPlan> bound;
    for (int rank = 0; rank < gpus.size; ++rank) {
      bound.emplace_back(Plan(algorithm(gpus.size, rank), gpus.size), kType, n, n, std::span<const std::size_t>{},
                         std::span<const std::size_t>{});
    }
    const Orders orders = SomeOrders(bound, Gpus::kSlots, random);
    for (int rank = 0; rank < gpus.size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      in.push_back(Input(rank, n, kType));
      out.emplace_back(in.back().size());
      scratch.emplace_back(bound[r].scratch_bytes);
      shapes.emplace_back();
      if (!has_gpu.empty() && !has_gpu[r]) continue;
      std::vector<std::uint16_t> edges;
      for (const BoundStep& s : bound[r].steps) {
        const bool talks = s.op <= Op::kRecvReduce;
        const bool sends = s.op == Op::kSend;
        edges.push_back(talks ? gpus.Edge(rank, sends ? rank : s.peer, sends ? s.peer : rank, s.channel) : 0);
      }
      DeviceProgram program = gpus.queues[r]->Compile(bound[r], orders[r], edges, Signals::kTogether);
      const auto* kernels = FindKernels(kType, ReduceOp::kSum);
      const DeviceKernel reduce{const_cast<Kernels*>(kernels), 1, 1, 1};
      shapes[r] = std::make_unique<DeviceShape>(DeviceShape{std::move(program), reduce, {}, ItemSize(kType), 1});
    }
  }

  // Enqueues it on one rank, on its user's stream `user`.
  void Enqueue(Gpus& gpus, int rank, std::uint64_t signature, int user, bool in_place, bool join) {
    const auto r = static_cast<std::size_t>(rank);
    std::byte* result = in_place ? in[r].data() : out[r].data();
    gpus.queues[r]->Enqueue(*shapes[r], in[r].data(), result, scratch[r].data(), signature, gpus.User(rank, user),
                            join);
  }

  static constexpr DType kType = DType::kInt32;
  std::size_t count;
  Bytes want;
  std::vector<Bytes> in, out, scratch;
  std::vector<std::unique_ptr<DeviceShape>> shapes;
};

// Three all-reduces on every rank, on two streams of the user's by turns; in place and out; the buffers written again
// by the user's streams in between.
inline void Reduce(Gpus& gpus, Algorithm algorithm, std::size_t count, std::minstd_rand& random, const char* what) {
  const auto n = static_cast<std::size_t>(gpus.size);
  Reduction call(gpus, algorithm, count, random);
  std::vector<std::vector<Bytes>> results(n, std::vector<Bytes>(3, Bytes(call.want.size())));
  for (int turn = 0; turn < 3; ++turn) {
    const int user = turn % 2;
    const bool in_place = turn == 1;
    const std::uint64_t signature = 0x9d5c ^ (++gpus.calls << 20);
    for (std::size_t r = 0; r < n; ++r) {  // enqueuing never waits, so one thread does it for all
      const int rank = static_cast<int>(r);
      const DeviceStream stream = gpus.User(rank, user);
      const std::byte* result = in_place ? call.in[r].data() : call.out[r].data();
      call.Enqueue(gpus, rank, signature, user, in_place, turn != 0);
      if (turn == 0) gpus.queues[r]->Join(stream);
      gpus.drivers[r]->Copy(results[r][static_cast<std::size_t>(turn)].data(), result, call.want.size(), stream);
      if (in_place) gpus.drivers[r]->Copy(call.in[r].data(), call.out[r].data(), 0, stream);
    }
    for (std::size_t r = 0; r < n; ++r) {
      const int rank = static_cast<int>(r);
      while (!gpus.queues[r]->Idle() || !gpus.drivers[r]->Idle(gpus.User(rank, user))) SleepMs(1);
      if (turn == 1) call.in[r] = Input(rank, count, Reduction::kType);
    }
  }
  for (std::size_t r = 0; r < n; ++r) {
    CHECK(!gpus.drivers[r]->stuck, "%s: %zu ranks, %zu elements: a stream waited for ever", what, n, count);
    for (std::size_t turn = 0; turn < 3; ++turn) {
      CHECK(results[r][turn] == call.want, "%s: %zu ranks, %zu elements, rank %zu, call %zu", what, n, count, r, turn);
    }
  }
}

}  // namespace hetcoll::testing
