// Rails of a GPU's links that come back, and what was lost with them.

#include "proxy_pair.h"

namespace hetcoll::testing {

// Rails of a GPU's link come back: what was lost with them came over the others meanwhile, and their devices, which
// could not read back while they were down, do so again. Then they carry their part again.
void ProxiesWhoseRailsComeBack() {
  ProxyPair pair({.device = true, .rails = 2, .fabric = {.threaded = true}, .recovery_ns = 30'000'000});
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
    ProxyPair pair(
        {.device = true,
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
    ProxyPair pair({.device = true, .rails = 3});
    ProxyPair::End& from = pair.end(0, true);
    ProxyPair::End& to = pair.end(1, false);
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
