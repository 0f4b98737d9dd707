// Plans on the streams of GPUs that share a host.

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>

#include "gpu/copier.h"
#include "gpus.h"

namespace hetcoll::testing {
namespace {

// Rank 0 of three, of which rank 2 is on another host, sums with `peer`, and moves some of it inside its GPU. The edge
// to the other host is the queue's first one: no step but a message may be taken for a user of it. A ring sends twice.
void SignalLanes(Gpus& gpus, int peer, Signals asked, bool captured, Signals wanted, const char* what) {
  gpus.Edge(0, 0, 2, 0);
  std::size_t published = 0, granted = 0;
  std::set<std::uint8_t> filling;
  for (const auto draw : {ScratchAllreduce, RingAllreduce}) {
    BoundPlan plan(Plan(draw(2, 0), 2), DType::kInt32, 10, 10, std::span<const std::size_t>{},
                   std::span<const std::size_t>{});
    std::vector<std::uint32_t> order(plan.steps.size());
    std::iota(order.begin(), order.end(), 0u);
    std::vector<std::uint16_t> edges;
    for (const BoundStep& s : plan.steps) {
      const bool sends = s.op == Op::kSend;
      edges.push_back(s.op <= Op::kRecvReduce ? gpus.Edge(0, sends ? 0 : peer, sends ? peer : 0, s.channel) : 0);
    }
    CHECK(draw == RingAllreduce || std::ranges::count(edges, 0) > 1, "steps without an edge");
    const DeviceProgram program = captured ? CaptureRecipe{plan, edges, order, 1, {}, {}}.Program(Gpus::kSlotBytes)
                                           : gpus.queues[0]->Compile(plan, order, edges, asked);
    for (const DeviceAction& a : program.actions) {
      const bool tells = a.step == DeviceStep::kPublish, gives_back = a.step == DeviceStep::kGrant;
      const bool fills = a.stream == kOutLanes || a.stream == kOutLanes + 1;
      const bool empties = a.stream == kInLanes || a.stream == kInLanes + 1, signals = a.stream == kSignalLane;
      if (a.step == DeviceStep::kCopyOut) filling.insert(a.stream);
      published += tells;
      granted += gives_back;
      CHECK(!tells || (wanted == Signals::kApart ? fills : signals), what);
      CHECK(!gives_back || (wanted == Signals::kTogether ? signals : empties), what);
    }
  }
  CHECK(published > 0 && granted > 0, what);
  CHECK(filling.size() == (wanted == Signals::kApart ? 1 : kCopyLanes), what);
}

}  // namespace

void SignalsOfPrograms() {
  Gpus gpus(3, 3, 1, false, {0, 0, 1});
  using enum Signals;
  SignalLanes(gpus, 1, kTogether, false, kTogether, "collectives inside a host have one stream for signals");
  SignalLanes(gpus, 1, kApart, false, kApart, "messages say themselves what they have done");
  SignalLanes(gpus, 2, kApart, false, kApart, "so do those between hosts");
  SignalLanes(gpus, 1, kApart, true, kFull, "receives of captured calls do");
  SignalLanes(gpus, 1, kFull, false, kFull, "and those of all-to-alls");
  SignalLanes(gpus, 2, kTogether, false, kFull, "and those of collectives between hosts");
}

// Moves come out as they went in, long ones in parts; and no row is written before what reads it has ended.
void TablesOfMoves() {
  std::minstd_rand random(3);
  for (const std::size_t size : {100, 1000, 5000}) {
    std::vector<Move> room(size);
    MoveTable table;
    table.Use(room);
    struct Launch {
      std::uint64_t mark;
      std::span<const Move> rows;
      std::vector<Move> were;
    };
    std::deque<Launch> under_way;
    std::uint64_t marks = 0;
    std::size_t added = 0, full = 0;
    for (int turn = 0; turn < 2000; ++turn) {
      std::vector<Move> moves;
      for (std::size_t n = 1 + random() % 200; n > 0; --n) {
        const std::size_t nbytes = 1 + random() % (random() % 8 == 0 ? 900'000 : 3000);
        moves.push_back({reinterpret_cast<void*>(std::uintptr_t{random()} << 20),
                         reinterpret_cast<const void*>(std::uintptr_t{random()} << 20), nbytes});
      }
      const auto [rows, moved] = table.Add(moves);
      CHECK((moved == 0) == rows.empty(), "rows of %zu moves", moved);
      std::size_t row = 0;
      for (const Move& move : std::span(moves).first(moved)) {
        std::size_t at = 0;
        for (; at < move.n; at += rows[row++].n) {
          CHECK(row < rows.size() && static_cast<std::byte*>(move.dst) + at == rows[row].dst &&
                    static_cast<const std::byte*>(move.src) + at == rows[row].src && rows[row].n <= 65536,
                "row %zu of %zu", row, rows.size());
        }
        CHECK(at == move.n, "%zu bytes of %zu", at, move.n);
      }
      CHECK(row == rows.size(), "more rows than moves have");
      added += moved;
      full += moved < moves.size();
      if (moved > 0) under_way.push_back({marks + 1, rows, {rows.begin(), rows.end()}});
      if (random() % 3 == 0) table.Mark(++marks);
      if (random() % 5 == 0 && marks > 0) {
        const std::uint64_t passed = under_way.empty() ? marks : std::min(marks, under_way.front().mark + random() % 3);
        for (; !under_way.empty() && under_way.front().mark <= passed; under_way.pop_front()) {
          const Launch& launch = under_way.front();
          CHECK(std::memcmp(launch.rows.data(), launch.were.data(), launch.rows.size_bytes()) == 0, "written over");
        }
        table.Pass(passed);
      }
    }
    CHECK(added > size && full > 0, "it went round, and was full: %zu, %zu", added, full);
  }
}

// All-to-alls of ranks that have each other's memory at hand, on two streams by turns: out of place, and in place,
// which the next one starts from. Nobody waits before the last.
void Pulls(Gpus& gpus) {
  constexpr std::size_t kPart = 300;
  const auto n = static_cast<std::size_t>(gpus.size);
  std::vector<Bytes> mine(n, Bytes(n * kPart)), apart(n, Bytes(n * kPart)), scratch(n, Bytes(n * kPart));
  const auto value = [](std::size_t from, std::size_t to) { return static_cast<std::byte>(1 + 16 * from + to); };
  std::vector<DeviceShape> shapes[2];
  for (std::size_t r = 0; r < n; ++r) {
    const auto edge = [&](std::size_t src, std::size_t dst) {
      Slots slots = gpus.SlotsOf(static_cast<int>(r), static_cast<int>(src), static_cast<int>(dst), 2);
      slots.count = 1;
      return gpus.queues[r]->AddEdge({slots});
    };
    std::vector<std::uint16_t> readers;
    std::vector<Pull> pulls;
    for (std::size_t p = 0; p < n; ++p) {
      std::fill_n(mine[r].begin() + static_cast<std::ptrdiff_t>(p * kPart), kPart, value(r, p));
      if (p == r) continue;
      readers.push_back(edge(r, p));
      pulls.push_back({edge(p, r), p * kPart, mine[p].data() + r * kPart, kPart});
    }
    const OwnPart own{r * kPart, r * kPart, kPart};
    shapes[0].push_back({DeviceProgram(readers, pulls, own, false), {}, {}, 1, 1});
    shapes[1].push_back({DeviceProgram(readers, pulls, std::nullopt, true), {}, {}, 1, 1});
  }
  for (int turn = 0; turn < 6; ++turn) {
    const bool in_place = turn % 2 == 1;
    for (std::size_t r = 0; r < n; ++r) {
      std::byte* into = in_place ? mine[r].data() : apart[r].data();
      gpus.queues[r]->Enqueue(shapes[in_place][r], mine[r].data(), into, scratch[r].data(), 0,
                              gpus.User(static_cast<int>(r), turn % 4 / 2), turn % 3 != 0);
    }
  }
  for (std::size_t r = 0; r < n; ++r) {
    while (!gpus.queues[r]->PullsDone() || !gpus.queues[r]->Idle()) SleepMs(1);
    CHECK(!gpus.drivers[r]->stuck, "pulls of %zu ranks: a stream waited for ever", n);
  }
  for (std::size_t r = 0; r < n; ++r) {
    for (std::size_t p = 0; p < n; ++p) {
      const auto part = static_cast<std::ptrdiff_t>(p * kPart);
      const auto is = [&](const Bytes& memory, std::byte wanted) {
        return std::all_of(memory.begin() + part, memory.begin() + part + kPart,
                           [&](std::byte b) { return b == wanted; });
      };
      CHECK(is(mine[r], value(p, r)) && is(apart[r], value(p, r)), "pulls of %zu ranks: rank %zu, part %zu", n, r, p);
    }
  }
}

void GpusOfOneHost() {
  struct Setting {
    int queues;
    bool late;
  };
  const Setting settings[] = {{6, false}, {8, true}, {1, false}, {2, true}};
  std::minstd_rand random(7);
  for (const Setting& s : settings) {
    for (const int size : {2, 3}) {
      Gpus host(size, s.queues, 11, s.late);
      for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{250}}) {
        Reduce(host, RingAllreduce, count, random, "ring");
        Reduce(host, DirectAllreduce, count, random, "direct");
        Reduce(host, ScratchAllreduce, count, random, "scratch");
      }
      Pulls(host);
    }
  }
  Gpus host(2, 3, 1, false);
  const BoundPlan big(Plan(DirectAllreduce(2, 0), 2), DType::kInt32, 5000, 5000, std::span<const std::size_t>{},
                      std::span<const std::size_t>{});
  const std::vector<std::uint32_t> order{0, 1, 2, 3};
  const std::vector<std::uint16_t> edges(4, 0);
  bool refused = false;
  try {
    DeviceProgram(big, order, edges, 1024, Signals::kApart);
  } catch (const PlanError&) {
    refused = true;
  }
  CHECK(refused, "a message larger than a slot");
}

}  // namespace hetcoll::testing
