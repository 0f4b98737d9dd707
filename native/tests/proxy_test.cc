// Plans on the streams of GPUs of several hosts, over proxies and sockets.

#include "gpus.h"

namespace hetcoll::testing {
namespace {

// Waits until every stream and proxy of a rank is done; false where they hang.
bool Settles(Gpus& gpus, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  const std::int64_t start = NowNs();
  while (!gpus.queues[r]->Idle() || !gpus.proxies[r]->Idle()) {
    if (Seconds(start) > kPatience) return false;
    SleepMs(1);
  }
  return true;
}

// Ends every proxy, as the verdict that all ranks hear of does.
void End(Gpus& gpus) {
  for (auto& proxy : gpus.proxies) proxy->Fail(FaultKind::kAborted, -1, "another rank failed");
  for (int rank = 0; rank < gpus.size; ++rank) CHECK(Settles(gpus, rank), "rank %d is stuck", rank);
}

// What some rank's proxy failed with, and whose: the first that is found.
std::pair<int, Failure> FirstFailure(Gpus& gpus) {
  const std::int64_t start = NowNs();
  while (Seconds(start) < kPatience) {
    for (int rank = 0; rank < gpus.size; ++rank) {
      Failure found = gpus.proxies[static_cast<std::size_t>(rank)]->AwaitFailure(NowNs() + 1'000'000);
      if (found.kind != FaultKind::kNone) return {rank, std::move(found)};
    }
  }
  return {-1, {}};
}

// Links that break the rules must end the call with a named error, and let all streams go.
void Break(const char* fault, FaultKind wanted) {
  std::minstd_rand random(3);
  Gpus gpus(3, 3, 1, false, {0, 1, 2}, 1, std::string(fault) + ",rank=1");
  Reduction call(gpus, RingAllreduce, 300, random);
  for (int rank = 0; rank < gpus.size; ++rank) call.Enqueue(gpus, rank, 1 << 20, 0, false, true);
  const auto [rank, found] = FirstFailure(gpus);
  CHECK(found.kind == wanted || found.kind == FaultKind::kPeerGone, "%s: %s", fault, found.text.c_str());
  CHECK(rank == 1 || found.peer == 1, "%s: rank %d names rank %d: %s", fault, rank, found.peer, found.text.c_str());
  End(gpus);
}

void Mismatch() {
  std::minstd_rand random(5);
  Gpus gpus(2, 3, 1, false, {0, 1});
  Reduction call(gpus, RingAllreduce, 300, random);
  call.Enqueue(gpus, 0, 1 << 20, 0, false, true);
  call.Enqueue(gpus, 1, 2 << 20, 0, false, true);
  const auto [rank, found] = FirstFailure(gpus);
  CHECK(found.kind == FaultKind::kMismatch && found.peer == 1 - rank, "%s", found.text.c_str());
  CHECK(found.text.find("receive from rank") != std::string::npos, "%s", found.text.c_str());
  End(gpus);
}

// A peer that leaves while it is needed.
void Leave() {
  std::minstd_rand random(5);
  Gpus gpus(3, 3, 1, false, {0, 1, 2});
  Reduction call(gpus, RingAllreduce, 300, random);
  call.Enqueue(gpus, 0, 1 << 20, 0, false, true);
  gpus.proxies[2]->Close();
  const auto [rank, found] = FirstFailure(gpus);
  CHECK(rank == 0 && found.kind == FaultKind::kPeerGone && found.peer == 2, "%d: %s", found.peer, found.text.c_str());
  SleepMs(50);  // time for what must not happen: nobody has heard of it yet
  CHECK(!gpus.queues[0]->Idle(), "the stream of rank 0 went on with what is not there");
  End(gpus);
}

// Edges that come to be, and messages that are due, after the end.
void Late() {
  std::minstd_rand random(5);
  Gpus gpus(2, 3, 1, false, {0, 1});
  End(gpus);
  Reduction call(gpus, DirectAllreduce, 300, random);
  for (std::uint64_t turn = 0; turn < 3; ++turn) call.Enqueue(gpus, 0, turn << 20, 0, false, true);
  CHECK(Settles(gpus, 0), "streams wait for a proxy that has ended");
}

}  // namespace

void GpusOfManyHosts() {
  struct Setting {
    std::vector<int> host;
    int stripes;
    int queues;
    bool late;
    const char* fault;
  };
  const Setting settings[] = {
      {{0, 1}, 1, 5, false, ""},       {{0, 1}, 2, 1, true, "delay=0.2,short=0.5"},
      {{0, 0, 1}, 3, 7, true, ""},     {{0, 1, 2}, 1, 2, false, "short=0.9,reorder=0.2"},
      {{0, 0, 1, 1}, 2, 1, false, ""},
  };
  std::minstd_rand random(7);
  for (const Setting& s : settings) {
    Gpus gpus(static_cast<int>(s.host.size()), s.queues, 11, s.late, s.host, s.stripes, s.fault);
    for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{250}}) {
      Reduce(gpus, RingAllreduce, count, random, "ring over proxies");
      Reduce(gpus, DirectAllreduce, count, random, "direct over proxies");
      Reduce(gpus, ScratchAllreduce, count, random, "scratch over proxies");
    }
    for (auto& proxy : gpus.proxies) {
      CHECK(proxy->Idle() && proxy->Describe().empty() && proxy->moves() > 0, "%s", proxy->Describe().c_str());
    }
  }
}

void BrokenProxies() {
  Break("drop=1", FaultKind::kCorrupt);
  Break("duplicate=1", FaultKind::kCorrupt);
  Break("close=2", FaultKind::kPeerGone);
  Mismatch();
  Leave();
  Late();
}

}  // namespace hetcoll::testing
