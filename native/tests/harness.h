// For the engine's tests: checks, plans, numbers in every type, and ranks as threads of one process.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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
  Draft(int, int rank, std::uint32_t send_units, std::uint32_t recv_units, std::uint16_t collective = 0) : rank_(rank) {
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
                std::initializer_list<SpanRecord> parts);
  void Compress(bool on = true) { compress_ = on; }  // all messages from here on
  void Scratch(std::uint32_t copies) { head_.scratch_copies = copies; }
  void Stage() { head_.flags |= kStaged; }

  std::vector<std::byte> Encode() const;

 private:
  int Add(Op op, int lane, SpanRecord src, SpanRecord dst, int peer, int channel, std::initializer_list<int> after);

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
Encoded IslandAllreduce(int n, int r);
// algorithms/ring.py: reduce-scatter on channel 0, all-gather on channel 1.
Encoded RingAllreduce(int n, int r);
// algorithms/direct.py: reduce-scatter and all-gather in one hop each.
Encoded DirectAllreduce(int n, int r);
// Everyone sends all to everyone, who keeps what came in scratch and then adds: local steps as well.
Encoded ScratchAllreduce(int n, int r);
// algorithms/staged.py, one stretch.
Encoded StagedAllreduce(int n, int r);
// algorithms/direct.py: rank 0 has something for all others.
Encoded DirectBroadcast(int n, int r);
Encoded Message(int n, int r, int peer, bool sends);

// ---- Numbers that every type holds exactly ----

// Elements of a rank, so small that sums over four ranks stay exact in 8-bit floats, and the sums over all ranks.
Bytes Input(int rank, std::size_t count, DType dtype);
Bytes Sum(int size, std::size_t count, DType dtype);

// ---- Ranks ----

enum class Over { kShm, kTcp, kVerbs };  // TCP: socket pairs; verbs: fake devices
inline constexpr Over kAllLinks[] = {Over::kShm, Over::kTcp, Over::kVerbs};

// Connected sockets, and their other ends.
std::pair<std::vector<int>, std::vector<int>> SocketPairs(int count);
// A connection over loopback.
std::pair<int, int> TcpPair(int card = 0);
// From here on what goes between the two is encrypted, by whoever takes them over.
void Encrypt(int a, int b);

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
  bool tls = false;       // TCP: encrypted
};

class Job {
 public:
  explicit Job(const JobOptions& o);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int size() const { return size_; }
  bool tls() const { return tls_; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  Fabric& fabric() { return *fabric_; }

  // Calls body(rank, its engine) on a thread for each rank, and waits for all.
  void Run(const std::function<void(int, Engine&)>& body);

 private:
  void MapAll(const JobOptions& o);
  // NIC k of rank r is the fabric's number r * rails + k.
  void AddNics(const JobOptions& o);
  void ConnectAll(const JobOptions& o);
  void Attach(const JobOptions& o, int rank, int peer, int channel, const std::vector<int>& fds);

  int size_;
  bool tls_;
  std::unique_ptr<Fabric> fabric_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// ---- Calls ----

inline constexpr double kPatience = 30;                        // seconds until a scenario counts as hung
inline constexpr std::int64_t kForeverNs = 1'000'000'000'000;  // a sleep that only a doorbell ends

std::uint64_t Descriptor(Algorithm algorithm, DType dtype, std::size_t count);
std::shared_ptr<Shape> BindAllreduce(Engine& e, int size, int rank, Algorithm algorithm, DType dtype,
                                     std::size_t count);
std::shared_ptr<Shape> BindMessage(Engine& e, int size, int rank, int peer, bool sends, std::size_t nbytes);
Outcome RunToEnd(Engine& e, const std::shared_ptr<Shape>& shape, const void* send, void* recv,
                 double seconds = kPatience);

inline double Seconds(std::int64_t since) { return static_cast<double>(NowNs() - since) * 1e-9; }

// What all threads of this process have taken until now, other processes' share not among it.
double ProcessorSeconds();

template <class Condition>
bool Within(double seconds, Condition&& condition) {
  for (const std::int64_t start = NowNs(); Seconds(start) < seconds; SleepMs(1)) {
    if (condition()) return true;
  }
  return condition();
}

// When all calls are over, both ends of every link have counted the same.
void CheckNothingUnderWay(Job& job, const char* what);

// One all-reduce on every rank, out of place and in place, against the sums.
void Allreduce(Job& job, Algorithm algorithm, DType dtype, std::size_t count, const char* what);

// ---- Scenarios ----

struct Scenario {
  const char* name;
  void (*run)();
  bool alone = false;  // all on one thread
};
inline constexpr bool kAlone = true;

// Runs those whose names begin so, or of "2/3" every third from the second on, and says how they went: what the
// program's exit code is.
int Play(std::span<const Scenario> scenarios, std::string_view which);

}  // namespace hetcoll::testing
