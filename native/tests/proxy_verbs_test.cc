// Proxies over fake RDMA devices: slots in memory that no processor may touch, and in the host's.

#include <random>

#include "fake_copier.h"
#include "harness.h"
#include "mender.h"
#include "proxy/proxy.h"

namespace hetcoll::testing {
namespace {

constexpr unsigned kSlots = 8;
constexpr std::size_t kSlotBytes = std::size_t{192} << 10;
constexpr std::size_t kWords = 4096;

// What NICs, and this test in the place of a GPU, see of a device's memory lies at `seen`. At `at` nobody may touch it.
class Memory {
 public:
  Memory(bool device, std::size_t n) : seen_(n), at_(device ? FakeCopier::Far(seen_.data()) : seen_.data()) {}
  std::byte* at() const { return at_; }
  std::byte* seen() { return seen_.data(); }

 private:
  Bytes seen_;
  std::byte* at_;
};

struct Setting {
  bool device = true;
  int rails = 2;
  FabricOptions fabric = {};
  std::size_t ring_bytes = 64 << 10;
  std::int64_t recovery_ns = 1'000'000'000'000;
  std::function<void(Fabric&)> prepare = nullptr;
  bool tried = false;
  std::string fault = {};
  Integrity integrity = Integrity::kOff;
  std::uint64_t copy_fails = 0;         // the number of it, of rank 0; 0: none
  std::size_t pinned = 2 * (16 << 10);  // of a link
  bool mended = false;                  // real sockets, which are made again
};

// Two ranks with an edge in each direction. NIC k of rank r is the fabric's number r * rails + k.
class Pair {
 public:
  explicit Pair(const Setting& s) : setting(s), fabric(s.fabric) {
    for (int rank = 0; rank < 2; ++rank) {
      for (int k = 0; k < s.rails; ++k) nics_.push_back(fabric.AddNic("fake" + std::to_string(rank * s.rails + k)));
    }
    if (s.prepare) s.prepare(fabric);
    for (int rank = 0; rank < 2; ++rank) {
      auto& proxy = proxies.emplace_back(std::make_shared<Proxy>(ProxyOptions{
          .threads = 1, .oversubscribed = true, .rank = rank, .fault = s.fault, .integrity = s.integrity}));
      copiers_.push_back(std::make_shared<FakeCopier>(rank == 0 ? s.copy_fails : 0));
      proxy->Try(s.tried);
      if (s.mended) proxy->MendTcp();
      for (int k = 0; k < s.rails; ++k) proxy->AddNic(Nic(rank, k), Fabric::Api());
    }
    if (s.mended) mender_.emplace(std::vector{proxies[0].get(), proxies[1].get()}, false, 4, 1);
    Connect(0);
  }
  // Links of a channel, with edges that take the place of others.
  void Connect(int channel) {
    std::pair ends = SocketPairs(setting.mended ? 0 : 1);
    if (setting.mended) {
      const auto [one, other] = TcpPair();
      ends = {{one}, {other}};
    }
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<std::pair<int, std::string>> rails;
      for (int k = 0; k < setting.rails; ++k) rails.emplace_back(k, Nic(1 - rank, k).device);
      ProxyVerbs link{.ring_bytes = setting.ring_bytes, .rails = rails, .recovery_ns = setting.recovery_ns};
      if (setting.device) {
        link.copier = copiers_[static_cast<std::size_t>(rank)];
        link.pinned = pinned_.emplace_back(setting.pinned);
      }
      proxies[static_cast<std::size_t>(rank)]->ConnectVerbs(1 - rank, channel, link,
                                                            rank == 0 ? ends.first : ends.second);
      for (const bool out : {true, false}) AddEdge(rank, channel, out);
    }
  }
  ~Pair() {
    mender_.reset();
    for (auto& proxy : proxies) proxy->Close(DeadlineNs(kPatience));
    for (ibv::Mr* mr : mrs_) Fabric::Api().dereg_mr(mr);
    proxies.clear();
    copiers_.clear();  // what they were told to copy, which nobody may want any more, ends before its memory
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  struct End {
    std::shared_ptr<ProxyEdge> edge;
    std::unique_ptr<Memory> memory;
    Slots slots;
    std::byte* At(std::uint64_t m) const { return memory->seen() + slots.Index(m) * kSlotBytes; }
  };
  End& end(int rank, bool out) { return ends_[static_cast<std::size_t>(2 * rank + out)]; }
  NicInfo& Nic(int rank, int k) { return nics_[static_cast<std::size_t>(rank * setting.rails + k)]; }

  std::uint64_t Counter(int rank, std::string_view name) {
    for (const auto& [key, value] : proxies[static_cast<std::size_t>(rank)]->Counters()) {
      if (key == name) return value;
    }
    std::abort();
  }
  // What the first proxy to fail says.
  Failure AwaitFailure() {
    for (const std::int64_t start = NowNs(); Seconds(start) < kPatience;) {
      for (auto& proxy : proxies) {
        Failure f = proxy->AwaitFailure(NowNs() + 1'000'000);
        if (f.kind != FaultKind::kNone) return f;
        static_cast<void>(proxy->TakeEvents());
      }
    }
    return {};
  }

  Setting setting;
  Fabric fabric;
  std::vector<std::shared_ptr<Proxy>> proxies;

 private:
  void AddEdge(int rank, int channel, bool out) {
    End& e = end(rank, out);
    if (e.memory != nullptr) kept_.push_back(std::move(e.memory));  // the fabric takes its addresses for a device's
    e.memory = std::make_unique<Memory>(setting.device, kSlots * kSlotBytes);
    auto& words = words_[static_cast<std::size_t>(2 * rank + out)];
    words.assign(kWords / 8, 0);
    e.slots = {e.memory->at(), words.data(), words.data() + kSlots * kWordStride, kSlotBytes, kSlots};
    std::vector<RegionKey> keys;
    for (int k = 0; k < setting.rails; ++k) {
      mrs_.push_back(Fabric::Api().reg_mr(Nic(rank, k).pd, e.memory->seen(), kSlots * kSlotBytes, 7));
      keys.push_back({k, mrs_.back()->lkey, mrs_.back()->rkey});
    }
    std::optional<std::uintptr_t> seen;
    if (setting.device) {
      seen = reinterpret_cast<std::uintptr_t>(e.memory->seen());
      fabric.HoldBack(e.memory->seen(), kSlots * kSlotBytes);
    }
    Proxy& proxy = *proxies[static_cast<std::size_t>(rank)];
    proxy.RegisterMemory(reinterpret_cast<std::uintptr_t>(e.memory->at()), kSlots * kSlotBytes, keys, seen);
    e.edge = proxy.AddEdge(1 - rank, channel, out, e.slots);
  }

  std::vector<NicInfo> nics_;
  std::vector<ibv::Mr*> mrs_;
  std::vector<std::unique_ptr<Memory>> kept_;
  std::vector<std::shared_ptr<FakeCopier>> copiers_;  // by rank
  std::deque<Bytes> pinned_;
  std::array<std::vector<std::uint64_t>, 4> words_;
  std::array<End, 4> ends_;
  std::optional<Mender<Proxy>> mender_;
};

std::size_t SizeOf(std::uint64_t message) {
  constexpr std::size_t sizes[] = {1, 100, kSlotBytes, 16 << 10, 8191, kSlotBytes - 3, 70'000};
  return sizes[message % std::size(sizes)];
}

Bytes BytesOf(int rank, std::uint64_t message) {
  return Pattern(SizeOf(message), 2 * static_cast<unsigned>(message) + static_cast<unsigned>(rank));
}

// What the GPUs' streams would do: one fills slots, one empties them. False where nothing moves any more.
bool Exchange(Pair& pair, std::uint64_t from, std::uint64_t messages) {
  std::atomic<bool> good{true};
  const auto await = [&](const std::function<bool()>& ready) {
    for (const std::int64_t start = NowNs(); !ready();) {
      if (Seconds(start) > kPatience || !good) {
        good = false;
        return false;
      }
      Nap();
    }
    return true;
  };
  const auto released = [](std::uint64_t* word) {
    return std::atomic_ref(*word).load(std::memory_order_acquire) >= kReleased;
  };
  std::vector<std::thread> streams;
  for (int rank = 0; rank < 2; ++rank) {
    streams.emplace_back([&, rank] {
      Pair::End& e = pair.end(rank, true);
      for (std::uint64_t m = from; m < from + messages; ++m) {
        e.edge->Post({m, 0x5151 + m * kNumberStep, SizeOf(m)});
        if (!await([&] { return e.slots.Free(m); }) || (m >= kSlots && released(e.slots.Credit(m)))) return;
        std::memcpy(e.At(m), BytesOf(rank, m).data(), SizeOf(m));
        e.slots.Publish(m);
      }
    });
    streams.emplace_back([&, rank] {
      Pair::End& e = pair.end(rank, false);
      std::uint64_t posted = from;
      for (std::uint64_t m = from; m < from + messages; ++m) {
        for (; posted < std::min(m + 2 * kSlots, from + messages); ++posted) {
          e.edge->Post({posted, 0x5151 + posted * kNumberStep, SizeOf(posted)});
        }
        if (!await([&] { return e.slots.Full(m); })) return;
        if (released(e.slots.Ready(m))) {
          good = false;
          return;
        }
        CHECK(std::memcmp(e.At(m), BytesOf(1 - rank, m).data(), SizeOf(m)) == 0, "rank %d, message %d of %zu bytes",
              rank, int(m), SizeOf(m));
        std::memset(e.At(m), 0xee, SizeOf(m));
        e.slots.Grant(m);
      }
    });
  }
  for (auto& stream : streams) stream.join();
  return good;
}

void Well(const Setting& setting, const char* what) {
  Pair pair(setting);
  CHECK(Exchange(pair, 0, 60), "%s: it stands: %s %s", what, pair.proxies[0]->Describe().c_str(),
        pair.proxies[1]->Describe().c_str());
  for (int rank = 0; rank < 2; ++rank) {
    const std::string links = pair.proxies[static_cast<std::size_t>(rank)]->DescribeLinks();
    CHECK(pair.Counter(rank, "links_over_tcp") == 0, "%s: %s", what, links.c_str());
    if (!setting.device) continue;
    CHECK(pair.Counter(rank, "staged_bytes") == 0, "%s: %s", what, links.c_str());
    CHECK(pair.Counter(rank, "direct_bytes") == pair.Counter(rank, "zero_copy_bytes"), "%s: %s", what, links.c_str());
  }
  CHECK(pair.fabric.complaints().empty(), "%s", what);
}

const std::function<void(FakeNic&)> kDeaths[] = {
    [](FakeNic& nic) { nic.down_from = nic.bytes + (std::uint64_t{1} << 20); },
    [](FakeNic& nic) { nic.fail_after = 40; },
    [](FakeNic& nic) {
      nic.fail_after = 40;
      nic.fail_delivered = true;
    },
    [](FakeNic& nic) { nic.refuse_after = 50; },
};

// A rail dies while messages are under way; the others go on with what it carried.
void Rails(const Setting& base, const char* what) {
  for (const auto& die : kDeaths) {
    for (const int victim : {0, base.rails}) {  // at either end
      Pair pair(base);
      CHECK(Exchange(pair, 0, 5), "%s", what);
      pair.fabric.Change(victim, die);
      CHECK(Exchange(pair, 5, 60), "%s: it stands: %s %s %s", what, pair.proxies[0]->AwaitFailure(NowNs()).text.c_str(),
            pair.proxies[0]->DescribeLinks().c_str(), pair.proxies[1]->DescribeLinks().c_str());
      CHECK(pair.Counter(0, "lost_rails") + pair.Counter(1, "lost_rails") > 0, "%s: no rail was lost", what);
      CHECK(pair.Counter(0, "links_over_tcp") == 0, "%s", what);
      CHECK(pair.fabric.complaints().empty(), "%s", what);
    }
  }
}

void KillAll(Pair& pair, std::uint64_t bytes = 1 << 20) {
  for (int nic = 0; nic < 2 * pair.setting.rails; ++nic) {
    pair.fabric.Change(nic, [&](FakeNic& n) { n.down_from = n.bytes + bytes; });
  }
}

}  // namespace

void ProxiesOverVerbs() {
  for (const bool device : {true, false}) {
    const char* what = device ? "direct" : "staged";
    Well({.device = device, .rails = 1}, what);
    Well({.device = device, .rails = 3, .fabric = {.threaded = true, .overtake = true, .seed = 3}}, what);
    Well({.device = device, .rails = 2, .ring_bytes = 1 << 20}, what);
  }
}

void ProxiesThatLoseRails() {
  Rails({.device = true, .rails = 2}, "direct");
  Rails({.device = true, .rails = 3, .fabric = {.threaded = true, .overtake = true, .seed = 5}}, "direct, overtaking");
  Rails({.device = false, .rails = 2, .fabric = {.threaded = true}}, "staged");
}

// All rails die while messages are under way. TCP goes on with what they carried, and with what comes, which a GPU's
// copier brings to the host's memory and back.
void GoesOn(const Setting& setting, const std::function<void(FakeNic&)>& die, const char* what) {
  Pair pair(setting);
  CHECK(Exchange(pair, 0, 5), "%s: before", what);
  for (int nic = 0; nic < 2 * setting.rails; ++nic) pair.fabric.Change(nic, die);
  CHECK(Exchange(pair, 5, 60), "%s: it stands: %s %s %s", what, pair.proxies[0]->AwaitFailure(NowNs()).text.c_str(),
        pair.proxies[0]->DescribeLinks().c_str(), pair.proxies[1]->DescribeLinks().c_str());
  for (int rank = 0; rank < 2; ++rank) {
    Proxy& proxy = *pair.proxies[static_cast<std::size_t>(rank)];
    const std::string links = proxy.DescribeLinks();
    CHECK(pair.Counter(rank, "links_over_tcp") == 1 && pair.Counter(rank, "tcp_bytes") > 0, "%s: %s", what,
          links.c_str());
    CHECK(links.find("\"path\":\"tcp\"") != std::string::npos, "%s: %s", what, links.c_str());
    CHECK(!setting.device || pair.Counter(rank, "staged_bytes") == 0, "%s: %s", what, links.c_str());
    const bool checked = setting.integrity == Integrity::kAll;
    const std::uint64_t found = proxy.integrity().checked_bytes.get();
    CHECK(checked ? found >= pair.Counter(1 - rank, "tcp_bytes") : found == 0, "%s: %d bytes were checked", what,
          int(found));
    std::string events;
    for (const std::string& event : proxy.TakeEvents()) events += event;
    CHECK(events.find("0 left, going on over TCP") != std::string::npos, "%s: %s", what, events.c_str());
  }
  if (setting.mended) {
    const std::uint64_t made = pair.proxies[0]->reconnects() + pair.proxies[1]->reconnects();
    CHECK(made > 10, "%s: only %d sockets were made again", what, int(made));
  }
  CHECK(pair.fabric.complaints().empty(), "%s", what);
}

void ProxiesThatLoseAllRails() {
  for (const auto& die : kDeaths) {
    GoesOn({.device = false}, die, "the host's");
    GoesOn({.device = true}, die, "a GPU's");
    GoesOn({.device = true, .rails = 3, .fabric = {.threaded = true, .overtake = true, .seed = 7}}, die, "overtaking");
  }
  const auto& down = kDeaths[0];
  GoesOn({.device = true, .rails = 1, .integrity = Integrity::kAll}, down, "checked");
  GoesOn({.device = true, .fault = "short=0.5,delay=0.2,reorder=0.2,seed=3"}, down, "short");
  GoesOn({.device = true, .pinned = 2 * 5000}, down, "little pinned memory");
}

// And over sockets that are reset all the while.
void ProxiesThatLoseAllRailsAndSockets() {
  if (!MayReset()) return;
  const auto& down = kDeaths[0];
  for (const char* fault : {"reset=40000,seed=3", "rank=1,reset=90000,short=0.3"}) {
    for (const bool device : {true, false}) {
      GoesOn({.device = device, .fault = fault, .mended = true}, down, fault);
      GoesOn({.device = device, .fault = fault, .integrity = Integrity::kAll, .mended = true}, down, fault);
    }
  }
}

// A driver that refuses a copy ends it: where, for what, and the driver's words.
void ProxiesWhoseCopiesFail() {
  Pair pair({.device = true, .copy_fails = 3});
  CHECK(Exchange(pair, 0, 5), "before");
  KillAll(pair);
  std::thread streams([&] { CHECK(!Exchange(pair, 5, 60), "it ends"); });
  const Failure f = pair.AwaitFailure();
  for (auto& proxy : pair.proxies) proxy->Fail(FaultKind::kAborted, -1, "a rank failed");
  streams.join();
  CHECK(f.kind == FaultKind::kSystem && f.peer == 1, "%d: %s", f.peer, f.text.c_str());
  CHECK(f.text.find("no rail to rank 1 is left, and to go on over TCP a copy ") != std::string::npos &&
            f.text.find("the GPU's memory failed: the copy failed") != std::string::npos,
        "%s", f.text.c_str());
}

// A link between GPUs' memory that never had a rail is none: the way through host memory has more sockets.
void ProxiesThatNeverHadARail() {
  Pair pair({.device = true, .prepare = [](Fabric& fabric) {
               for (int nic = 0; nic < 2; ++nic) fabric.nic(nic).down = true;
             }});
  std::thread streams([&] { CHECK(!Exchange(pair, 0, 5), "it ends"); });
  const Failure f = pair.AwaitFailure();
  for (auto& proxy : pair.proxies) proxy->Fail(FaultKind::kAborted, -1, "a rank failed");
  streams.join();
  CHECK(f.kind == FaultKind::kSystem && f.text.find("HETCOLL_CROSS=staged") != std::string::npos, "%s", f.text.c_str());
  CHECK(f.text.find("no rail to rank") != std::string::npos && f.text.find("fake") != std::string::npos, "%s",
        f.text.c_str());
}

// A link that fails while ways are tried ends nothing else: it is left, and another one takes its place.
void ProxiesThatAreTried() {
  Pair pair({.device = true,
             .prepare =
                 [](Fabric& fabric) {
                   for (int nic = 0; nic < 2; ++nic) fabric.nic(nic).down = true;
                 },
             .tried = true});
  CHECK(!Exchange(pair, 0, 5), "its streams are let go");
  for (int rank = 0; rank < 2; ++rank) {
    Proxy& proxy = *pair.proxies[static_cast<std::size_t>(rank)];
    CHECK(proxy.Problem(1 - rank).find("no rail to rank") != std::string::npos, "rank %d: %s", rank,
          proxy.Problem(1 - rank).c_str());
    proxy.Leave(1 - rank);
    CHECK(proxy.Problem(1 - rank).empty() && proxy.Idle(), "%s", proxy.Describe().c_str());
    CHECK(proxy.AwaitFailure(NowNs()).kind == FaultKind::kNone, "the proxy goes on");
    CHECK(pair.Counter(rank, "links") == 0, "%s", proxy.DescribeLinks().c_str());
  }
  for (int nic = 0; nic < 4; ++nic) pair.fabric.Change(nic, [](FakeNic& n) { n.down = false; });
  pair.setting.device = false;
  pair.Connect(3);
  CHECK(Exchange(pair, 0, 60), "it stands: %s %s %s", pair.proxies[0]->DescribeLinks().c_str(),
        pair.proxies[0]->Problem(1).c_str(), pair.proxies[1]->Problem(0).c_str());
  CHECK(pair.Counter(0, "links_over_tcp") == 0, "%s", pair.proxies[0]->DescribeLinks().c_str());
}

// A message that the peer does not expect is found before a byte of it is sent.
void ProxiesThatDiffer() {
  for (const bool length : {true, false}) {
    Pair pair({});
    Pair::End& from = pair.end(0, true);
    from.edge->Post({0, 7, 1000});
    from.slots.Publish(0);
    pair.end(1, false).edge->Post({0, length ? 7u : 8u, length ? 1001u : 1000u});
    const Failure f = pair.AwaitFailure();
    CHECK(f.kind == FaultKind::kMismatch || f.kind == FaultKind::kCorrupt, "%s", f.text.c_str());
    CHECK(f.peer == 1, "%d: %s", f.peer, f.text.c_str());
    CHECK(!length || f.text.find("wants a message of 1001 bytes") != std::string::npos, "%s", f.text.c_str());
  }
}

// A NIC that cannot read back what it wrote is given up, and what it brought comes again over the other.
void ProxiesThatCannotReadBack() {
  Pair pair({.device = true, .rails = 2, .prepare = [](Fabric& fabric) { fabric.nic(2).no_reads = true; }});
  CHECK(Exchange(pair, 0, 60), "it stands: %s", pair.proxies[1]->DescribeLinks().c_str());
  const std::string links = pair.proxies[1]->DescribeLinks();
  CHECK(pair.Counter(1, "lost_rails") == 1 && links.find("reading back") != std::string::npos, "%s", links.c_str());
  CHECK(pair.Counter(0, "resent") > 0, "%s", links.c_str());
}

// Rails of a GPU's link come back: what was lost with them came over the others meanwhile, and their devices, which
// could not read back while they were down, do so again. Then they carry their part again.
void ProxiesWhoseRailsComeBack() {
  Pair pair({.device = true, .rails = 2, .fabric = {.threaded = true}, .recovery_ns = 30'000'000});
  std::uint64_t from = 0;
  const auto exchange = [&](std::uint64_t messages, const char* what) {
    const bool good = Exchange(pair, from, messages);
    CHECK(good, "%s: it stands: %s %s %s", what, pair.proxies[0]->AwaitFailure(NowNs()).text.c_str(),
          pair.proxies[0]->DescribeLinks().c_str(), pair.proxies[1]->DescribeLinks().c_str());
    from += messages;
    return good;
  };
  const auto until = [&](const char* what, const std::function<bool()>& so) {
    for (const std::int64_t start = NowNs(); !so();) {
      if (Seconds(start) > kPatience || !exchange(2, what)) {
        CHECK(false, "%s: %s", what, pair.proxies[0]->DescribeLinks().c_str());
        return false;
      }
    }
    return true;
  };
  exchange(5, "before");
  for (std::uint64_t turn = 0; turn < 4; ++turn) {
    const int bad = static_cast<int>(turn);
    pair.fabric.Change(bad, [](FakeNic& nic) { nic.down_from = nic.bytes + 100'000; });
    const auto lost = [&] { return pair.Counter(0, "lost_rails") > turn && pair.Counter(1, "lost_rails") > turn; };
    if (!until("lost", lost) || !exchange(10, "with one")) return;
    pair.fabric.Change(bad, [](FakeNic& nic) {
      nic.down_from = ~std::uint64_t{0};
      nic.down = false;
    });
    const auto back = [&](int rank) { return pair.Counter(rank, "recovered_rails") > turn; };
    if (!until("back", [&] { return back(0) && back(1); })) return;
    const std::uint64_t before = pair.fabric.bytes(bad);
    if (!until("again", [&] { return pair.fabric.bytes(bad) >= before + kSlotBytes; })) return;
  }
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(pair.Counter(rank, "links_over_tcp") == 0 && pair.Counter(rank, "staged_bytes") == 0, "direct");
  }
  CHECK(pair.fabric.complaints().empty(), "queues held");
}

// All rails of a GPU's link are lost in the middle of messages, which TCP goes on with, and come back. Then they carry
// everything again, as often as that happens.
void ProxiesWhoseLastRailComesBack() {
  for (int turn = 0; turn < 6; ++turn) {
    const int rails = 1 + turn % 3;
    Pair pair({.device = true,
               .rails = rails,
               .fabric = {.threaded = turn % 2 == 1, .overtake = turn >= 3, .seed = static_cast<std::uint32_t>(turn)},
               .recovery_ns = 30'000'000});
    std::uint64_t from = 0;
    const auto exchange = [&](std::uint64_t messages) {
      const bool good = Exchange(pair, from, messages);
      CHECK(good, "turn %d: it stands: %s %s %s", turn, pair.proxies[0]->AwaitFailure(NowNs()).text.c_str(),
            pair.proxies[0]->DescribeLinks().c_str(), pair.proxies[1]->DescribeLinks().c_str());
      from += messages;
      return good;
    };
    const auto until = [&](const std::function<bool(int rank)>& so) {
      for (const std::int64_t start = NowNs(); !so(0) || !so(1);) {
        if (Seconds(start) > kPatience || !exchange(2)) {
          CHECK(false, "turn %d: %s", turn, pair.proxies[0]->DescribeLinks().c_str());
          return false;
        }
      }
      return true;
    };
    exchange(5);
    for (int round = 0; round < 3; ++round) {
      std::uint64_t before[2];
      for (int rank = 0; rank < 2; ++rank) before[rank] = pair.Counter(rank, "tcp_bytes");
      KillAll(pair, 200'000);
      const auto over_tcp = [&](int rank) {
        return pair.Counter(rank, "links_over_tcp") == 1 && pair.Counter(rank, "tcp_bytes") > before[rank] + kSlotBytes;
      };
      if (!until(over_tcp)) return;
      for (int nic = 0; nic < 2 * rails; ++nic) {
        pair.fabric.Change(nic, [](FakeNic& n) {
          n.down_from = ~std::uint64_t{0};
          n.down = false;
        });
      }
      const auto back = static_cast<std::uint64_t>((round + 1) * rails);
      if (!until([&](int rank) { return pair.Counter(rank, "recovered_rails") >= back; })) return;
      if (!until([&](int rank) { return pair.Counter(rank, "links_over_tcp") == 0; })) return;
      std::uint64_t tcp[2], direct[2];
      for (int rank = 0; rank < 2; ++rank) {
        tcp[rank] = pair.Counter(rank, "tcp_bytes");
        direct[rank] = pair.Counter(rank, "direct_bytes");
      }
      exchange(7);
      for (int rank = 0; rank < 2; ++rank) {
        CHECK(pair.Counter(rank, "tcp_bytes") == tcp[rank], "turn %d, round %d: TCP goes on", turn, round);
        CHECK(pair.Counter(rank, "direct_bytes") > direct[rank], "turn %d, round %d: no rail is used", turn, round);
      }
    }
    CHECK(pair.Counter(0, "staged_bytes") == 0, "direct");
    CHECK(pair.fabric.complaints().empty(), "queues held");
  }
}

// What is sent again is written to the same place once more: until that is over, nothing new may be written there by
// another rail. Here what comes again waits in a device that does nothing, until that is given up as well.
void ProxiesThatWaitForWhatComesAgain() {
  bool seen = false;  // a message that arrived, though its sender cannot know, and comes again
  for (int turn = 0; turn < 20 && !seen; ++turn) {
    Pair pair({.device = true, .rails = 3});
    Pair::End& from = pair.end(0, true);
    Pair::End& to = pair.end(1, false);
    const auto send = [&](std::uint64_t m, std::size_t n) {
      to.edge->Post({m, 0x5151 + m * kNumberStep, n});
      from.edge->Post({m, 0x5151 + m * kNumberStep, n});
      std::memset(from.At(m), static_cast<int>(m) + 1, n);
      from.slots.Publish(m);
    };
    const auto within = [](const std::function<bool()>& condition) {
      for (const std::int64_t start = NowNs(); Seconds(start) < kPatience; Nap()) {
        if (condition()) return true;
      }
      return condition();
    };
    send(0, 100);
    CHECK(within([&] { return to.slots.Full(0); }), "%s", pair.proxies[0]->DescribeLinks().c_str());
    pair.fabric.Change(0, [](FakeNic& nic) {  // the first rail, which takes short messages
      nic.fail_after = 1;                     // behind the payload
      nic.fail_delivered = true;
    });
    pair.fabric.Change(1, [](FakeNic& nic) { nic.stalled = true; });  // the next one
    send(1, 100);
    CHECK(within([&] { return pair.Counter(0, "resent") > 0; }), "%s", pair.proxies[0]->DescribeLinks().c_str());
    const bool arrived = within([&] { return to.slots.Full(1); });
    seen = arrived && pair.Counter(0, "lost_rails") == 1;
    send(2, 16 << 10);  // one frame: it takes the third, which has nothing else to do
    CHECK(within([&] { return to.slots.Full(2); }), "%s", pair.proxies[0]->DescribeLinks().c_str());
    CHECK(pair.Counter(0, "lost_rails") == 2, "turn %d: the second was waited for: %s", turn,
          pair.proxies[0]->DescribeLinks().c_str());
  }
  CHECK(seen, "once");
}

}  // namespace hetcoll::testing
