// The engine end to end: ranks are threads of this process, over one memfd segment or over socket pairs. Meant to be
// run under ASan, UBSan and TSan as well. `hetcoll_engine_test [NAME]` runs the scenarios whose names begin so.

#include <string_view>

#include "harness.h"

namespace hetcoll::testing {

// codec_test.cc
void Codecs();
void CompressedSums();

// plan_test.cc
void CheckPlans();
void ComparePasses();
void BindManySteps();
void CheckLocals();
void StoringSums();
void FuzzPlans();

// shm_test.cc
void Returning();
void NotReturning();
void Handing();
void LentInOrder();
void Windows();
void Claims();
void Fragments();
void Stores();
void BadHeaders();

// shm_loans_test.cc
void BorrowedBuffers();
void GivenSends();
void LoansOfEngines();

// shm_private_test.cc
void Private();
void NotPrivate();
void HugePages();
void Withdrawing();
void DeadSender();
void PrivateMessages();

// protocol_choice_test.cc
void Bands();
void Trials();
void TimedMessages();
void FalseBands();

// shared_copy_test.cc

// fault_test.cc
void Mismatches();
void Garbage();
void FaultSpecs();
void HarmlessFaults();
void HarmfulFaults();

// integrity_test.cc
void Checksums();
void SentStreams();
void AcknowledgedBytes();
void ResetSockets();
void EncryptedStreams();
void WrongKeys();
void EncryptedUntilReset();
void EncryptedAndAsleep();
void ChangedRecords();
void EncryptedLinks();
void EncryptedAndReset();
void ChangedLinks();
void ResetAfterTheCall();
void ResetForGood();
void LyingAcknowledgements();
void SpoiledBytes();
void SpoiledAndSentAgain();
void SpoiledAfterTheCall();
void SpoiledForEver();
void SpoiledAndReset();
void CheckedLinks();

void GpusOfOneHost();
void SignalsOfPrograms();
void GpusOfManyHosts();
void BrokenProxies();
void ProxiesOverVerbs();
void ProxiesThatLoseRails();
void ProxiesThatLoseAllRails();
void ProxiesThatLoseAllRailsAndSockets();
void ProxiesWhoseCopiesFail();
void ProxiesThatNeverHadARail();
void ProxiesThatDiffer();
void ProxiesThatAreTried();
void ProxiesThatCannotReadBack();
void ProxiesWhoseRailsComeBack();
void ProxiesWhoseLastRailComesBack();
void ProxiesThatWaitForWhatComesAgain();
void GpusAndHosts();
void OneSided();
void OrderedRequests();
void ClosingWindows();
void OneSidedOfDevices();
void ClosingDevices();
void ClosingSeenWindows();
void SlowDevices();
void PutsBehindEachOther();
void UnlikeWindows();
void TablesOfMoves();
void GatedTransfers();
void FailingDevices();
void LeavingWindows();
void PulledWithoutADevice();  // strangers_test.cc
void AnsweredBeforeItIsAsked();
void AskedForWhatIsGone();
void WordsThatChange();
void TakenUpThoughNotLost();

namespace {

void Types() {
  for (const Over over : kAllLinks) {
    Job job({.size = 3, .over = over});
    for (int t = 0; t < kDTypes; ++t) {
      const auto dtype = static_cast<DType>(t);
      if (FindKernels(dtype, ReduceOp::kSum) == nullptr) continue;
      for (const std::size_t count : {0, 1, 2, 3, 4, 1009}) Allreduce(job, RingAllreduce, dtype, count, "ring");
      Allreduce(job, DirectAllreduce, dtype, 20011, "direct");
    }
  }
}

void Sizes() {
  const JobOptions links[] = {{.ring_bytes = 4096},   {.ring_bytes = 256 << 10},
                              {.over = Over::kTcp},   {.over = Over::kTcp, .stripes = 3},
                              {.over = Over::kVerbs}, {.over = Over::kVerbs, .rails = 3}};
  for (JobOptions options : links) {
    for (options.size = 2; options.size <= 4; ++options.size) {
      Job job(options);
      for (const std::size_t count : {1, 11, 4099, options.size == 3 ? 150001 : 40009}) {
        Allreduce(job, RingAllreduce, DType::kFloat32, count, "ring");
        Allreduce(job, DirectAllreduce, DType::kInt64, count, "direct");
        Allreduce(job, ScratchAllreduce, DType::kFloat16, count, "scratch");
      }
    }
  }
  Job large({.size = 2, .ring_bytes = 1 << 20});
  Allreduce(large, DirectAllreduce, DType::kFloat32, (16 << 20) / 4 + 3, "larger than the cache");
}

// Many tasks submitted at once, of several shapes, finished by the user in another order.
void Flight() {
  constexpr int kTasks = 24;
  for (const Over over : kAllLinks) {
    Job job({.size = 3, .over = over, .ring_bytes = 8192});
    job.Run([&](int rank, Engine& e) {
      const std::size_t counts[] = {5, 30011, 0, 777};
      std::vector<std::shared_ptr<Shape>> shapes;
      for (const std::size_t count : counts) {
        shapes.push_back(BindAllreduce(e, job.size(), rank, RingAllreduce, DType::kInt32, count));
      }
      std::vector<Bytes> buffers;
      std::vector<std::shared_ptr<Task>> tasks;
      for (int i = 0; i < kTasks; ++i) buffers.push_back(Input(rank, counts[i % 4], DType::kInt32));
      for (int i = 0; i < kTasks; ++i) {
        Bytes& buffer = buffers[static_cast<std::size_t>(i)];
        tasks.push_back(e.Submit(shapes[static_cast<std::size_t>(i % 4)], buffer.data(), buffer.data()));
      }
      for (int i = kTasks - 1; i >= 0; --i) {
        const auto at = static_cast<std::size_t>(i);
        CHECK(e.Drive(*tasks[at], DeadlineNs(kPatience)) == Outcome::kDone, "task %d", i);
        CHECK(buffers[at] == Sum(job.size(), counts[i % 4], DType::kInt32), "task %d of rank %d", i, rank);
      }
      CHECK(e.collectives() == kTasks, "%llu collectives", static_cast<unsigned long long>(e.collectives()));
      CHECK(e.History(1) == shapes[0]->id && e.History(kTasks + 1) == -1, "history");
      std::int64_t before = 0;
      const std::vector<CallRecord> records = e.Records(false, kTasks + 1);
      CHECK(records.size() == kTasks && e.Records(false, 1).size() == 1, "records");
      for (const CallRecord& r : records) {
        CHECK(r.begin_ns >= before && r.end_ns >= r.begin_ns && r.end_ns <= NowNs(), "times of records");
        before = r.begin_ns;
      }
    });
  }
}

// Point to point in a ring, both directions at once, many messages in order, beside collectives of another thread.
void Messages() {
  constexpr int kRounds = 20;
  for (const Over over : kAllLinks) {
    Job job({.size = 3, .over = over, .ring_bytes = 8192});
    const int n = job.size();
    job.Run([&](int rank, Engine& e) {
      const int next = (rank + 1) % n, before = (rank + n - 1) % n;
      const auto send = BindMessage(e, n, rank, next, true, 20001);
      const auto recv = BindMessage(e, n, rank, before, false, 20001);
      const auto sum = BindAllreduce(e, n, rank, DirectAllreduce, DType::kFloat64, 501);
      std::thread beside([&] {
        for (int i = 0; i < kRounds; ++i) {
          Bytes buffer = Input(rank, 501, DType::kFloat64);
          CHECK(RunToEnd(e, sum, buffer.data(), buffer.data()) == Outcome::kDone, "collective %d", i);
          CHECK(buffer == Sum(n, 501, DType::kFloat64), "collective %d", i);
        }
      });
      std::vector<Bytes> out(kRounds), in(kRounds);
      std::vector<std::shared_ptr<Task>> tasks;
      for (std::size_t i = 0; i < kRounds; ++i) {
        out[i] = Input(rank + static_cast<int>(i), 20001, DType::kUint16);
        out[i].resize(20001);
        in[i].resize(20001);
        tasks.push_back(e.Submit(send, out[i].data(), nullptr));
        tasks.push_back(e.Submit(recv, nullptr, in[i].data()));
      }
      for (std::size_t i = tasks.size(); i-- > 0;) {
        CHECK(e.Drive(*tasks[i], DeadlineNs(kPatience)) == Outcome::kDone, "message %zu", i);
      }
      for (std::size_t i = 0; i < kRounds; ++i) {
        Bytes want = Input(before + static_cast<int>(i), 20001, DType::kUint16);
        want.resize(20001);
        CHECK(in[i] == want, "message %zu to rank %d", i, rank);
      }
      beside.join();
    });
  }
}

// A message to a rank from which another one is awaited is read where it lies: it is not over before that. Any other
// of this length is over once it lies in the ring.
void Exchanging() {
  constexpr std::size_t kBytes = 256 << 10;
  Job job({.size = 2, .ring_bytes = 1 << 20, .shm = {.reads = PrivateReads::kAlways}});
  std::atomic<int> sent{0};
  job.Run([&](int rank, Engine& e) {
    const auto send = BindMessage(e, 2, rank, 1 - rank, true, kBytes);
    const auto recv = BindMessage(e, 2, rank, 1 - rank, false, kBytes);
    for (int round = 0; round < 4; ++round) {
      const bool awaits = round % 2 == 1;  // when ranks know that they can read, since the round before
      const Bytes out = Input(rank + round, kBytes, DType::kUint8);
      Bytes in(kBytes);
      while (rank == 1 && sent <= round) SleepMs(1);
      std::shared_ptr<Task> awaited;
      if (awaits) awaited = e.Submit(recv, nullptr, in.data());
      const auto message = e.Submit(send, out.data(), nullptr);
      if (rank == 0) {
        const Outcome outcome = e.Drive(*message, DeadlineNs(awaits ? 0.05 : kPatience));
        CHECK(outcome == (awaits ? Outcome::kPending : Outcome::kDone), "round %d", round);
        sent = round + 1;
      }
      if (!awaits) awaited = e.Submit(recv, nullptr, in.data());
      for (const auto& task : {awaited, message}) {
        CHECK(e.Drive(*task, DeadlineNs(kPatience)) == Outcome::kDone, "%s", e.failure().text.c_str());
      }
      CHECK(in == Input(1 - rank + round, kBytes, DType::kUint8), "round %d on rank %d", round, rank);
    }
  });
}

// Tasks that nobody waits for; others look on meanwhile.
void Background() {
  Job job({.size = 2, .ring_bytes = 8192});
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 50021);
    for (int round = 0; round < 4; ++round) {
      Bytes buffer = Input(rank, 50021, DType::kFloat32);
      if (round == 2 && rank == 1) SleepMs(20);  // the engine's thread goes to sleep
      const auto task = e.Submit(shape, buffer.data(), buffer.data());
      e.DriveInBackground();
      const std::int64_t start = NowNs();
      while (task->state.load(std::memory_order_acquire) == Task::State::kRunning && Seconds(start) < kPatience) {
        static_cast<void>(e.Describe());
        SleepMs(1);
      }
      CHECK(task->state.load() == Task::State::kDone, "round %d: %s", round, e.Describe().c_str());
      CHECK(buffer == Sum(2, 50021, DType::kFloat32), "round %d", round);
    }
  });
}

// A rank that comes late wakes the others from their sleep, which nothing else ends.
void Wakeups() {
  constexpr int kRounds = 10;
  for (const Over over : kAllLinks) {
    Job job({.size = 3, .over = over, .ring_bytes = 8192, .spin_seconds = 0, .sleep_slice_ns = kForeverNs});
    job.Run([&](int rank, Engine& e) {
      const auto shape = BindAllreduce(e, 3, rank, RingAllreduce, DType::kInt32, 10007);
      for (int i = 0; i < kRounds; ++i) {
        if (rank == i % 3) SleepMs(5);
        Bytes buffer = Input(rank, 10007, DType::kInt32);
        CHECK(RunToEnd(e, shape, buffer.data(), buffer.data()) == Outcome::kDone, "round %d", i);
        CHECK(buffer == Sum(3, 10007, DType::kInt32), "round %d", i);
      }
    });
  }
}

void Failing() {
  for (const Over over : kAllLinks) {
    Job job({.size = 2, .over = over, .sleep_slice_ns = kForeverNs});
    job.Run([&](int rank, Engine& e) {
      if (rank == 1) return;  // never calls it
      const auto shape = BindAllreduce(e, 2, rank, RingAllreduce, DType::kFloat32, 1000003);
      Bytes buffer = Input(rank, 1000003, DType::kFloat32);
      const auto first = e.Submit(shape, buffer.data(), buffer.data());
      const auto second = e.Submit(shape, buffer.data(), buffer.data());
      CHECK(e.Drive(*second, DeadlineNs(0.05)) == Outcome::kPending, "nobody answered");
      CHECK(e.Describe().find("rank 1") != std::string::npos, "%s", e.Describe().c_str());
      std::thread other([&] {
        SleepMs(20);
        e.Halt(FaultKind::kTimeout, 1, "first");
        e.Halt(FaultKind::kAborted, -1, "second");
      });
      CHECK(e.Drive(*first, DeadlineNs(kPatience)) == Outcome::kFailed, "failed by another thread");
      other.join();
      CHECK(e.Drive(*second, DeadlineNs(kPatience)) == Outcome::kFailed, "the one behind it as well");
      CHECK(e.failure().text == "first" && e.failure().kind == FaultKind::kTimeout, "the first failure is kept");
      std::shared_ptr<Task> pending;
      CHECK(e.RunPrompt(shape, buffer.data(), buffer.data(), pending) == Outcome::kFailed, "and stays");
    });
  }
}

// A rank that leaves in order: what it sent before still arrives, what it did not send is an error that names it.
void Leaving() {
  for (const Over over : kAllLinks) {
    Job job({.size = 3, .over = over});
    std::atomic<bool> left{false};
    job.Run([&](int rank, Engine& e) {
      if (rank == 2) return;
      const auto shape = BindMessage(e, 3, rank, 1 - rank, rank == 0, 5003);
      Bytes buffer(5003, std::byte{7});
      if (rank == 0) {
        CHECK(RunToEnd(e, shape, buffer.data(), nullptr) == Outcome::kDone, "sent");
        e.Close();
        left = true;
        return;
      }
      while (!left) SleepMs(1);
      e.PeerLeft(0);
      e.PeerLeft(2);
      Bytes in(5003);
      CHECK(RunToEnd(e, shape, nullptr, in.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(in == buffer, "what was sent before the end");
      CHECK(RunToEnd(e, shape, nullptr, in.data()) == Outcome::kFailed, "nothing more comes");
      CHECK(e.failure().kind == FaultKind::kPeerGone && e.failure().peer == 0, "%s", e.failure().text.c_str());
    });
  }
}

// Memory that is lent instead of copied, written again as soon as each call is over.
void Lending() {
  for (const char* fault : {"", "short=0.5,delay=0.1", "duplicate=3,rank=7"}) {
    Job job({.size = 3, .ring_bytes = 16384, .fault = fault});
    for (const Algorithm algorithm : {RingAllreduce, DirectAllreduce, ScratchAllreduce}) {
      constexpr std::size_t kCount = 65537;
      const Bytes want = Sum(3, kCount, DType::kInt64);
      job.Run([&](int rank, Engine& e) {
        const auto shape = BindAllreduce(e, 3, rank, algorithm, DType::kInt64, kCount);
        const Bytes in = Input(rank, kCount, DType::kInt64);
        std::byte* buffers[] = {e.heap()->Allocate(in.size()), e.heap()->Allocate(in.size())};
        for (int round = 0; round < 4; ++round) {
          std::byte* recv = buffers[round % 2];  // in place every other time
          std::memcpy(buffers[0], in.data(), in.size());
          CHECK(RunToEnd(e, shape, buffers[0], recv) == Outcome::kDone, "%s", e.failure().text.c_str());
          CHECK(std::memcmp(recv, want.data(), want.size()) == 0, "%s: round %d, rank %d", fault, round, rank);
        }
        for (std::byte* buffer : buffers) e.heap()->Free(buffer, in.size());
      });
    }
  }
}

// What is lent to a rank that does not come does not keep the next one waiting; but nothing is over before both have
// it.
void LendingAhead() {
  constexpr std::size_t kCount = 65537;
  Job job({.size = 3, .ring_bytes = 16384});
  std::atomic<bool> second_has_it{false}, first_reads{false};
  job.Run([&](int rank, Engine& e) {
    const auto shape = BindAllreduce(e, 3, rank, DirectBroadcast, DType::kInt64, kCount);
    const Bytes data = Input(0, kCount, DType::kInt64);
    if (rank == 0) {
      std::byte* lent = e.heap()->Allocate(data.size());
      std::memcpy(lent, data.data(), data.size());
      CHECK(RunToEnd(e, shape, lent, lent) == Outcome::kDone, "%s", e.failure().text.c_str());
      CHECK(first_reads, "over before rank 1 has read it");
      return;
    }
    if (rank == 1) {
      CHECK(Within(kPatience / 2, [&] { return second_has_it.load(); }), "rank 2 waits for rank 1");
      first_reads = true;
    }
    Bytes got(data.size());
    CHECK(RunToEnd(e, shape, got.data(), got.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
    CHECK(got == data, "rank %d", rank);
    if (rank == 2) second_has_it = true;
  });
}

// Scratch that others read lies on the heap, and grows there.
void Staging() {
  for (const char* fault : {"", "short=0.5,delay=0.1", "duplicate=3,rank=7"}) {
    Job job({.size = 3, .ring_bytes = 16384, .fault = fault});
    for (const std::size_t count : {1009, 65537, 50021, 200003}) {
      Allreduce(job, StagedAllreduce, DType::kInt32, count, "staged");
      for (int rank = 0; rank < 3; ++rank) {
        Heap& heap = *job.engine(rank).heap();
        const std::size_t stage = (std::max<std::size_t>(count, count == 50021 ? 65537 : 0) * 4 + 4095) / 4096 * 4096;
        CHECK(heap.Allocate(heap.capacity() - stage + 4096) == nullptr, "%zu: not on the heap", count);
        std::byte* rest = heap.Allocate(heap.capacity() - stage);
        CHECK(rest != nullptr, "%zu: what was there before is still taken", count);
        heap.Free(rest, heap.capacity() - stage);
      }
    }
  }
}

constexpr Scenario kScenarios[] = {
    {"plans", CheckPlans, kAlone},
    {"plans: passes", ComparePasses, kAlone},
    {"plans: many steps", BindManySteps, kAlone},
    {"locals", CheckLocals, kAlone},
    {"sums", StoringSums},
    {"fuzz", FuzzPlans, kAlone},
    {"codecs", Codecs, kAlone},
    {"compressed", CompressedSums},
    {"types", Types},
    {"sizes", Sizes},
    {"flight", Flight},
    {"messages", Messages},
    {"exchanging", Exchanging},
    {"background", Background},
    {"wakeups", Wakeups},
    {"failing", Failing},
    {"leaving", Leaving},
    {"mismatches", Mismatches},
    {"garbage", Garbage},
    {"faultspecs", FaultSpecs, kAlone},
    {"lending", Lending},
    {"lending: ahead", LendingAhead},
    {"staging", Staging},
    {"slots", Returning, kAlone},
    {"slots: kept", NotReturning, kAlone},
    {"slots: handed over", Handing, kAlone},
    {"slots: how much of a ring", Windows, kAlone},
    {"slots: claimed", Claims, kAlone},
    {"slots: lent in order", LentInOrder, kAlone},
    {"slots: fragments", Fragments, kAlone},
    {"slots: stores", Stores},
    {"slots: headers", BadHeaders, kAlone},
    {"loans", BorrowedBuffers, kAlone},
    {"loans: which sends", GivenSends, kAlone},
    {"loans: of engines", LoansOfEngines},
    {"private", Private, kAlone},
    {"private: not", NotPrivate, kAlone},
    {"private: huge pages", HugePages, kAlone},
    {"private: withdrawn", Withdrawing, kAlone},
    {"private: dead", DeadSender, kAlone},
    {"private: messages", PrivateMessages},
    {"ways: bands", Bands, kAlone},
    {"ways: trials", Trials, kAlone},
    {"ways: timed messages", TimedMessages, kAlone},
    {"ways: false bands", FalseBands, kAlone},
    {"harmless", HarmlessFaults},
    {"harmful", HarmfulFaults},
    {"mending: what was sent", SentStreams, kAlone},
    {"mending: the kernel's word", AcknowledgedBytes},
    {"mending: resets", ResetSockets},
    {"tls: streams", EncryptedStreams, kAlone},
    {"tls: keys", WrongKeys, kAlone},
    {"tls: until reset", EncryptedUntilReset, kAlone},
    {"tls: asleep", EncryptedAndAsleep, kAlone},
    {"tls: changed", ChangedRecords, kAlone},
    {"tls: links", EncryptedLinks},
    {"tls: resets", EncryptedAndReset},
    {"tls: changed links", ChangedLinks},
    {"mending: after the call", ResetAfterTheCall},
    {"mending: for good", ResetForGood},
    {"mending: tries", LyingAcknowledgements},
    {"checksums", Checksums, kAlone},
    {"integrity: spoiled", SpoiledBytes},
    {"integrity: sent again", SpoiledAndSentAgain},
    {"integrity: sent again after the call", SpoiledAfterTheCall},
    {"integrity: spoiled for ever", SpoiledForEver},
    {"integrity: spoiled and reset", SpoiledAndReset},
    {"integrity: sound", CheckedLinks},
    {"gpus", GpusOfOneHost},
    {"signals", SignalsOfPrograms},
    {"gpus: proxy", GpusOfManyHosts},
    {"gpus: broken", BrokenProxies},
    {"rdma: all is well", ProxiesOverVerbs},
    {"rdma: a rail is lost", ProxiesThatLoseRails},
    {"rdma: all rails are lost", ProxiesThatLoseAllRails},
    {"rdma: all rails and sockets are lost", ProxiesThatLoseAllRailsAndSockets},
    {"rdma: a copy beside TCP fails", ProxiesWhoseCopiesFail},
    {"rdma: there never was a rail", ProxiesThatNeverHadARail},
    {"rdma: different calls", ProxiesThatDiffer},
    {"rdma: tried", ProxiesThatAreTried},
    {"rdma: no reading back", ProxiesThatCannotReadBack},
    {"rdma: rails come back", ProxiesWhoseRailsComeBack},
    {"rdma: the last rail comes back", ProxiesWhoseLastRailComesBack},
    {"rdma: sent again, later", ProxiesThatWaitForWhatComesAgain},
    {"gpus: mixed", GpusAndHosts},
    {"windows", OneSided},
    {"windows: ordered", OrderedRequests},
    {"windows: closed", ClosingWindows},
    {"windows of devices", OneSidedOfDevices},
    {"windows of devices: closed", ClosingDevices},
    {"windows of devices that see each other: closed", ClosingSeenWindows},
    {"windows of slow devices", SlowDevices},
    {"puts behind each other", PutsBehindEachOther},
    {"windows of unlike numbers", UnlikeWindows},
    {"tables of moves", TablesOfMoves},
    {"windows of devices: streams", GatedTransfers},
    {"windows of devices: failed", FailingDevices},
    {"windows: left", LeavingWindows},
    {"strangers: pulled without a device", PulledWithoutADevice, kAlone},
    {"strangers: answered before", AnsweredBeforeItIsAsked, kAlone},
    {"strangers: asked again", AskedForWhatIsGone, kAlone},
    {"strangers: words that change", WordsThatChange, kAlone},
    {"strangers: taken up", TakenUpThoughNotLost},
};

}  // namespace

int Main(std::string_view prefix) { return Play(kScenarios, prefix); }

}  // namespace hetcoll::testing

int main(int argc, char** argv) { return hetcoll::testing::Main(argc > 1 ? argv[1] : ""); }
