// Sums that stay where their first summand lies: each rank adds to what it was lent, and lends it on.
#include "harness.h"
#include "shm_pair.h"

namespace hetcoll::testing {
namespace {

constexpr std::size_t kBytes = 20000;

// Three ranks of one process: what rank 0 lends to rank 1 goes on to rank 2.
struct Three {
  Three() : layout(3, 64 << 10) {
    const int fd = memfd_create("hetcoll-test", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(layout.total_bytes)) != 0) std::abort();
    first = std::make_shared<ShmSegment>(fd, layout);
    close(fd);
    second = first->Share();
    third = first->Share();
    from = MakeShm(*first, 0, 1, 1);
    taken = MakeShm(*second, 1, 0, 0);
    passed = MakeShm(*second, 1, 2, 2);
    got = MakeShm(*third, 2, 1, 1);
    place = first->base() + layout.HeapOffset(0);
  }

  Bytes Place() const { return Bytes(place, place + kBytes); }

  ShmLayout layout;
  std::shared_ptr<ShmSegment> first, second, third;
  std::array<LinkEnds, kChannels> from, taken, passed, got;
  std::byte* place;  // on the first one's heap
};

Frame Given(std::uint64_t signature, bool gives = true) {
  Frame m{signature, kBytes, true};
  m.gives = gives;
  return m;
}

void LendOn(Three& three, const Frame& m) {
  const Bytes data = Pattern(kBytes, 1), sum = Pattern(kBytes, 2);
  std::memcpy(three.place, data.data(), kBytes);
  SendEnd& from = *three.from[0].send;
  SendEnd& on = *three.passed[0].send;
  CHECK(from.Push(m, 0, three.place, kBytes) == std::ptrdiff_t(kBytes) && from.Lent() == kBytes, "lent");
  const View view = three.taken[0].recv->Peek(m, 0, kBytes);
  CHECK(view.data == three.place && view.n == std::ptrdiff_t(kBytes), "where it lies");
  std::byte* own = three.place + three.layout.heap_bytes;
  std::byte* slot = on.Reserve(own, kBytes, view.data);
  CHECK(slot == three.place, "where it lies");
  if (slot == nullptr) return;
  std::memcpy(slot, sum.data(), kBytes);
  on.Commit(m, 0, kBytes);
  three.taken[0].recv->Consume(kBytes);
  CHECK(on.Lent() == 0, "it is not this one's memory");
  CHECK(from.Lent() == kBytes, "its owner has it back when all have read it");
  CHECK(three.third->borrowed().returned.empty() && !from.FinalWithoutPeer(), "not before");
  CHECK(ReceiveAll(*three.got[0].recv, m) == sum, "the sum");
  CHECK(three.third->borrowed().returned == std::vector{0}, "its owner is to be told");
  CHECK(from.Lent() == 0 && from.FinalWithoutPeer() && on.Lent() == 0, "it is home");
  three.third->borrowed().returned.clear();
}

// What may not be lent on: what its owner still reads, parts, and what was shown before.
void NotLentOn() {
  Three three;
  SendEnd& from = *three.from[0].send;
  RecvEnd& taken = *three.taken[0].recv;
  std::byte* own = three.place + three.layout.heap_bytes;
  const auto offer = [&](const Frame& m, std::size_t n) {
    CHECK(from.Push(m, 0, three.place, kBytes) == std::ptrdiff_t(kBytes), "lent");
    const View view = taken.Peek(m, 0, n);
    return three.passed[0].send->Reserve(own, static_cast<std::size_t>(view.n), view.data);
  };
  CHECK(offer(Given(1, false), kBytes) == nullptr, "its owner still reads it");
  taken.Consume(kBytes);
  CHECK(offer(Given(2), kBytes / 2) == nullptr, "a part of it");
  taken.Consume(kBytes / 2);
  const View rest = taken.Peek(Given(2), kBytes / 2, kBytes / 2);
  CHECK(three.passed[0].send->Reserve(own, kBytes / 2, rest.data) == nullptr, "the rest of it");
  taken.Consume(kBytes / 2);
  CHECK(offer(Given(3), kBytes) == three.place, "all of it");
  taken.Consume(kBytes);
  CHECK(three.passed[0].send->Reserve(own, kBytes, three.place) == nullptr, "what was used up");
  CHECK(from.Lent() == 0, "nothing was lent on, so all is home");
}

// Whoever reads what a rank lent that has failed since must not rely on it, even if others passed it on.
void LenderFails() {
  Three three;
  const Frame m = Given(1);
  CHECK(three.from[0].send->Push(m, 0, three.place, kBytes) == std::ptrdiff_t(kBytes), "lent");
  const View view = three.taken[0].recv->Peek(m, 0, kBytes);
  CHECK(three.passed[0].send->Reserve(three.place, kBytes, view.data) == three.place, "where it lies");
  three.passed[0].send->Commit(m, 0, kBytes);
  three.taken[0].recv->Consume(kBytes);
  three.first->owner(0).withdrawn = 1;
  const FaultKind kind = KindOf([&] { static_cast<void>(ReceiveAll(*three.got[0].recv, m)); });
  CHECK(kind == FaultKind::kPeerGone, "kind %d", int(kind));
}

void BadLines() {
  struct Case {
    const char* what;
    void (*spoil)(ShmLine::Where&, const ShmLayout&);
  };
  const Case cases[] = {
      {"no line", [](ShmLine::Where& w, const ShmLayout&) { w.fragment = 4097; }},
      {"a line on a heap", [](ShmLine::Where& w, const ShmLayout& l) { w.fragment = l.HeapOffset(1); }},
      {"a line far away", [](ShmLine::Where& w, const ShmLayout&) { w.fragment = 1ull << 62; }},
      {"memory that is no heap", [](ShmLine::Where& w, const ShmLayout&) { w.offset = 64; }},
      {"memory behind the last heap", [](ShmLine::Where& w, const ShmLayout& l) { w.offset = l.total_bytes; }},
      {"memory that ends there", [](ShmLine::Where& w, const ShmLayout& l) { w.offset = l.total_bytes - 64; }},
  };
  for (const Case& c : cases) {
    Three three;
    CHECK(three.from[0].send->Push(Given(1), 0, three.place, kBytes) == std::ptrdiff_t(kBytes), "lent");
    c.spoil(Edge(*three.first, 0, 1, 0).line(0).where, three.layout);
    const FaultKind kind = KindOf([&] { static_cast<void>(three.taken[0].recv->Peek(Given(1), 0, kBytes)); });
    CHECK(kind == FaultKind::kCorrupt, "%s: kind %d", c.what, int(kind));
  }
}

// algorithms/chained.py with one chain, twice through the same place.
Encoded ChainedAllreduce(int n, int r) {
  constexpr int kRounds = 2;
  Draft p(n, r, kRounds, kRounds);
  p.Scratch(1);
  p.Stage();
  int read = -1, copied = -1;
  for (int k = 0; k < kRounds; ++k) {
    const int summed = r == 0 ? p.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(k), {read})
                              : p.RecvReduce(1, Draft::Tmp(0), Draft::In(k), r - 1, 0, {read, copied});
    if (r < n - 1) {
      read = p.Send(2, Draft::Tmp(0), r + 1, 0, {summed});
      p.Recv(5, Draft::Out(k), n - 1, 1);
      continue;
    }
    for (int peer = 0; peer < n - 1; ++peer) read = p.Send(3, Draft::Tmp(0), peer, 1, {summed});
    copied = p.Local(Op::kCopy, 4, Draft::Out(k), Draft::Tmp(0), {summed});
  }
  return p.Encode();
}

}  // namespace

void BorrowedBuffers() {
  Three three;
  for (std::uint64_t signature = 1; signature < 3 * kLines; ++signature) LendOn(three, Given(signature));
  NotLentOn();
  LenderFails();
  BadLines();
}

// Which sends say that their memory may be used: those of all ranks but the last, whose sums are sent to several.
void GivenSends() {
  for (int rank = 0; rank < 4; ++rank) {
    for (const BoundStep& s : BoundPlan(Plan(ChainedAllreduce(4, rank), 4), DType::kInt32, 8, 8, {}, {}).steps) {
      CHECK(s.gives == (s.op == Op::kSend && rank < 3), "rank %d, operation %d", rank, int(s.op));
    }
  }
  const auto gives = [](const Draft& p) {
    std::vector<bool> found;
    for (const BoundStep& s : BoundPlan(Plan(p.Encode(), 2), DType::kInt32, 8, 8, {}, {}).steps) {
      if (s.op == Op::kSend) found.push_back(s.gives);
    }
    return found;
  };
  const auto draft = [](bool staged = true) {
    Draft p(2, 0, 2, 2);
    p.Scratch(1);
    if (staged) p.Stage();
    return p;
  };
  Draft once = draft();
  once.Send(1, Draft::Tmp(0), 1, 0, {once.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(0))});
  CHECK(gives(once) == std::vector{true}, "written and sent");
  Draft hidden = draft(false);
  hidden.Send(1, Draft::Tmp(0), 1, 0, {hidden.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(0))});
  CHECK(gives(hidden) == std::vector{false}, "not where others can read it");
  Draft users = draft();
  users.Send(0, Draft::In(0), 1, 0);
  CHECK(gives(users) == std::vector{false}, "the caller's memory");
  Draft later = draft();
  const int sent = later.Send(1, Draft::Tmp(0), 1, 0, {later.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(0))});
  later.Local(Op::kCopy, 0, Draft::Out(0), Draft::Tmp(0), {sent});
  CHECK(gives(later) == std::vector{false}, "read later");
  Draft before = draft();
  const int kept = before.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(0));
  before.Local(Op::kCopy, 0, Draft::Out(0), Draft::Tmp(0));
  before.Send(1, Draft::Tmp(0), 1, 0, {kept});
  CHECK(gives(before) == std::vector{false}, "read meanwhile");
  Draft partly = draft();
  const int both = partly.Local(Op::kCopy, 0, {2, 0, 2}, {0, 0, 2});
  const int first = partly.Send(1, {2, 0, 2}, 1, 0, {both});
  const int half = partly.Local(Op::kCopy, 0, Draft::Tmp(0), Draft::In(0), {first});
  partly.Send(1, {2, 0, 2}, 1, 0, {half});
  CHECK((gives(partly) == std::vector{false, false}), "a part is sent again");
}

// Through engines: between the first and the last, a rank has no sums of its own.
void LoansOfEngines() {
  for (const char* fault : {"", "short=0.5,delay=0.1", "short=0.5,delay=0.1,rank=1"}) {
    Job job({.size = 4, .ring_bytes = 16384, .fault = fault});
    for (const std::size_t count : {8, 9002, 300008}) {
      Allreduce(job, ChainedAllreduce, DType::kInt32, count, "chained");
      if (*fault != 0 || count < 9002) continue;
      for (int rank = 0; rank < 4; ++rank) {
        Heap& heap = *job.engine(rank).heap();
        std::byte* end = heap.Allocate(1);  // what the engine has there begins where the heap does
        const std::size_t nbytes = (CutOffset(count, 2, 1) * sizeof(std::int32_t) + 4095) / 4096 * 4096;
        const bool written = std::any_of(end - nbytes, end, [](std::byte b) { return b != std::byte{0}; });
        CHECK(written == (rank == 0 || rank == 3), "%zu, rank %d", count, rank);
        heap.Free(end, 1);
      }
    }
  }
}

}  // namespace hetcoll::testing
