// Proxies over fake RDMA devices: slots in memory that no processor may touch, and in the host's.

#include "proxy_pair.h"

namespace hetcoll::testing {
namespace {

void Well(const Setting& setting, const char* what) {
  ProxyPair pair(setting);
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
      ProxyPair pair(base);
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
  ProxyPair pair(setting);
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
  ProxyPair pair({.device = true, .copy_fails = 3});
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
  ProxyPair pair({.device = true, .prepare = [](Fabric& fabric) {
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
  ProxyPair pair({.device = true,
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
    ProxyPair pair({});
    ProxyPair::End& from = pair.end(0, true);
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
  ProxyPair pair({.device = true, .rails = 2, .prepare = [](Fabric& fabric) { fabric.nic(2).no_reads = true; }});
  CHECK(Exchange(pair, 0, 60), "it stands: %s", pair.proxies[1]->DescribeLinks().c_str());
  const std::string links = pair.proxies[1]->DescribeLinks();
  CHECK(pair.Counter(1, "lost_rails") == 1 && links.find("reading back") != std::string::npos, "%s", links.c_str());
  CHECK(pair.Counter(0, "resent") > 0, "%s", links.c_str());
}

}  // namespace hetcoll::testing
