// The ends of an edge in shared memory, by themselves: slots that go out, come back and are used again, or change
// hands; headers that no correct peer writes.

#include "shm_pair.h"

namespace hetcoll::testing {
namespace {

constexpr SlotStores kAllStores[] = {SlotStores::kCached, SlotStores::kStreaming, SlotStores::kClaimed};

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
        CHECK(pair.b[0].recv->Pull(plain, 0, got.data(), kBytes, false) == kBytes && got == sent, "number %u", i);
      }
      // All are consumed, but the first slot is still in use.
      Bytes got(kBytes);
      CHECK(pair.a[1].recv->Pull(back, 0, got.data(), kBytes, false) == kBytes, "round %u", round);
      CHECK(got == answer, "round %u", round);
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

void HandOn(const ShmOptions& options) {
  constexpr std::size_t kBytes = 5000;
  constexpr std::size_t kRing = 64 << 10;  // with slots of 8 KiB
  const Frame mutual{1, kBytes, true, -1, Use::kExchanged, true};
  const auto place = [](Pair& pair, std::uint64_t index) { return static_cast<ShmPlace>(pair.line(0, index).place); };
  Pair pair(kRing, options);
  for (unsigned round = 0; round < 300; ++round) {
    const Bytes there = Pattern(kBytes, round), back = Pattern(kBytes, round + 1000);
    CHECK(SendAll(*pair.a[0].send, mutual, there) == kBytes, "round %u", round);
    CHECK(place(pair, round) == ShmPlace::kRecycledSlot, "round %u", round);
    const std::uint64_t slot = pair.line(0, round).where.offset;
    CHECK(ReceiveAll(*pair.b[0].recv, mutual) == there, "round %u", round);
    CHECK(SendAll(*pair.b[0].send, mutual, back) == kBytes, "round %u", round);
    CHECK(pair.line_back(0, round).where.offset == slot, "round %u: what was read last is filled next", round);
    CHECK(ReceiveAll(*pair.a[0].recv, mutual) == back, "round %u", round);
  }
  // One way only: ours run out, and then there is the ring, for ever.
  Pair oneway(kRing, options);
  for (unsigned i = 0; i < 200; ++i) {
    const Bytes data = Pattern(kBytes, i);
    CHECK(SendAll(*oneway.a[0].send, mutual, data) == kBytes, "message %u", i);
    CHECK(place(oneway, i) == (i < kRecycled ? ShmPlace::kRecycledSlot : ShmPlace::kSlot), "message %u", i);
    CHECK(ReceiveAll(*oneway.b[0].recv, mutual) == data, "message %u", i);
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
  CHECK(sent == (kRecycled + 1) * (kRing / 8), "the slots that it has, and then it waits: %zu", sent);
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
  CHECK(got == there && ReceiveAll(*both.a[0].recv, lengthy) == back, "both came");
  // A slot that its sender has given away already.
  Pair twice(kRing, options);
  for (std::size_t i = 0; i <= kRecycled; ++i) {
    CHECK(SendAll(*twice.a[0].send, Frame{1, 100, true, -1, Use::kExchanged, true}, Pattern(100, 1)) == 100, "sent");
    ShmLine& line = twice.line(0, i);
    line.place = int(ShmPlace::kRecycledSlot), line.where.offset = 0;
    const FaultKind kind = KindOf([&] { static_cast<void>(ReceiveAll(*twice.b[0].recv, Frame{1, 100})); });
    CHECK(kind == (i < kRecycled ? FaultKind::kNone : FaultKind::kCorrupt), "slot %zu: kind %d", i, int(kind));
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
  CHECK(ReceiveAll(*around.b[0].recv, mutual) == data, "received");
}

// What was taken from the first on that is still read counts as lent, whichever way the rest went, but nothing before.
void LentInOrder() {
  Pair pair(64 << 10);
  std::byte* heap = pair.segment->base() + pair.layout.HeapOffset(0);
  const Bytes data = Pattern(20000, 1);
  std::memcpy(heap, data.data(), data.size());
  SendEnd& send = *pair.a[0].send;
  const Frame first{1, 20000, true}, copied{2, 100, true}, last{3, 18000, true};
  CHECK(send.Push(first, 0, heap, 20000) == 20000 && send.Lent() == 20000, "%zu are lent", send.Lent());
  CHECK(send.Push(copied, 0, data.data(), 100) == 100 && send.Lent() == 20100, "%zu are lent", send.Lent());
  CHECK(send.Push(last, 0, heap, 18000) == 18000 && send.Lent() == 38100, "%zu are lent", send.Lent());
  CHECK(ReceiveAll(*pair.b[0].recv, first) == data, "the first");
  CHECK(send.Lent() == 18000, "%zu are lent", send.Lent());
  CHECK(ReceiveAll(*pair.b[0].recv, copied).size() == 100 && send.Lent() == 18000, "%zu are lent", send.Lent());
  CHECK(ReceiveAll(*pair.b[0].recv, last).size() == 18000 && send.Lent() == 0, "%zu are lent", send.Lent());
  const Frame unread{4, 100, true}, behind{5, 18000, true};
  CHECK(send.Push(unread, 0, data.data(), 100) == 100 && send.Lent() == 0, "%zu are lent", send.Lent());
  CHECK(send.Push(behind, 0, heap, 18000) == 18000 && send.Lent() == 18000, "%zu are lent", send.Lent());
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

// Whoever has read a slot of the ring gives its lines back modified, by whichever instruction they were copied, and in
// however many parts.
void Claims() {
  for (const std::size_t total : {std::size_t{1000}, std::size_t{16} << 10, std::size_t{64} << 10}) {
    for (const std::size_t part : {total, total / 2}) {
      Pair pair(std::size_t{2} << 20, {SlotStores::kClaimed});
      const Frame m{1, total, false, -1, Use::kStored};
      const Bytes data(total, std::byte{7});
      const std::byte* ring = Edge(*pair.segment, 0, 1, 0).data;
      CHECK(SendAll(*pair.a[0].send, m, data) == total && ring[0] == std::byte{7}, "sent");
      for (std::size_t at = 0; at < total;) {
        Bytes got(part);
        const std::ptrdiff_t n = pair.b[0].recv->Pull(m, at, got.data(), std::min(part, total - at), false);
        CHECK(n > 0 && got[0] == std::byte{7}, "received");
        if (n <= 0) break;
        at += static_cast<std::size_t>(n);
      }
      std::size_t claimed = 0;
      for (std::size_t i = 0; i < total; i += kLineBytes) claimed += ring[i] == std::byte{0};
      CHECK(claimed == (total + kLineBytes - 1) / kLineBytes, "%zu lines of %zu bytes are claimed", claimed, total);
    }
  }
}

// How messages are cut: what goes one way only, so that its receiver can read a part while the next is copied.
void Fragments() {
  const auto fragments = [](std::size_t total, Use use, bool mutual) {
    Pair pair(std::size_t{2} << 20, {SlotStores::kCached});
    const Bytes data(total);
    CHECK(SendAll(*pair.a[0].send, Frame{1, total, true, -1, use, mutual}, data) == total, "sent");
    std::uint64_t count = 0;
    while (pair.line(0, count).stamp == count + 1) ++count;
    return count;
  };
  constexpr std::size_t kKiB = 1024;
  CHECK(fragments(64 * kKiB, Use::kStored, false) == 4, "one way");
  CHECK(fragments(255 * kKiB, Use::kStored, false) == 16, "one way");
  CHECK(fragments(256 * kKiB, Use::kStored, false) == 1, "a long one");
  CHECK(fragments(64 * kKiB, Use::kStored, true) == 1 && fragments(64 * kKiB, Use::kSummed, false) == 1, "others");
}

// All-reduces by every way of writing slots, over rings that hold less than one message and more than several.
void Stores() {
  for (const SlotStores stores : kAllStores) {
    for (const std::size_t ring : {std::size_t{4096}, std::size_t{64} << 10, std::size_t{2} << 20}) {
      for (int size = 2; size <= 3; ++size) {
        Job job({.size = size, .ring_bytes = ring, .shm = {.stores = stores}});
        for (const std::size_t count : {7, 300, 5003, size == 2 ? 70001 : 30011}) {
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
      {"in a slot that is none",
       [](ShmLine& l) { l.place = int(ShmPlace::kRecycledSlot), l.where.offset = 2 * kRecycled; }},
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

}  // namespace hetcoll::testing
