// A link over RDMA, where the network changes what a correct peer writes into rings, says in immediate words, and sends
// over the control socket: handshake, frames, grants, clear-to-sends, and how rails that were lost come back.
#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "fake_verbs.h"
#include "script.h"
#include "transport/tcp.h"
#include "transport/verbs/frame.h"
#include "transport/verbs/verbs.h"

namespace hetcoll::fuzz {
namespace {

using testing::Fabric;
using testing::FakeNic;

constexpr std::size_t kRing = kLeastRing;
constexpr int kRails = 2;
constexpr std::array<std::size_t, 8> kLengths = {40, 0, 1, 1000, 2049, 9000, kInviteBytes, kInviteBytes + 5000};

// One rank: its devices, its link, and what it has under way on it.
struct Rank {
  Rank(Fabric& fabric, int rank, Integrity integrity, int fd, std::byte* memory, std::size_t nbytes)
      : rank(rank), host(Fabric::Api(), std::make_shared<TcpShared>(integrity), events) {
    std::vector<std::pair<int, std::string>> rails;
    std::vector<RegionKey> keys;
    for (int k = 0; k < kRails; ++k) {
      const NicInfo info = fabric.AddNic("nic");
      mrs.push_back(Fabric::Api().reg_mr(info.pd, memory, nbytes, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite));
      keys.push_back({k, mrs.back()->lkey, mrs.back()->rkey});
      rails.emplace_back(host.AddNic(info), "nic");
    }
    host.regions().Add(reinterpret_cast<std::uintptr_t>(memory), nbytes, keys);
    VerbsLinkOptions options{rank, 1 - rank, 0, kRing};
    options.recovery_ns = 0;
    ends = host.Attach(options, rails, {&fd, 1});
  }
  ~Rank() {
    for (ibv::Mr* mr : mrs) Fabric::Api().dereg_mr(mr);
  }

  Message Due(std::uint64_t number) const {
    const std::size_t total = kLengths[(lengths >> number % 16 * 3) % kLengths.size()];
    return {.signature = 3 + number * kNumberStep, .total = total, .may_lend = number % 2 == 0};
  }
  void Push(const std::byte* from) {
    const Message m = Due(pushed);
    const std::ptrdiff_t n = ends.send->Push(m, out_at, from + out_at, m.total - out_at);
    if (n == kWouldBlock) return;
    out_at += static_cast<std::size_t>(n);
    if (out_at < m.total) return;
    out_at = 0;
    ++pushed;
  }
  void Pull(std::byte* to, bool peeks, bool must_be_right) {
    const Message m = Due(pulled);
    const std::size_t n = m.total - in_at;
    std::ptrdiff_t got = kWouldBlock;
    if (peeks) {
      const View view = ends.recv->Peek(m, in_at, n);
      got = view.n;
      if (got > 0) std::memcpy(to + in_at, view.data, static_cast<std::size_t>(got));
      if (got != kWouldBlock) ends.recv->Consume(static_cast<std::size_t>(got));
    } else {
      got = ends.recv->Pull(m, in_at, to + in_at, n, false);
    }
    if (got == kWouldBlock) return;
    const auto came = static_cast<std::size_t>(got);
    Hold(came <= n, "it took more than there was room for");
    for (std::size_t i = 0; must_be_right && i < came; i += 97) Hold(to[in_at + i] == std::byte{7}, "wrong bytes came");
    std::memset(to + in_at, 0, came);
    in_at += came;
    if (in_at < m.total) return;
    in_at = 0;
    ++pulled;
  }

  int rank;
  std::atomic<bool> events{false};
  VerbsHost host;
  std::vector<ibv::Mr*> mrs;
  LinkEnds ends;
  std::uint64_t lengths = 0;  // of messages, three bits each
  std::uint64_t pushed = 0, pulled = 0;
  std::size_t out_at = 0, in_at = 0;
};

class Play {
 public:
  explicit Play(Script script) : script_(script) {
    const auto integrity = static_cast<Integrity>(script_.Below(3));
    seals_ = script_.Flip();
    const auto [ours, to] = SocketPair();
    const auto [from, theirs] = SocketPair();
    wire_ = std::make_unique<Wire>(from, to);
    const bool early = script_.Flip();  // the handshake is changed, too
    ours_.emplace(fabric_, 0, integrity, ours, memory_.get(), kMemory);
    theirs_.emplace(fabric_, 1, integrity, theirs, memory_.get() + kMemory, 2 * kMemory);
    ours_->lengths = theirs_->lengths = script_.Take<std::uint64_t>() & 0xffffffffffff;
    std::memset(memory_.get() + kMemory, 7, kMemory);
    for (int i = 0; i < 12 && !early; ++i) Honest();
  }
  ~Play() {
    ours_.reset();
    theirs_.reset();
    if (changed_) static_cast<void>(fabric_.complaints());
  }

  void Run() {
    for (int step = 0; step < 150 && !script_.ended() && !failed_; ++step) Guard([&] { Step(); });
    for (int i = 0; i < 12 && !failed_; ++i) Guard([&] { Honest(); });
  }

 private:
  static constexpr std::size_t kMemory = std::size_t{128} << 10;

  // What goes wrong at the correct rank is no matter.
  template <class Do>
  void Guard(Do&& what) {
    try {
      what();
    } catch (const Fault& fault) {
      Hold(changed_, fault.what());
      failed_ = true;
    }
  }

  void Honest() {
    theirs_->host.Service();
    ours_->host.Service();
    wire_->Forward(10'000, [](auto) {});
    wire_->Back(10'000);
    theirs_->Push(memory_.get() + kMemory);
    ours_->Pull(memory_.get(), false, !changed_);
  }

  void Step() {
    switch (script_.Below(11)) {
      case 0:
        theirs_->Push(memory_.get() + kMemory);
        break;
      case 1:
        ours_->Pull(memory_.get(), script_.Flip(), !changed_);
        break;
      case 2:
        ours_->Push(memory_.get());
        break;
      case 3:
        theirs_->Pull(memory_.get() + 2 * kMemory, false, false);  // the other is lent
        break;
      case 4:
        wire_->Forward(1 + script_.Below(9000), [&](auto bytes) { changed_ |= script_.Edit(bytes); });
        break;
      case 5:
        wire_->Back(10'000);
        break;
      case 6:
        ours_->host.Service();
        break;
      case 7:
        theirs_->host.Service();
        break;
      case 8:
        Arm();
        break;
      case 9: {
        const bool down = script_.Flip();
        fabric_.Change(static_cast<int>(script_.Below(2 * kRails)), [&](FakeNic& nic) { nic.down = down; });
        break;
      }
      default: {
        std::vector<std::byte> bytes(16 + script_.Below(3) * 40);
        for (std::size_t at = 0; at < bytes.size(); at += 8) {
          const std::uint64_t value = at == 0 ? script_.Below(8) | script_.Number(kRails) << 32 : script_.Number(kRing);
          std::memcpy(bytes.data() + at, &value, 8);
        }
        wire_->Insert(bytes);
        changed_ = true;
        break;
      }
    }
  }

  // The next writes of one of the peer's devices are changed.
  void Arm() {
    const int nic = kRails + static_cast<int>(script_.Below(kRails));
    left_ = 1 + script_.Below(3);
    fabric_.Change(nic, [&](FakeNic& each) {
      each.change = [&](std::span<std::byte> bytes, std::uint32_t& imm) {
        if (left_ == 0) return;
        --left_;
        if (script_.Flip()) {
          imm = script_.Flip() ? static_cast<std::uint32_t>(script_.Below(4)) << 30 | (imm & 0x3fffffff)
                               : imm ^ static_cast<std::uint32_t>(script_.Number(kRing));
          changed_ = true;
        }
        if (bytes.size() < sizeof(Frame)) return;
        Frame frame;
        std::memcpy(&frame, bytes.data(), sizeof frame);
        if (script_.Flip()) {
          frame.flags = static_cast<std::uint32_t>(script_.Number(kFrameChecked));
          changed_ = true;
        }
        if (script_.Flip()) frame.nbytes = static_cast<std::uint32_t>(script_.Number(kRing)), changed_ = true;
        if (script_.Flip()) frame.seq = script_.Number(frame.seq), changed_ = true;
        std::memcpy(bytes.data(), &frame, sizeof frame);
        changed_ |= script_.Edit(bytes);
        std::memcpy(&frame, bytes.data(), sizeof frame);
        if (seals_) frame.check = frame.Sum();
        std::memcpy(bytes.data(), &frame, sizeof frame);
      };
    });
  }

  Script script_;
  bool seals_ = false;
  Fabric fabric_;
  std::unique_ptr<std::byte[]> memory_ = std::make_unique<std::byte[]>(3 * kMemory);
  std::unique_ptr<Wire> wire_;
  std::optional<Rank> ours_, theirs_;
  std::size_t left_ = 0;
  bool changed_ = false, failed_ = false;
};

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play(hetcoll::fuzz::Script(data, size)).Run();
  return 0;
}
