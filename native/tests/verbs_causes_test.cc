// What errors of RDMA devices say: which device, port, address, queue pair and peer, the status, and the likely cause.

#include "verbs_harness.h"

namespace hetcoll::testing {
namespace {

void Says(const std::string& told, std::initializer_list<const char*> parts) {
  for (const char* part : parts) CHECK(told.find(part) != std::string::npos, "'%s' is not in: %s", part, told.c_str());
}

// A request that the device fails so, in the middle of calls.
void Status(ibv::WcStatus status, const char* name, const char* cause) {
  Job job({.size = 2, .over = Over::kVerbs});
  Settle(job);
  job.fabric().Change(0, [&](FakeNic& nic) {
    nic.fail_after = 0;
    nic.fail_status = status;
  });
  Rounds(job, 1, 1000, name);
  Says(Events(job.engine(0)),
       {"rank 0", "rank 1", "fake0-0 port 1 GID", "QP ", "fake1-0", name, cause, "going on over TCP"});
}

void Statuses() {
  Status(ibv::WcStatus::kRemAccessErr, "IBV_WC_REM_ACCESS_ERR", "wrong remote key");
  Status(ibv::WcStatus::kRetryExcErr, "IBV_WC_RETRY_EXC_ERR", "no route for that GID, or MTU mismatch");
  Status(ibv::WcStatus::kRemInvReqErr, "IBV_WC_REM_INV_REQ_ERR", "MTU mismatch");
}

// Ports of two MTUs use the smaller one: devices refuse what is larger at one end than at the other.
void UnequalMtu() {
  Job job({.size = 2, .over = Over::kVerbs, .fabric = {.mtus = {4096, 1024}}});
  Settle(job);
  job.fabric().Change(0, [](FakeNic& nic) { nic.largest_packet = 1024; });
  Rounds(job, 3, 20011, "unequal MTUs");
  CHECK(Counter(job.engine(0), "links_over_tcp") == 0, "%s", Links(job.engine(0)).c_str());
}

// Between them is something that takes less than both: empty messages get through, and no frame.
void SmallNetwork() {
  for (const int bad : {0, 1}) {
    const auto narrow = [&](Fabric& f) { f.Change(bad, [](FakeNic& nic) { nic.largest_packet = 1500; }); };
    Job job({.size = 2, .over = Over::kVerbs, .fabric = {.mtus = {4096, 4096}}, .prepare = narrow});
    Settle(job);
    Rounds(job, 2, 20011, "small network");
    CHECK(Counter(job.engine(0), "links_over_tcp") > 0, "%s", Links(job.engine(0)).c_str());
    Says(Events(job.engine(bad)), {"IBV_WC_RETRY_EXC_ERR", "packets of 4096 bytes did not: MTU mismatch"});
  }
}

// It takes less from some moment on, and from another one as much as before.
void ShrinkingNetwork() {
  Job job({.size = 2, .over = Over::kVerbs, .recovery_ns = 20'000'000, .fabric = {.mtus = {4096, 4096}}});
  Settle(job);
  Rounds(job, 1, 20011, "before");
  job.fabric().Change(0, [](FakeNic& nic) { nic.largest_packet = 1500; });
  Rounds(job, 2, 20011, "small network");
  Says(Events(job.engine(0)), {"going on over TCP", "IBV_WC_RETRY_EXC_ERR", "or MTU mismatch"});
  const auto tried = [&] { return Links(job.engine(0)).find("packets of 4096 bytes did not: MTU mismatch"); };
  CHECK(Within(kPatience, [&] { return tried() != std::string::npos; }), "%s", Links(job.engine(0)).c_str());
  job.fabric().Change(0, [](FakeNic& nic) { nic.largest_packet = 4096; });
  CHECK(Within(kPatience, [&] { return Counter(job.engine(0), "links_over_tcp") == 0; }), "%s",
        Links(job.engine(0)).c_str());
  Rounds(job, 2, 20011, "after");
}

constexpr Scenario kScenarios[] = {
    {"statuses", Statuses},
    {"unequalmtu", UnequalMtu},
    {"smallnet", SmallNetwork},
    {"shrinknet", ShrinkingNetwork},
};

}  // namespace

std::span<const Scenario> CauseScenarios() { return kScenarios; }

}  // namespace hetcoll::testing
