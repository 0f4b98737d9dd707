// What the tests of proxies over RDMA share: two ranks, memory that no processor may touch, and what GPUs would do.
#pragma once

#include <random>

#include "fake_copier.h"
#include "harness.h"
#include "mender.h"
#include "proxy/proxy.h"

namespace hetcoll::testing {

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
class ProxyPair {
 public:
  explicit ProxyPair(const Setting& s) : setting(s), fabric(s.fabric) {
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
  ~ProxyPair() {
    mender_.reset();
    for (auto& proxy : proxies) proxy->Close(DeadlineNs(kPatience));
    for (ibv::Mr* mr : mrs_) Fabric::Api().dereg_mr(mr);
    proxies.clear();
    copiers_.clear();  // what they were told to copy, which nobody may want any more, ends before its memory
  }
  ProxyPair(const ProxyPair&) = delete;
  ProxyPair& operator=(const ProxyPair&) = delete;

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
      ibv::Pd* pd = Nic(rank, k).pd;
      constexpr std::size_t kBytes = kSlots * kSlotBytes;
      mrs_.push_back(setting.device ? fabric.RegDmaBuf(pd, e.memory->seen(), kBytes)
                                    : Fabric::Api().reg_mr(pd, e.memory->seen(), kBytes, 7));
      keys.push_back({k, mrs_.back()->lkey, mrs_.back()->rkey});
    }
    std::optional<std::uintptr_t> seen;
    if (setting.device) seen = 0;
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

inline std::size_t SizeOf(std::uint64_t message) {
  constexpr std::size_t sizes[] = {1, 100, kSlotBytes, 16 << 10, 8191, kSlotBytes - 3, 70'000};
  return sizes[message % std::size(sizes)];
}

inline Bytes BytesOf(int rank, std::uint64_t message) {
  return Pattern(SizeOf(message), 2 * static_cast<unsigned>(message) + static_cast<unsigned>(rank));
}

// What the GPUs' streams would do: one fills slots, one empties them. False where nothing moves any more.
inline bool Exchange(ProxyPair& pair, std::uint64_t from, std::uint64_t messages) {
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
      ProxyPair::End& e = pair.end(rank, true);
      for (std::uint64_t m = from; m < from + messages; ++m) {
        e.edge->Post({m, 0x5151 + m * kNumberStep, SizeOf(m)});
        if (!await([&] { return e.slots.Free(m); }) || (m >= kSlots && released(e.slots.Credit(m)))) return;
        std::memcpy(e.At(m), BytesOf(rank, m).data(), SizeOf(m));
        e.slots.Publish(m);
      }
    });
    streams.emplace_back([&, rank] {
      ProxyPair::End& e = pair.end(rank, false);
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

inline void KillAll(ProxyPair& pair, std::uint64_t bytes = 1 << 20) {
  for (int nic = 0; nic < 2 * pair.setting.rails; ++nic) {
    pair.fabric.Change(nic, [&](FakeNic& n) { n.down_from = n.bytes + bytes; });
  }
}

}  // namespace hetcoll::testing
