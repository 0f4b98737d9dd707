// What the tests of the verbs transport share: what engines say of their links, calls, and registered memory.
#pragma once

#include <span>
#include <string_view>

#include "fake_copier.h"
#include "harness.h"

namespace hetcoll::testing {

std::span<const Scenario> DyingScenarios();      // verbs_dying_test.cc
std::span<const Scenario> RecoveryScenarios();   // verbs_recovery_test.cc
std::span<const Scenario> CauseScenarios();      // verbs_causes_test.cc
std::span<const Scenario> IntegrityScenarios();  // verbs_integrity_test.cc
std::span<const Scenario> MendingScenarios();    // verbs_mending_test.cc
std::span<const Scenario> WindowScenarios();     // verbs_windows_test.cc
std::span<const Scenario> WindowEndScenarios();  // verbs_windows_ends_test.cc

inline std::uint64_t Counter(Engine& e, std::string_view name) {
  using List = std::vector<std::pair<std::string, std::uint64_t>>;
  for (const auto& [key, value] : e.AskVerbs([](VerbsHost& verbs) { return verbs.Counters(); }, List{})) {
    if (key == name) return value;
  }
  std::abort();
}

inline std::string Links(Engine& e) {
  return e.AskVerbs([](VerbsHost& verbs) { return verbs.Describe(); }, std::string());
}

inline std::string Events(Engine& e) {
  std::string all;
  for (const std::string& event :
       e.AskVerbs([](VerbsHost& verbs) { return verbs.TakeEvents(); }, std::vector<std::string>{})) {
    all += event + "\n";
  }
  return all;
}

inline bool Settled(Engine& e) {
  return e.AskVerbs([](VerbsHost& verbs) { return verbs.Settled(); }, false);
}

// Until handshakes are over, and devices have said so of all requests: who counts those from here on counts calls'.
inline void Settle(Job& job) {
  for (int r = 0; r < job.size(); ++r) {
    Engine& e = job.engine(r);
    CHECK(Within(kPatience, [&] { return Links(e).find("connecting") == std::string::npos && Settled(e); }), "%s",
          Links(e).c_str());
  }
}

// All ranks run the same all-reduce over and over, with other numbers each time.
inline void Rounds(Job& job, int rounds, std::size_t count, const std::string& what) {
  const Bytes want = Sum(job.size(), count, DType::kInt64);
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, job.size(), rank, RingAllreduce, DType::kInt64, count);
    const Bytes in = Input(rank, count, DType::kInt64);
    for (int i = 0; i < rounds; ++i) {
      Bytes buffer = in;
      const Outcome outcome = RunToEnd(e, shape, buffer.data(), buffer.data());
      CHECK(outcome == Outcome::kDone, "%s: round %d on rank %d: %s", what.c_str(), i, rank, e.failure().text.c_str());
      if (outcome != Outcome::kDone) return;
      CHECK(buffer == want, "%s: round %d, wrong numbers on rank %d", what.c_str(), i, rank);
    }
  });
}

// Rounds until something is so that takes its time, with rests between them: calls without a rest would take all
// processors from the threads that it waits for. False where it does not come.
template <class Condition>
bool RoundsUntil(Job& job, std::size_t count, const std::string& what, Condition&& condition) {
  return Within(kPatience, [&] {
    if (!condition()) Rounds(job, 1, count, what);
    return condition();
  });
}

inline constexpr std::int64_t kSoonNs = 1'000'000;

inline void Repair(FakeNic& nic) {
  nic.down = nic.stalled = nic.corrupt = false;
  nic.down_from = nic.stalled_from = ~std::uint64_t{0};
  nic.fail_after = nic.refuse_after = -1;
  nic.queue_pairs_left = nic.registrations_left = 1 << 20;
}

// Rounds until the NIC `bad` has lost its rail, which it has again then.
inline void LoseARail(Job& job, int bad, const std::string& what) {
  const std::uint64_t lost = Counter(job.engine(0), "lost_rails");
  job.fabric().Change(bad, [&](FakeNic& nic) { nic.down_from = nic.bytes + 30000; });
  RoundsUntil(job, 20011, what, [&] { return Counter(job.engine(0), "lost_rails") != lost; });
  job.fabric().Change(bad, Repair);
}

// Rounds until both ranks say that this often lost rails were taken up.
inline void RoundsUntilRecovered(Job& job, std::uint64_t times, std::size_t count, const std::string& what) {
  const auto all = [&] {
    return Counter(job.engine(0), "recovered_rails") >= times && Counter(job.engine(1), "recovered_rails") >= times;
  };
  CHECK(RoundsUntil(job, count, what, all), "%s: %s %s", what.c_str(), Links(job.engine(0)).c_str(),
        Links(job.engine(1)).c_str());
}

// Memory that all NICs of a rank know, as Python registers it; or (`device`) a device's, as a dma-buf.
class Registered {
 public:
  Registered(Job& job, int rank, int rails, Bytes& bytes, bool device = false) : engine_(job.engine(rank)) {
    std::vector<RegionKey> keys;
    for (int k = 0; k < rails; ++k) {
      FakeNic& nic = job.fabric().nic(rank * rails + k);
      mrs_.push_back(device ? job.fabric().RegDmaBuf(&nic.pd, bytes.data(), bytes.size())
                            : Fabric::Api().reg_mr(&nic.pd, bytes.data(), bytes.size(), 3));
      keys.push_back({k, mrs_.back()->lkey, mrs_.back()->rkey});
    }
    const std::byte* at = device ? FakeCopier::Far(bytes.data()) : bytes.data();
    handle_ = engine_.RegisterMemory(reinterpret_cast<std::uintptr_t>(at), bytes.size(), keys,
                                     device ? std::optional<std::uintptr_t>{0} : std::nullopt);
  }
  bool End() {
    if (!engine_.UnregisterMemory(handle_)) return false;
    for (ibv::Mr* mr : mrs_) Fabric::Api().dereg_mr(mr);
    mrs_.clear();
    return true;
  }

 private:
  Engine& engine_;
  std::vector<ibv::Mr*> mrs_;
  int handle_;
};

}  // namespace hetcoll::testing
