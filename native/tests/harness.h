// For the engine's tests: checks, plans, numbers in every type, and ranks as threads of one process.
#pragma once

#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bytes.h"
#include "fake_verbs.h"
#include "host/engine.h"

namespace hetcoll::testing {

inline std::atomic<long> passed{0};
inline std::atomic<long> failed{0};

#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (condition) {                                              \
      ++::hetcoll::testing::passed;                               \
    } else if (++::hetcoll::testing::failed <= 20) {              \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (0)

// ---- Plans: the C++ twin of src/hetcoll/plan/ir.py's builder and of a few algorithms ----

class Draft {
 public:
  Draft(int size, int rank, std::uint32_t send_units, std::uint32_t recv_units, std::uint16_t collective = 0)
      : size_(size), rank_(rank) {
    head_.magic = kPlanMagic;
    head_.collective = collective;
    head_.send_units = send_units;
    head_.recv_units = recv_units;
  }

  static SpanRecord In(int unit) { return {0, unit, 1}; }
  static SpanRecord Out(int unit) { return {1, unit, 1}; }
  static SpanRecord Tmp(int unit) { return {2, unit, 1}; }
  static constexpr SpanRecord kNone{-1, 0, 0};

  int Send(int lane, SpanRecord src, int peer, int channel, std::initializer_list<int> after = {}) {
    return Add(Op::kSend, lane, src, kNone, peer, channel, after);
  }
  int Recv(int lane, SpanRecord dst, int peer, int channel, std::initializer_list<int> after = {}) {
    return Add(Op::kRecv, lane, kNone, dst, peer, channel, after);
  }
  int RecvReduce(int lane, SpanRecord dst, SpanRecord src, int peer, int channel,
                 std::initializer_list<int> after = {}) {
    return Add(Op::kRecvReduce, lane, src, dst, peer, channel, after);
  }
  int Local(Op op, int lane, SpanRecord dst, SpanRecord src, std::initializer_list<int> after = {}) {
    return Add(op, lane, src, dst, -1, 0, after);
  }
  int LocalStep(int lane, Collective kind, SpanRecord src, SpanRecord dst, int root,
                std::initializer_list<SpanRecord> parts) {
    const int step = Add(Op::kLocal, lane, src, dst, root, static_cast<int>(kind), {});
    steps_.back().part_begin = static_cast<std::uint32_t>(parts_.size());
    steps_.back().part_count = static_cast<std::uint32_t>(parts.size());
    parts_.insert(parts_.end(), parts);
    return step;
  }
  void Compress(bool on = true) { compress_ = on; }  // all messages from here on
  void Scratch(std::uint32_t copies) { head_.scratch_copies = copies; }
  void Stage() { head_.flags |= kStaged; }

  std::vector<std::byte> Encode() const {
    PlanHeader head = head_;
    head.steps = static_cast<std::uint32_t>(steps_.size());
    head.deps = static_cast<std::uint32_t>(deps_.size());
    head.parts = static_cast<std::uint32_t>(parts_.size());
    const auto [smaller, larger] = std::minmax(head.send_units, head.recv_units);
    if (smaller != larger && head.collective != kPointToPoint) head.place = static_cast<std::uint32_t>(rank_) * smaller;
    std::vector<std::byte> out;
    const auto append = [&out](const auto& records) {
      const auto bytes = std::as_bytes(std::span(records));
      std::copy(bytes.begin(), bytes.end(), std::back_inserter(out));
    };
    append(std::span(&head, 1));
    append(steps_);
    append(deps_);
    append(parts_);
    return out;
  }

 private:
  int Add(Op op, int lane, SpanRecord src, SpanRecord dst, int peer, int channel, std::initializer_list<int> after) {
    const auto begin = static_cast<std::uint32_t>(deps_.size());
    for (int step : after) {
      if (step >= 0 && steps_[static_cast<std::size_t>(step)].lane != lane) {
        deps_.push_back(static_cast<std::uint32_t>(step));
      }
    }
    steps_.push_back({static_cast<std::uint8_t>(op), static_cast<std::uint8_t>(lane),
                      static_cast<std::uint8_t>(channel), compress_ && peer >= 0, peer, src, dst, begin,
                      static_cast<std::uint32_t>(deps_.size()) - begin, 0, 0});
    head_.lanes = std::max<std::uint16_t>(head_.lanes, static_cast<std::uint16_t>(lane + 1));
    return static_cast<int>(steps_.size()) - 1;
  }

  int size_;
  int rank_;
  bool compress_ = false;
  PlanHeader head_{};
  std::vector<StepRecord> steps_;
  std::vector<std::uint32_t> deps_;
  std::vector<SpanRecord> parts_;
};

using Encoded = std::vector<std::byte>;
using Algorithm = Encoded (*)(int size, int rank);

// algorithms/islands.py with two ranks that are one island: each adds up its half, then gives it to the other.
inline Encoded IslandAllreduce(int n, int r) {
  Draft p(n, r, 2, 2);
  const int half = r % 2;
  p.LocalStep(0, Collective::kReduceScatter, Draft::kNone, Draft::Out(half), -1, {Draft::In(0), Draft::In(1)});
  p.LocalStep(0, Collective::kAllgather, Draft::Out(half), Draft::kNone, -1, {Draft::Out(0), Draft::Out(1)});
  p.LocalStep(0, Collective::kGather, Draft::kNone, Draft::kNone, 1, {});
  return p.Encode();
}

// algorithms/ring.py: reduce-scatter on channel 0, all-gather on channel 1.
inline Encoded RingAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  int grown = -1;
  for (int s = 1; s < n; ++s) {
    const int sent = (r - s + n) % n, got = (r - s - 1 + 2 * n) % n;
    p.Send(0, s == 1 ? Draft::In(sent) : Draft::Out(sent), (r + 1) % n, 0, {grown});
    grown = p.RecvReduce(1, Draft::Out(got), Draft::In(got), (r + n - 1) % n, 0);
  }
  int ready = grown;
  for (int s = 0; s < n - 1; ++s) {
    const int sent = (r - s + n) % n, got = (r - s - 1 + 2 * n) % n;
    p.Send(2, Draft::Out(sent), (r + 1) % n, 1, {ready});
    ready = p.Recv(3, Draft::Out(got), (r + n - 1) % n, 1);
  }
  return p.Encode();
}

// algorithms/direct.py: reduce-scatter and all-gather in one hop each.
inline Encoded DirectAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  for (int d = 1; d < n; ++d) p.Send(0, Draft::In((r + d) % n), (r + d) % n, 0);
  int reduced = -1;
  for (int d = 1; d < n; ++d) {
    reduced = p.RecvReduce(1, Draft::Out(r), d == 1 ? Draft::In(r) : Draft::Out(r), (r - d + n) % n, 0);
  }
  for (int d = 1; d < n; ++d) p.Send(2, Draft::Out(r), (r + d) % n, 1, {reduced});
  for (int d = 1; d < n; ++d) p.Recv(3, Draft::Out((r - d + n) % n), (r - d + n) % n, 1);
  return p.Encode();
}

// Everyone sends all to everyone, who keeps what came in scratch and then adds: local steps as well.
inline Encoded ScratchAllreduce(int n, int r) {
  Draft p(n, r, 1, 1);
  p.Scratch(static_cast<std::uint32_t>(n));
  for (int d = 1; d < n; ++d) p.Send(0, Draft::In(0), (r + d) % n, 0);
  int last = p.Local(Op::kCopy, 1, Draft::Tmp(r), Draft::In(0));
  for (int d = 1; d < n; ++d) last = p.Recv(1, Draft::Tmp((r - d + n) % n), (r - d + n) % n, 0);
  for (int i = 1; i < n; ++i) last = p.Local(Op::kReduce, 1, Draft::Tmp(0), Draft::Tmp(i));
  p.Local(Op::kCopy, 2, Draft::Out(0), Draft::Tmp(0), {last, n - 2});
  return p.Encode();
}

// algorithms/staged.py, one stretch.
inline Encoded StagedAllreduce(int n, int r) {
  Draft p(n, r, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(n));
  p.Scratch(1);
  p.Stage();
  int copied = -1;
  for (int i = 0; i < n; ++i) copied = p.Local(Op::kCopy, 0, Draft::Tmp(i), Draft::In(i));
  for (int d = 1; d < n; ++d) p.Send(1, Draft::Tmp((r + d) % n), (r + d) % n, 0, {copied});
  int reduced = -1;
  for (int d = 1; d < n; ++d) {
    reduced = p.RecvReduce(2, Draft::Tmp(r), Draft::Tmp(r), (r - d + n) % n, 0, {copied});
  }
  for (int d = 1; d < n; ++d) p.Send(3, Draft::Tmp(r), (r + d) % n, 1, {reduced});
  for (int d = 1; d < n; ++d) p.Recv(4, Draft::Out((r - d + n) % n), (r - d + n) % n, 1);
  p.Local(Op::kCopy, 5, Draft::Out(r), Draft::Tmp(r), {reduced});
  return p.Encode();
}

// algorithms/direct.py: rank 0 has something for all others.
inline Encoded DirectBroadcast(int n, int r) {
  Draft p(n, r, 1, 1);
  for (int peer = 1; r == 0 && peer < n; ++peer) p.Send(0, Draft::In(0), peer, 0);
  if (r > 0) p.Recv(0, Draft::Out(0), 0, 0);
  return p.Encode();
}

inline Encoded Message(int n, int r, int peer, bool sends) {
  Draft p(n, r, sends ? 1 : 0, sends ? 0 : 1, kPointToPoint);
  if (sends) {
    p.Send(0, Draft::In(0), peer, 2);
  } else {
    p.Recv(0, Draft::Out(0), peer, 2);
  }
  return p.Encode();
}

// ---- Numbers that every type holds exactly ----

// Element i of a rank: small enough that sums over four ranks stay exact in 8-bit floats.
inline unsigned Value(int rank, std::size_t i, DType dtype) {
  return Hash(i * 8 + static_cast<std::size_t>(rank) + 1) % (ItemSize(dtype) == 1 ? 2 : 60);
}

inline void Store(DType dtype, unsigned value, std::byte* at) {
  const auto store = [at](auto x) { std::memcpy(at, &x, sizeof x); };
  const auto narrow = [value](int mantissa, int bias) -> unsigned {
    if (value == 0) return 0;
    const int e = std::bit_width(value) - 1;
    return static_cast<unsigned>(e + bias) << mantissa | ((value ^ (1u << e)) << mantissa >> e);
  };
  std::memset(at, 0, ItemSize(dtype));
  switch (dtype) {
    case DType::kFloat16:
      return store(static_cast<std::uint16_t>(narrow(10, 15)));
    case DType::kBfloat16:
      return store(static_cast<std::uint16_t>(narrow(7, 127)));
    case DType::kFloat8E4m3fn:
      return store(static_cast<std::uint8_t>(narrow(3, 7)));
    case DType::kFloat8E5m2:
      return store(static_cast<std::uint8_t>(narrow(2, 15)));
    case DType::kFloat8E4m3fnuz:
      return store(static_cast<std::uint8_t>(narrow(3, 8)));
    case DType::kFloat8E5m2fnuz:
      return store(static_cast<std::uint8_t>(narrow(2, 16)));
    case DType::kFloat32:
    case DType::kComplex64:
      return store(static_cast<float>(value));
    case DType::kFloat64:
    case DType::kComplex128:
      return store(static_cast<double>(value));
    default:  // little-endian integers
      std::memcpy(at, &value, std::min<std::size_t>(sizeof value, ItemSize(dtype)));
  }
}

inline Bytes Input(int rank, std::size_t count, DType dtype) {
  Bytes out(count * ItemSize(dtype));
  for (std::size_t i = 0; i < count; ++i) Store(dtype, Value(rank, i, dtype), out.data() + i * ItemSize(dtype));
  return out;
}

inline Bytes Sum(int size, std::size_t count, DType dtype) {
  Bytes out(count * ItemSize(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    unsigned sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += Value(rank, i, dtype);
    if (dtype == DType::kBool) sum = sum > 0;
    Store(dtype, sum, out.data() + i * ItemSize(dtype));
  }
  return out;
}

// ---- Ranks ----

enum class Over { kShm, kTcp, kVerbs };  // TCP: socket pairs; verbs: fake devices
inline constexpr Over kAllLinks[] = {Over::kShm, Over::kTcp, Over::kVerbs};

// Connected sockets, and their other ends.
inline std::pair<std::vector<int>, std::vector<int>> SocketPairs(int count) {
  std::vector<int> mine, theirs;
  for (int s = 0; s < count; ++s) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    mine.push_back(pair[0]);
    theirs.push_back(pair[1]);
  }
  return {std::move(mine), std::move(theirs)};
}

// A connection over loopback.
inline std::pair<int, int> TcpPair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int mine = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* at = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, at, length) != 0 || listen(listener, 1) != 0 || getsockname(listener, at, &length) != 0 ||
      connect(mine, at, length) != 0) {
    std::abort();
  }
  const int theirs = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (theirs < 0) std::abort();
  close(listener);
  return {mine, theirs};
}

inline std::pair<std::vector<int>, std::vector<int>> TcpPairs(int count) {
  std::vector<int> mine, theirs;
  for (int s = 0; s < count; ++s) {
    const auto [one, other] = TcpPair();
    mine.push_back(one);
    theirs.push_back(other);
  }
  return {std::move(mine), std::move(theirs)};
}

inline void SleepMs(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
// Between two looks at what others do. Who yields on a busy machine runs again last of all; who slept runs next.
inline void Nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

struct JobOptions {
  int size = 2;
  Over over = Over::kShm;
  int stripes = 1;  // of TCP
  int rails = 1;    // of verbs: NICs of each rank
  std::size_t ring_bytes = 64 << 10;
  double spin_seconds = 20e-6;
  std::int64_t sleep_slice_ns = 100'000'000;
  std::string fault = {};
  std::int64_t recovery_ns = 1'000'000'000'000;
  FabricOptions fabric = {};
  std::function<void(Fabric&)> prepare = {};  // its devices, before links are made
  ShmOptions shm = {};
  Integrity integrity = Integrity::kOff;
  bool loopback = false;  // TCP: real sockets, which a Mender may make again
  bool sockets = false;   // TCP: real sockets in any case
};

class Job {
 public:
  explicit Job(const JobOptions& o) : size_(o.size) {
    static std::atomic<int> jobs{0};
    const std::string name = "hetcoll-test-" + std::to_string(getpid()) + "-" + std::to_string(jobs++);
    const bool crowded = o.size > static_cast<int>(std::thread::hardware_concurrency());
    for (int r = 0; r < o.size; ++r) {
      engines_.push_back(std::make_unique<Engine>(EngineOptions{
          r, o.size, 0x1234, name, r, o.spin_seconds, crowded, o.fault, o.sleep_slice_ns, o.recovery_ns, o.integrity}));
    }
    if (o.over == Over::kShm) {
      MapAll(o);
    } else {
      if (o.over == Over::kVerbs) AddNics(o);
      for (int r = 0; o.loopback && r < size_; ++r) engine(r).MendTcp();
      ConnectAll(o);
    }
  }

  int size() const { return size_; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  Fabric& fabric() { return *fabric_; }

  // Calls body(rank, its engine) on a thread for each rank, and waits for all.
  void Run(const std::function<void(int, Engine&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) threads.emplace_back([&, r] { body(r, engine(r)); });
    for (std::thread& t : threads) t.join();
  }

 private:
  void MapAll(const JobOptions& o) {
    const ShmLayout layout(size_, o.ring_bytes);
    const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
    std::vector<int> ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    // One mapping for all: TSan knows memory by its address.
    const auto segment = std::make_shared<ShmSegment>(fd, layout, o.shm);
    for (auto& engine : engines_) engine->AttachShm(segment->Share(), ranks);
    close(fd);
  }

  // NIC k of rank r is the fabric's number r * rails + k.
  void AddNics(const JobOptions& o) {
    fabric_ = std::make_unique<Fabric>(o.fabric);
    for (int r = 0; r < size_; ++r) {
      for (int k = 0; k < o.rails; ++k) {
        NicInfo nic = fabric_->AddNic("fake" + std::to_string(r) + "-" + std::to_string(k));
        nic.timeout = 10;  // 4 ms
        if (engine(r).AddNic(nic, Fabric::Api()) != k) std::abort();
      }
    }
    if (o.prepare) o.prepare(*fabric_);
  }

  void ConnectAll(const JobOptions& o) {
    for (int a = 0; a < size_; ++a) {
      for (int b = a + 1; b < size_; ++b) {
        for (int channel = 0; channel < kChannels; ++channel) {
          const auto [mine, theirs] = o.loopback || o.sockets ? TcpPairs(o.stripes) : SocketPairs(o.stripes);
          Attach(o, a, b, channel, mine);
          Attach(o, b, a, channel, theirs);
        }
      }
    }
  }

  void Attach(const JobOptions& o, int rank, int peer, int channel, const std::vector<int>& fds) {
    if (o.over == Over::kTcp) return engine(rank).AttachTcp(peer, channel, fds);
    std::vector<std::pair<int, std::string>> rails;
    for (int k = 0; k < o.rails; ++k) rails.emplace_back(k, "fake" + std::to_string(peer) + "-" + std::to_string(k));
    engine(rank).AttachVerbs(peer, channel, rails, o.ring_bytes, fds);
  }

  int size_;
  std::unique_ptr<Fabric> fabric_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// ---- Calls ----

inline constexpr double kPatience = 30;                        // seconds until a scenario counts as hung
inline constexpr std::int64_t kForeverNs = 1'000'000'000'000;  // a sleep that only a doorbell ends

inline std::uint64_t Descriptor(Algorithm algorithm, DType dtype, std::size_t count) {
  return reinterpret_cast<std::uintptr_t>(algorithm) ^ (static_cast<std::uint64_t>(dtype) << 56) ^ count;
}

inline std::shared_ptr<Shape> BindAllreduce(Engine& e, int size, int rank, Algorithm algorithm, DType dtype,
                                            std::size_t count) {
  return e.Bind(e.AddPlan(algorithm(size, rank)), dtype, ReduceOp::kSum, count, count, {}, {},
                Descriptor(algorithm, dtype, count), false);
}

inline std::shared_ptr<Shape> BindMessage(Engine& e, int size, int rank, int peer, bool sends, std::size_t nbytes) {
  return e.Bind(e.AddPlan(Message(size, rank, peer, sends)), DType::kUint8, ReduceOp::kSum, sends ? nbytes : 0,
                sends ? 0 : nbytes, {}, {}, nbytes, true);
}

inline Outcome RunToEnd(Engine& e, const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                        double seconds = kPatience) {
  std::shared_ptr<Task> pending;
  const Outcome outcome = e.RunPrompt(shape, send, recv, pending);
  return outcome == Outcome::kPending ? e.Drive(*pending, DeadlineNs(seconds)) : outcome;
}

inline double Seconds(std::int64_t since) { return static_cast<double>(NowNs() - since) * 1e-9; }

template <class Condition>
bool Within(double seconds, Condition&& condition) {
  for (const std::int64_t start = NowNs(); Seconds(start) < seconds; SleepMs(1)) {
    if (condition()) return true;
  }
  return condition();
}

// When all calls are over, both ends of every link have counted the same.
inline void CheckNothingUnderWay(Job& job, const char* what) {
  for (int from = 0; from < job.size(); ++from) {
    const std::vector<std::uint64_t> all = job.engine(from).Sent();
    for (int to = 0; to < job.size(); ++to) {
      std::uint64_t bytes = 0;
      for (int channel = 0; channel < kLinkChannels; ++channel)
        bytes += job.engine(from).Through(to, channel, true).first;
      CHECK(all[static_cast<std::size_t>(to)] == bytes, "%s: rank %d sent rank %d %zu bytes, counted as %zu", what,
            from, to, std::size_t{bytes}, std::size_t{all[static_cast<std::size_t>(to)]});
      for (int channel = 0; channel < kChannels && from != to; ++channel) {
        const auto sent = job.engine(from).Through(to, channel, true);
        const auto came = job.engine(to).Through(from, channel, false);
        CHECK(sent == came, "%s: rank %d sent rank %d %zu bytes in %zu messages, %zu in %zu came", what, from, to,
              std::size_t{sent.first}, std::size_t{sent.second}, std::size_t{came.first}, std::size_t{came.second});
      }
    }
  }
}

// One all-reduce on every rank, out of place and in place, against the sums.
inline void Allreduce(Job& job, Algorithm algorithm, DType dtype, std::size_t count, const char* what) {
  const Bytes want = Sum(job.size(), count, dtype);
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, job.size(), rank, algorithm, dtype, count);
    const Bytes in = Input(rank, count, dtype);
    Bytes out(in.size());
    Outcome outcome = RunToEnd(e, shape, in.data(), out.data());
    CHECK(outcome == Outcome::kDone, "%s: type %d, count %zu: %s", what, int(dtype), count, e.failure().text.c_str());
    CHECK(Same(out, want), "%s: type %d, count %zu, rank %d", what, int(dtype), count, rank);
    out = in;
    outcome = RunToEnd(e, shape, out.data(), out.data());
    CHECK(outcome == Outcome::kDone && Same(out, want), "%s: in place, type %d, count %zu", what, int(dtype), count);
  });
  CheckNothingUnderWay(job, what);
}

}  // namespace hetcoll::testing
