// Messages that are read where they lie in the sender's process: which are, and what happens to them there.

#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <optional>

#include "shm_pair.h"
#include "transport/shm/private.h"

namespace hetcoll::testing {
namespace {

constexpr std::size_t kLarge = 3 * kPrivateFragment + 12345;  // several fragments
constexpr Frame kLoan{1, kLarge, true, -1, Use::kExchanged};

void Send(SendEnd& end, const Frame& m, const Bytes& data, const std::function<void()>& blocked) {
  for (std::size_t at = 0; at < data.size();) {
    const std::ptrdiff_t n = end.Push(m, at, data.data() + at, data.size() - at);
    n == kWouldBlock ? blocked() : void(at += static_cast<std::size_t>(n));
  }
}

std::size_t Receive(RecvEnd& end, const Frame& m, Bytes& out, std::size_t at) {
  while (at < out.size()) {
    const std::ptrdiff_t n = end.Pull(m, at, out.data() + at, out.size() - at, false);
    if (n == kWouldBlock) break;
    at += static_cast<std::size_t>(n);
  }
  return at;
}

// A message from rank 0 to rank 1, whichever way it goes: the first one always goes by slots.
void Carry(Pair& pair, unsigned seed) {
  const Bytes data = Pattern(kLarge, seed);
  Bytes got(kLarge);
  std::size_t at = 0;
  Send(*pair.a[0].send, kLoan, data, [&] { at = Receive(*pair.b[0].recv, kLoan, got, at); });
  at = Receive(*pair.b[0].recv, kLoan, got, at);
  CHECK(at == kLarge && got == data && pair.a[0].send->Lent() == 0, "message %u: %zu bytes", seed, at);
}

Pair Introduced(PrivateReads reads, SlotStores stores = SlotStores::kClaimed) {
  Pair pair(std::size_t{2} << 20, {stores, reads});
  pair.segment->Introduce(0);
  return pair;
}

}  // namespace

// Large messages are read where they lie, once the receiver has found that it can.
void Private() {
  Pair pair = Introduced(PrivateReads::kAlways);
  ShmCredit& credit = *reinterpret_cast<ShmCredit*>(pair.segment->edge(0, 1, 0));
  Carry(pair, 0);
  CHECK(credit.reads == 1, "it can");
  Bytes data = Pattern(kLarge, 1), got(kLarge);
  Send(*pair.a[0].send, kLoan, data, [] { CHECK(false, "what is lent needs no slots"); });
  CHECK(pair.a[0].send->Lent() == kLarge, "%zu are lent", pair.a[0].send->Lent());
  for (char& byte : std::span(reinterpret_cast<char*>(data.data()), data.size())) ++byte;  // it was not copied
  CHECK(Receive(*pair.b[0].recv, kLoan, got, 0) == kLarge && got == data, "the bytes as they are now");
  CHECK(pair.a[0].send->Lent() == 0, "given back");

  Send(*pair.a[0].send, kLoan, data, [] {});
  std::size_t at = 0;
  while (at < kLarge) {  // as a reduction would
    const View v = pair.b[0].recv->Peek(kLoan, at, kLarge - at);
    CHECK(v.n > 0 && std::memcmp(v.data, data.data() + at, static_cast<std::size_t>(v.n)) == 0, "at %zu", at);
    if (v.n <= 0) return;
    const std::size_t n = static_cast<std::size_t>(v.n > 8 ? v.n - 8 : v.n);  // less than was shown
    pair.b[0].recv->Consume(n);
    at += n;
  }
  CHECK(pair.a[0].send->Lent() == 0, "given back");

  const Frame waits{2, kLarge, false, -1, Use::kExchanged}, alone{3, kLarge, true};
  const Frame stored{4, kLarge, true, -1, Use::kStored}, summed{5, kLarge, true, -1, Use::kSummed};
  const Frame back{6, kLarge, true, 0, Use::kSummed};
  for (const Frame& m : {waits, alone, stored, summed, back}) {
    const bool lent = m.signature == stored.signature || m.signature == summed.signature;
    std::size_t taken = 0;
    Send(*pair.a[0].send, m, data, [&] {
      CHECK(pair.a[0].send->Lent() == 0, "message %d is copied", int(m.signature));
      taken = Receive(*pair.b[0].recv, m, got, taken);
    });
    CHECK((pair.a[0].send->Lent() == kLarge) == lent, "message %d", int(m.signature));
    CHECK(Receive(*pair.b[0].recv, m, got, taken) == kLarge && got == data, "message %d", int(m.signature));
  }
}

// Where memory cannot be read, or must not be, messages go through slots.
void NotPrivate() {
  const auto reads = [](Pair& pair) {
    for (unsigned i = 0; i < 6; ++i) Carry(pair, i);
    return reinterpret_cast<ShmCredit*>(pair.segment->edge(0, 1, 0))->reads.load();
  };
  Pair never = Introduced(PrivateReads::kNever);
  CHECK(reads(never) == 0, "not asked for");
  Pair unknown(std::size_t{2} << 20, {SlotStores::kClaimed, PrivateReads::kAlways});
  CHECK(reads(unknown) == 2, "nobody knows the process");
  Pair other = Introduced(PrivateReads::kAlways);
  ++other.segment->owner(0).token;
  CHECK(reads(other) == 2, "it is another process");
  Pair gone = Introduced(PrivateReads::kAlways);
  gone.segment->owner(0).token_at = 8;
  CHECK(reads(gone) == 2, "nothing is there");
  Pair either = Introduced(PrivateReads::kAuto, SlotStores::kCached);
  CHECK(reads(either) == 1, "by itself");
  const PrivateLengths lengths(PrivateReads::kAuto, either.segment->policy());
  const auto exchanged = [](std::size_t total) { return Frame{1, total, true, 0, Use::kExchanged}; };
  const auto stored = [](std::size_t total) { return Frame{2, total, true, -1, Use::kStored}; };
  const auto summed = [](std::size_t total, int back) { return Frame{3, total, true, back, Use::kSummed}; };
  const std::pair<Frame, bool> frames[] = {{exchanged(lengths.of(Use::kExchanged).any - 1), false},
                                           {exchanged(lengths.of(Use::kExchanged).any), true},
                                           {exchanged(lengths.of(Use::kExchanged).most + 1), false},
                                           {stored(lengths.of(Use::kStored).any - 1), false},
                                           {stored(lengths.of(Use::kStored).any), true},
                                           {summed(lengths.of(Use::kSummed).any - 1, -1), false},
                                           {summed(lengths.of(Use::kSummed).any, -1), true},
                                           {summed(lengths.of(Use::kSummed).any, 1), false}};
  for (const auto& [m, lent] : frames) {
    const Bytes data = Pattern(m.total, 9);
    Bytes got(m.total);
    std::size_t taken = 0;
    Send(*either.a[0].send, m, data, [&] { taken = Receive(*either.b[0].recv, m, got, taken); });
    CHECK((either.a[0].send->Lent() > 0) == lent, "%zu bytes", m.total);
    CHECK(Receive(*either.b[0].recv, m, got, taken) == m.total && got == data, "%zu bytes arrive", m.total);
  }
}

// Memory that begins with a huge page, as far as the kernel has one and is allowed to give it.
struct Mapped {
  Mapped(std::size_t n, bool huge) : size(n + kHuge) {
    all = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto address = reinterpret_cast<std::uintptr_t>(all);
    data = static_cast<std::byte*>(all) + (-address % kHuge);
    madvise(all, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::memset(data, 1, n);
  }
  ~Mapped() { munmap(all, size); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  // Bytes of the mapping that lie in huge pages, as the kernel tells people.
  std::size_t InHugePages() const {
    std::ifstream maps("/proc/self/smaps");
    std::size_t kib = 0, start = 0, end = 0;
    for (std::string line; std::getline(maps, line);) {
      if (std::sscanf(line.c_str(), "%zx-%zx ", &start, &end) == 2) continue;
      const auto at = reinterpret_cast<std::uintptr_t>(data);
      if (start <= at && at < end && std::sscanf(line.c_str(), "AnonHugePages: %zu", &kib) == 1) return kib << 10;
    }
    return 0;
  }

  static constexpr std::size_t kHuge = std::size_t{2} << 20;
  std::size_t size;
  void* all;
  std::byte* data;
};

// Whether the kernel tells programs which pages are huge.
bool Tells() {
  utsname name{};
  int major = 0, minor = 0;
  return uname(&name) == 0 && std::sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
         (major > 6 || (major == 6 && minor >= 7));
}

// Where slots are claimed, only what lies in huge pages is read where it lies.
void HugePages() {
  Pair pair = Introduced(PrivateReads::kAuto);
  Carry(pair, 0);
  const PrivateLengths least(PrivateReads::kAuto, pair.segment->policy());
  const std::size_t exchanged = least.of(Use::kExchanged).huge, stored = least.of(Use::kStored).huge;
  const std::pair<Frame, bool> frames[] = {{{1, exchanged - 1, true, -1, Use::kExchanged}, false},
                                           {{2, exchanged, true, -1, Use::kExchanged}, true},
                                           {{3, stored - 1, true, -1, Use::kStored}, false},
                                           {{4, stored, true, -1, Use::kStored}, true},
                                           {{5, stored, true, -1, Use::kSummed}, false}};
  for (const bool wanted : {false, true}) {
    const Mapped memory(stored, wanted);
    const bool huge = Tells() && memory.InHugePages() >= stored / 2;
    CHECK(!huge || wanted, "the kernel was told not to");
    CHECK(OwnPages().MostlyHuge(memory.data, stored) == huge, "wanted %d", wanted);
    for (const auto& [m, lent] : frames) {
      Bytes got(m.total);
      std::size_t sent = 0, taken = 0;
      while (sent < m.total) {
        const std::ptrdiff_t n = pair.a[0].send->Push(m, sent, memory.data + sent, m.total - sent);
        if (n == kWouldBlock) taken = Receive(*pair.b[0].recv, m, got, taken);
        if (n > 0) sent += static_cast<std::size_t>(n);
      }
      CHECK((pair.a[0].send->Lent() > 0) == (huge && lent), "message %d", int(m.signature));
      CHECK(Receive(*pair.b[0].recv, m, got, taken) == m.total, "message %d arrives", int(m.signature));
      CHECK(std::memcmp(got.data(), memory.data, m.total) == 0, "message %d is right", int(m.signature));
    }
  }
}

// A sender that fails may write again what it lent: nobody takes it for good any more.
void Withdrawing() {
  for (const bool before : {true, false}) {
    Pair pair = Introduced(PrivateReads::kAlways);
    Carry(pair, 0);
    const Bytes data = Pattern(kLarge, 1);
    Bytes got(kLarge);
    Send(*pair.a[0].send, kLoan, data, [] {});
    if (!before) CHECK(pair.b[0].recv->Pull(kLoan, 0, got.data(), kLarge, false) > 0, "the first part");
    pair.segment->owner(0).withdrawn = 1;
    CHECK(KindOf([&] { Receive(*pair.b[0].recv, kLoan, got, before ? 0 : kPrivateFragment); }) == FaultKind::kPeerGone,
          "before %d", before);
  }
}

// A sender that dies while its memory is read is an error that names it. So is one that has become another program, by
// exec: its process lives, and has other memory.
void DeadSender(bool becomes) {
  Pair pair(std::size_t{2} << 20, {SlotStores::kClaimed, PrivateReads::kAlways});
  const Bytes data = Pattern(kLarge, 1);
  const pid_t child = fork();
  if (child == 0) {
    pair.segment->Introduce(0);
    for (int i = 0; i < 2; ++i) Send(*pair.a[0].send, kLoan, data, [] { CpuRelax(); });
    if (becomes) execlp("sleep", "sleep", "60", nullptr);
    _exit(pair.a[0].send->Lent() == kLarge ? 0 : 1);
  }
  Bytes got(kLarge);
  std::size_t at = 0;
  const std::int64_t start = NowNs();
  while (at < kLarge && Seconds(start) < kPatience) at = Receive(*pair.b[0].recv, kLoan, got, at);
  CHECK(got == data, "the first message");
  int status = -1;
  if (becomes) {
    const auto become = [&] {
      std::string name;
      return std::getline(std::ifstream("/proc/" + std::to_string(child) + "/comm"), name) && name == "sleep";
    };
    CHECK(Within(kPatience, become), "it is another program");
  } else {
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the second one was lent: status %d", status);
  }
  const FaultKind kind = KindOf([&] { Receive(*pair.b[0].recv, kLoan, got, 0); });
  CHECK(kind == FaultKind::kPeerGone, "becomes %d: kind %d", becomes, int(kind));
  if (becomes) CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child, "it is gone");
}

void DeadSender() {
  DeadSender(false);
  DeadSender(true);
}

// Large messages between pairs that are read where they lie, written again as soon as each call is over.
void PrivateMessages() {
  for (const char* fault : {"", "short=0.3,delay=0.05", "short=0.3,delay=0.05,rank=0"}) {
    Job job({.size = 3, .ring_bytes = 1 << 20, .fault = fault, .shm = {.reads = PrivateReads::kAlways}});
    job.Run([&](int rank, Engine& e) {
      constexpr std::size_t kBytes = (std::size_t{3} << 20) + 77;
      const int next = (rank + 1) % 3, before = (rank + 2) % 3;
      const auto send = BindMessage(e, 3, rank, next, true, kBytes);
      const auto recv = BindMessage(e, 3, rank, before, false, kBytes);
      Bytes out(kBytes), in(kBytes);
      for (unsigned round = 0; round < 5; ++round) {
        out = Pattern(kBytes, round * 3 + static_cast<unsigned>(rank));
        const auto sent = e.Submit(send, out.data(), nullptr);
        CHECK(RunToEnd(e, recv, nullptr, in.data()) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(e.Drive(*sent, DeadlineNs(kPatience)) == Outcome::kDone, "%s", e.failure().text.c_str());
        CHECK(in == Pattern(kBytes, round * 3 + static_cast<unsigned>(before)), "%s: round %u", fault, round);
      }
    });
  }
}

}  // namespace hetcoll::testing
