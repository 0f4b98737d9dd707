// The ends of an edge in shared memory, by themselves: slots that go out, come back and are used again; messages that
// are read in the sender's process; headers that no correct peer writes.

#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <optional>

#include "harness.h"
#include "transport/shm_edge.h"
#include "transport/shm_private.h"

namespace hetcoll::testing {
namespace {

using Frame = struct hetcoll::Message;  // not the plan of that name

constexpr SlotStores kAllStores[] = {SlotStores::kCached, SlotStores::kStreaming, SlotStores::kClaimed};

// Two ranks of one process.
struct Pair {
  explicit Pair(std::size_t ring_bytes, ShmOptions options = {SlotStores::kClaimed}) : layout(2, ring_bytes) {
    const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
    segment = std::make_shared<ShmSegment>(fd, layout, options);
    close(fd);
    a = MakeShm(*segment, 0, 1, 1);
    b = MakeShm(*segment, 1, 0, 0);
  }

  // The header line that carries fragment `index` from rank 0 to rank 1, or back.
  ShmLine& line(int channel, std::uint64_t index) { return Edge(*segment, 0, 1, channel).line(index); }
  ShmLine& line_back(int channel, std::uint64_t index) { return Edge(*segment, 1, 0, channel).line(index); }

  ShmLayout layout;
  std::shared_ptr<ShmSegment> segment;
  std::array<LinkEnds, kChannels> a;
  std::array<LinkEnds, kChannels> b;
};

// What a call throws, as it were; kNone where it does not.
template <class Fn>
FaultKind KindOf(Fn&& call) {
  try {
    call();
  } catch (const Fault& fault) {
    return fault.kind;
  }
  return FaultKind::kNone;
}

}  // namespace

// What is reduced goes back in its slot, which stays untouched until it was read.
void Returning() {
  constexpr std::size_t kBytes = 5000;
  for (const SlotStores stores : kAllStores) {
    Pair pair(64 << 10, {stores});
    const Frame out{1, kBytes, true, 1}, plain{1, kBytes, true, -1}, back{2, kBytes, true, -1};
    for (unsigned round = 0; round < 300; ++round) {
      const Bytes sent = Pattern(kBytes, round), answer = Pattern(kBytes, round + 1000);
      CHECK(pair.a[0].send->Push(out, 0, sent.data(), kBytes) == kBytes, "round %u", round);
      const View view = pair.b[0].recv->Peek(out, 0, kBytes);
      CHECK(view.n == kBytes && std::memcmp(view.data, sent.data(), kBytes) == 0, "round %u", round);
      const auto reserve = [&](std::size_t channel) {
        return pair.b[channel].send->Reserve(answer.data(), kBytes, view.data);
      };
      CHECK(reserve(2) != view.data, "only on the channel that was named");
      std::byte* slot = reserve(1);
      CHECK(slot == view.data, "round %u", round);
      std::memcpy(slot, answer.data(), kBytes);
      pair.b[1].send->Commit(back, 0, kBytes);
      pair.b[0].recv->Consume(kBytes);

      unsigned more = 0;
      while (pair.a[0].send->Push(plain, 0, sent.data(), kBytes) != kWouldBlock) ++more;
      CHECK(more >= 3, "only %u others fit beside it", more);
      for (unsigned i = 0; i < more; ++i) {
        Bytes got(kBytes);
        CHECK(pair.b[0].recv->Pull(plain, 0, got.data(), kBytes, false) == kBytes && Same(got, sent), "number %u", i);
      }
      // All are consumed, but the first slot is still in use.
      Bytes got(kBytes);
      CHECK(pair.a[1].recv->Pull(back, 0, got.data(), kBytes, false) == kBytes, "round %u", round);
      CHECK(Same(got, answer), "round %u", round);
    }
  }
}

// Slots that must not go back: what was taken in part, what the sender does not take back, what is not a slot.
void NotReturning() {
  constexpr std::size_t kBytes = 3000;
  Pair pair(64 << 10);
  const Bytes data = Pattern(kBytes, 1);
  const Frame out{1, kBytes, true, 1}, plain{1, kBytes, true, -1}, small{1, 16, true, 1};
  const auto reserve = [&](const View& v) {
    return pair.b[1].send->Reserve(data.data(), static_cast<std::size_t>(v.n), v.data);
  };
  CHECK(pair.a[0].send->Push(out, 0, data.data(), kBytes) == kBytes, "sent");
  View view = pair.b[0].recv->Peek(out, 0, 1000);
  CHECK(reserve(view) != view.data, "a part of a slot");
  pair.b[0].recv->Consume(1000);
  view = pair.b[0].recv->Peek(out, 1000, kBytes - 1000);
  CHECK(view.n == kBytes - 1000 && reserve(view) != view.data, "the rest of a slot");
  pair.b[0].recv->Consume(kBytes - 1000);

  CHECK(pair.a[0].send->Push(plain, 0, data.data(), kBytes) == kBytes, "sent");
  view = pair.b[0].recv->Peek(plain, 0, kBytes);
  CHECK(reserve(view) != view.data, "one that the sender does not take back");
  pair.b[0].recv->Consume(kBytes);

  CHECK(pair.a[0].send->Push(small, 0, data.data(), 16) == 16, "sent");
  view = pair.b[0].recv->Peek(small, 0, 16);
  CHECK(reserve(view) == nullptr, "a header line");
  pair.b[0].recv->Consume(16);
}

namespace {

std::size_t SendAll(SendEnd& end, const Frame& m, const Bytes& data) {
  std::size_t at = 0;
  for (std::ptrdiff_t n = 0; at < data.size(); at += static_cast<std::size_t>(n)) {
    n = end.Push(m, at, data.data() + at, data.size() - at);
    if (n == kWouldBlock) break;
  }
  return at;
}

Bytes ReceiveAll(RecvEnd& end, const Frame& m) {
  Bytes got(m.total);
  for (std::size_t at = 0; at < m.total;) {
    const std::ptrdiff_t n = end.Pull(m, at, got.data() + at, m.total - at, false);
    CHECK(n > 0, "%zu of %zu bytes came", at, m.total);
    if (n <= 0) break;
    at += static_cast<std::size_t>(n);
  }
  return got;
}

void HandOn(const ShmOptions& options) {
  constexpr std::size_t kBytes = 5000;
  constexpr std::size_t kRing = 64 << 10;  // with slots of 8 KiB
  const Frame mutual{1, kBytes, true, -1, Use::kExchanged, true};
  const auto place = [](Pair& pair, std::uint64_t index) { return static_cast<ShmPlace>(pair.line(0, index).place); };
  Pair pair(kRing, options);
  for (unsigned round = 0; round < 300; ++round) {
    const Bytes there = Pattern(kBytes, round), back = Pattern(kBytes, round + 1000);
    CHECK(SendAll(*pair.a[0].send, mutual, there) == kBytes, "round %u", round);
    CHECK(place(pair, round) == ShmPlace::kHanded, "round %u", round);
    const std::uint64_t slot = pair.line(0, round).where.offset;
    CHECK(Same(ReceiveAll(*pair.b[0].recv, mutual), there), "round %u", round);
    CHECK(SendAll(*pair.b[0].send, mutual, back) == kBytes, "round %u", round);
    CHECK(pair.line_back(0, round).where.offset == slot, "round %u: what was read last is filled next", round);
    CHECK(Same(ReceiveAll(*pair.a[0].recv, mutual), back), "round %u", round);
  }
  // One way only: ours run out, and then there is the ring, for ever.
  Pair oneway(kRing, options);
  for (unsigned i = 0; i < 200; ++i) {
    const Bytes data = Pattern(kBytes, i);
    CHECK(SendAll(*oneway.a[0].send, mutual, data) == kBytes, "message %u", i);
    CHECK(place(oneway, i) == (i < kHands ? ShmPlace::kHanded : ShmPlace::kSlot), "message %u", i);
    CHECK(Same(ReceiveAll(*oneway.b[0].recv, mutual), data), "message %u", i);
  }
  // A message of more than all slots, while the other one comes: it waits for slots a while, and never for ever.
  constexpr std::size_t kLong = 6 * (kRing / 8);
  const Frame lengthy{2, kLong, true, -1, Use::kExchanged, true};
  const Bytes there = Pattern(kLong, 1), back = Pattern(kLong, 2);
  Pair both(kRing, options);
  const std::size_t first = SendAll(*both.a[0].send, lengthy, there);
  CHECK(first == kLong, "nothing comes from there, so nothing is waited for: %zu", first);
  Bytes got(kLong);
  const std::ptrdiff_t begun = both.b[0].recv->Pull(lengthy, 0, got.data(), kLong, false);
  CHECK(begun == kRing / 8 && !both.b[0].send->Silent(), "a slot: %zd", begun);
  std::size_t sent = SendAll(*both.b[0].send, lengthy, back);
  CHECK(sent == (kHands + 1) * (kRing / 8), "the slots that it has, and then it waits: %zu", sent);
  CHECK(both.b[0].send->Silent(), "nothing tells when to go on, so nobody may fall asleep over it");
  for (int call = 0; call < 1000 && sent < kLong; ++call) {
    const std::ptrdiff_t n = both.b[0].send->Push(lengthy, sent, back.data() + sent, kLong - sent);
    if (n != kWouldBlock) sent += static_cast<std::size_t>(n);
  }
  CHECK(sent == kLong, "it takes the ring where no slot comes free: %zu", sent);
  CHECK(!both.b[0].send->Silent(), "it waits no more");
  for (std::size_t at = kRing / 8; at < kLong;) {
    const std::ptrdiff_t n = both.b[0].recv->Pull(lengthy, at, got.data() + at, kLong - at, false);
    CHECK(n > 0, "%zu bytes came", at);
    if (n <= 0) break;
    at += static_cast<std::size_t>(n);
  }
  CHECK(Same(got, there) && Same(ReceiveAll(*both.a[0].recv, lengthy), back), "both came");
  // A slot that its sender has given away already.
  Pair twice(kRing, options);
  for (std::size_t i = 0; i <= kHands; ++i) {
    CHECK(SendAll(*twice.a[0].send, Frame{1, 100, true, -1, Use::kExchanged, true}, Pattern(100, 1)) == 100, "sent");
    ShmLine& line = twice.line(0, i);
    line.place = int(ShmPlace::kHanded), line.where.offset = 0;
    const FaultKind kind = KindOf([&] { static_cast<void>(ReceiveAll(*twice.b[0].recv, Frame{1, 100})); });
    CHECK(kind == (i < kHands ? FaultKind::kNone : FaultKind::kCorrupt), "slot %zu: kind %d", i, int(kind));
  }
}

}  // namespace

// Slots that change hands: who has read one fills it next, and who has none left takes the ring.
void Handing() {
  for (const SlotStores stores : {SlotStores::kCached, SlotStores::kClaimed}) HandOn({.stores = stores});
  // Whoever writes around the cache gains nothing by it.
  Pair around(64 << 10, {SlotStores::kStreaming});
  const Frame mutual{1, 5000, true, -1, Use::kExchanged, true};
  const Bytes data = Pattern(5000, 1);
  CHECK(SendAll(*around.a[0].send, mutual, data) == 5000, "sent");
  CHECK(static_cast<ShmPlace>(around.line(0, 0).place) == ShmPlace::kSlot, "by the ring");
  CHECK(Same(ReceiveAll(*around.b[0].recv, mutual), data), "received");
}

// How far messages go round in a ring: what comes back stays in caches.
void Windows() {
  constexpr std::size_t kRing = std::size_t{2} << 20, kBytes = std::size_t{1} << 20;
  const auto farthest = [](SlotStores stores, int back) {
    Pair pair(kRing, {stores});
    const Frame m{1, kBytes, false, back};
    std::size_t end = 0;
    for (std::uint64_t fragment = 0, at = 0; fragment < 40; ++fragment, at %= kBytes) {
      const Bytes data(64 << 10);
      CHECK(pair.a[0].send->Push(m, at, data.data(), data.size()) == std::ptrdiff_t(data.size()), "sent");
      const ShmLine& line = pair.line(0, fragment);
      end = std::max(end, line.where.offset + line.nbytes);
      Bytes got(data.size());
      CHECK(pair.b[0].recv->Pull(m, at, got.data(), got.size(), false) == std::ptrdiff_t(got.size()), "received");
      at += data.size();
    }
    return end;
  };
  CHECK(farthest(SlotStores::kCached, -1) == kRing, "all of it, where the reader's cache must forget");
  CHECK(farthest(SlotStores::kCached, 0) == kRing / 4, "little, where it comes back");
  CHECK(farthest(SlotStores::kClaimed, -1) == kRing / 8, "less, where it is claimed");
  CHECK(farthest(SlotStores::kClaimed, 0) == kRing / 2, "where it is claimed and comes back");
}

// All-reduces by every way of writing slots, over rings that hold less than one message and more than several.
void Stores() {
  for (const SlotStores stores : kAllStores) {
    for (const std::size_t ring : {std::size_t{4096}, std::size_t{64} << 10, std::size_t{2} << 20}) {
      for (int size = 2; size <= 3; ++size) {
        Job job({.size = size, .ring_bytes = ring, .shm = {.stores = stores}});
        for (const std::size_t count : {7, 300, 5003, 70001}) {
          Allreduce(job, DirectAllreduce, DType::kFloat32, count, "direct");
          Allreduce(job, RingAllreduce, DType::kInt64, count, "ring");
          Allreduce(job, ScratchAllreduce, DType::kInt32, count, "scratch");
        }
      }
    }
    Job faulty({.size = 2, .ring_bytes = 8192, .fault = "short=0.5,delay=0.1", .shm = {.stores = stores}});
    Allreduce(faulty, DirectAllreduce, DType::kFloat32, 20011, "direct, with faults");
    Job half({.size = 2, .ring_bytes = 8192, .fault = "short=0.5,delay=0.1,rank=1", .shm = {.stores = stores}});
    Allreduce(half, DirectAllreduce, DType::kFloat32, 20011, "direct, with faults on one side");
  }
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
        CHECK(Same(in, Pattern(kBytes, round * 3 + static_cast<unsigned>(before))), "%s: round %u", fault, round);
      }
    });
  }
}

// A header that leads out of the ring, to a channel that is not there, or nowhere is an error and not a crash.
void BadHeaders() {
  struct Case {
    const char* what;
    void (*spoil)(ShmLine&);
  };
  const Case cases[] = {
      {"behind the ring", [](ShmLine& l) { l.where.offset = 64 << 10; }},
      {"far away", [](ShmLine& l) { l.where.offset = ~std::uint64_t{0} - 100; }},
      {"on a heap that is not there", [](ShmLine& l) { l.place = int(ShmPlace::kLent), l.where.offset = 1ull << 62; }},
      {"back on no channel", [](ShmLine& l) { l.place = int(ShmPlace::kReturned), l.where.channel = kChannels; }},
      {"back on a channel below", [](ShmLine& l) { l.place = int(ShmPlace::kReturned), l.where.channel = -1; }},
      {"back behind the ring",
       [](ShmLine& l) { l.place = int(ShmPlace::kReturned), l.where.channel = 0, l.where.offset = 1 << 30; }},
      {"in a slot that is none", [](ShmLine& l) { l.place = int(ShmPlace::kHanded), l.where.offset = 2 * kHands; }},
      {"too long for a line", [](ShmLine& l) { l.place = int(ShmPlace::kLine); }},
      {"nowhere", [](ShmLine& l) { l.place = 77; }},
  };
  for (const Case& c : cases) {
    Pair pair(64 << 10);
    const Frame m{1, 3000};
    const Bytes data = Pattern(3000, 1);
    CHECK(pair.a[0].send->Push(m, 0, data.data(), 3000) == 3000, "sent");
    c.spoil(pair.line(0, 0));
    const FaultKind kind = KindOf([&] { static_cast<void>(pair.b[0].recv->Peek(m, 0, 3000)); });
    CHECK(kind == FaultKind::kCorrupt, "%s: kind %d", c.what, int(kind));
  }
}

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
  CHECK(at == kLarge && Same(got, data) && pair.a[0].send->Lent() == 0, "message %u: %zu bytes", seed, at);
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
  CHECK(Receive(*pair.b[0].recv, kLoan, got, 0) == kLarge && Same(got, data), "the bytes as they are now");
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
    CHECK(Receive(*pair.b[0].recv, m, got, taken) == kLarge && Same(got, data), "message %d", int(m.signature));
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
  const std::pair<Frame, bool> frames[] = {{exchanged(lengths.exchanged.any - 1), false},
                                           {exchanged(lengths.exchanged.any), true},
                                           {exchanged(lengths.exchanged.most + 1), false},
                                           {stored(lengths.stored.any - 1), false},
                                           {stored(lengths.stored.any), true},
                                           {summed(lengths.summed.any - 1, -1), false},
                                           {summed(lengths.summed.any, -1), true},
                                           {summed(lengths.summed.any, 1), false}};
  for (const auto& [m, lent] : frames) {
    const Bytes data = Pattern(m.total, 9);
    Bytes got(m.total);
    std::size_t taken = 0;
    Send(*either.a[0].send, m, data, [&] { taken = Receive(*either.b[0].recv, m, got, taken); });
    CHECK((either.a[0].send->Lent() > 0) == lent, "%zu bytes", m.total);
    CHECK(Receive(*either.b[0].recv, m, got, taken) == m.total && Same(got, data), "%zu bytes arrive", m.total);
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
  const std::size_t exchanged = least.exchanged.huge, stored = least.stored.huge;
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

// A sender that dies while its memory is read is an error that names it.
void DeadSender() {
  Pair pair(std::size_t{2} << 20, {SlotStores::kClaimed, PrivateReads::kAlways});
  const Bytes data = Pattern(kLarge, 1);
  const pid_t child = fork();
  if (child == 0) {
    pair.segment->Introduce(0);
    for (int i = 0; i < 2; ++i) Send(*pair.a[0].send, kLoan, data, [] { CpuRelax(); });
    _exit(pair.a[0].send->Lent() == kLarge ? 0 : 1);
  }
  Bytes got(kLarge);
  std::size_t at = 0;
  const std::int64_t start = NowNs();
  while (at < kLarge && Seconds(start) < kPatience) at = Receive(*pair.b[0].recv, kLoan, got, at);
  CHECK(Same(got, data), "the first message");
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, "the second one was lent: status %d", status);
  const FaultKind kind = KindOf([&] { Receive(*pair.b[0].recv, kLoan, got, 0); });
  CHECK(kind == FaultKind::kPeerGone, "kind %d", int(kind));
}

}  // namespace hetcoll::testing
