// A TCP link with its checksums and with sockets that are made again, where the network changes what a correct peer
// sends, and the peer says anything of what came.
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "script.h"
#include "transport/tcp.h"
#include "transport/tcp_block.h"
#include "transport/tcp_sockets.h"

namespace hetcoll::fuzz {
namespace {

constexpr std::array<std::size_t, 8> kLengths = {40, 0, 1, 1000, 1025, 5000, 20'000, 70'000};
constexpr std::size_t kSteps = 200;

std::vector<std::byte> Content(std::size_t n, std::uint64_t number) {
  std::vector<std::byte> bytes(n, static_cast<std::byte>(number * 7 + 1));
  for (std::size_t i = 0; i < n; i += 61) bytes[i] = static_cast<std::byte>(i / 61 * 131);
  return bytes;
}

// One rank: its link, and what it has under way on it.
struct Rank {
  Rank(int peer, Integrity integrity, bool mends) : shared(std::make_shared<TcpShared>(integrity)), id{peer, 0, 0} {
    if (mends) shared->mending = std::make_shared<Mending>();
  }
  void Connect(std::span<const int> fds) { ends = MakeTcp(MakeSockets(fds, id, shared), shared); }

  Message Due(std::uint64_t number, std::size_t total) const {
    return {.signature = 99 + number * kNumberStep, .total = total};
  }
  std::size_t Length(std::uint64_t number) const { return kLengths[(lengths >> number % 16 * 3) % kLengths.size()]; }

  // Sends more of what it has begun.
  void Push() {
    if (!out) out = Content(Length(pushed), pushed);
    const std::ptrdiff_t n =
        ends.send->Push(Due(pushed, out->size()), out_at, out->data() + out_at, out->size() - out_at);
    if (n == kWouldBlock) return;
    out_at += static_cast<std::size_t>(n);
    if (out_at < out->size()) return;
    ends.send->Keep();  // the memory is given back
    out.reset();
    out_at = 0;
    ++pushed;
  }
  // Receives more of what is due, which must be what was sent.
  void Pull(bool peeks, std::size_t most, bool must_be_right) {
    if (!in) in = Content(Length(pulled), pulled);
    const std::size_t n = std::min(in->size() - in_at, most + 1);
    const auto at = std::make_unique_for_overwrite<std::byte[]>(n);  // no larger, for ASan to see
    std::ptrdiff_t got = kWouldBlock;
    if (peeks) {
      const View view = ends.recv->Peek(Due(pulled, in->size()), in_at, n);
      got = view.n;
      if (got > 0) std::memcpy(at.get(), view.data, static_cast<std::size_t>(got));
      if (got != kWouldBlock) ends.recv->Consume(static_cast<std::size_t>(got));
    } else {
      got = ends.recv->Pull(Due(pulled, in->size()), in_at, at.get(), n, false);
    }
    if (got == kWouldBlock) return;
    const auto came = static_cast<std::size_t>(got);
    Hold(came <= n && (came > 0 || in->empty()), "it took more than there was room for, or nothing");
    if (must_be_right) Hold(came == 0 || std::memcmp(at.get(), in->data() + in_at, came) == 0, "wrong bytes came");
    in_at += came;
    if (in_at < in->size()) return;
    in.reset();
    in_at = 0;
    ++pulled;
  }

  std::shared_ptr<TcpShared> shared;
  SocketId id;
  std::uint64_t lengths = 0;  // of messages, three bits each
  LinkEnds ends;
  std::optional<std::vector<std::byte>> out, in;  // the messages under way
  std::size_t out_at = 0, in_at = 0;
  std::uint64_t pushed = 0, pulled = 0;
  Mending::Resumed resumed;
};

class Play {
 public:
  explicit Play(Script script)
      : script_(script),
        stripes_(1 + script_.Below(2)),
        integrity_(static_cast<Integrity>(script_.Below(3))),
        mends_(!script_.Flip()),
        ours_(1, integrity_, mends_),
        theirs_(0, integrity_, mends_) {
    ours_.lengths = theirs_.lengths = script_.Take<std::uint64_t>() & 0xffffffffffff;
    std::vector<int> our_fds, their_fds;
    for (std::size_t i = 0; i < stripes_; ++i) {
      const auto [ours, to] = SocketPair();
      const auto [from, theirs] = SocketPair();
      our_fds.push_back(ours);
      their_fds.push_back(theirs);
      wires_.push_back(std::make_unique<Wire>(from, to));
    }
    ours_.Connect(our_fds);
    theirs_.Connect(their_fds);
  }

  void Run() {
    try {
      for (std::size_t step = 0; step < kSteps && !script_.ended(); ++step) Step();
      for (int i = 0; i < 20; ++i) Honest(i);
    } catch (const Fault& fault) {
      Hold(changed_, fault.what());
    }
  }

 private:
  Wire& Pick() { return *wires_[script_.Below(wires_.size())]; }

  void Honest(int round) {
    theirs_.Push();
    for (auto& wire : wires_) wire->Forward(70'000, [](auto) {});
    ours_.Pull(round % 2 == 1, 70'000, !changed_);
  }

  void Step() {
    switch (script_.Below(10)) {
      case 0:
        theirs_.Push();
        break;
      case 1:
        Pick().Forward(1 + script_.Below(100'000), [](auto) {});
        break;
      case 2:
        Pick().Forward(1 + script_.Below(100'000), [&](auto bytes) { Change(bytes); });
        break;
      case 3:
        ours_.Pull(script_.Flip(), script_.Below(100'000), !changed_);
        break;
      case 4:
        ours_.Push();
        break;
      case 5:
        Pick().Back(1 + script_.Below(100'000));
        break;
      case 6:
        Break();
        break;
      case 7: {
        std::vector<std::byte> bytes(script_.Below(60));
        for (std::byte& b : bytes) b = script_.Take<std::byte>();
        Pick().Insert(bytes);
        changed_ |= !bytes.empty();
        break;
      }
      case 8:
        Pick().End();
        changed_ = true;
        break;
      default:
        for (Rank* rank : {&ours_, &theirs_}) {
          if (mends_) Mending::Flush(rank->resumed, fds_), fds_.clear();
        }
        break;
    }
  }

  // Perhaps as a header, with the right checksum: from a peer that says other things than a correct one.
  void Change(std::span<std::byte> bytes) {
    BlockHeader header;
    if (!script_.Flip() || bytes.size() < BlockHeader::kChecked) {
      changed_ |= script_.Edit(bytes);
      return;
    }
    std::memcpy(&header, bytes.data(), BlockHeader::kChecked);
    const bool right = header.check == header.Sum();
    changed_ |= script_.Edit(std::as_writable_bytes(std::span(&header, 1)).first(BlockHeader::kChecked));
    if (right) header.check = header.Sum();
    std::memcpy(bytes.data(), &header, BlockHeader::kChecked);
  }

  // A connection is lost and made again; each end is told what came to the other one.
  void Break() {
    if (!mends_) return;
    const auto stripe = static_cast<std::uint32_t>(script_.Below(stripes_));
    ++tries_;
    const SocketId at_ours{1, 0, stripe}, at_theirs{0, 0, stripe};
    auto came_here = ours_.shared->mending->Hold(at_ours, tries_, true);
    auto came_there = theirs_.shared->mending->Hold(at_theirs, tries_, false);
    if (!came_here || !came_there) return;
    Came told = *came_there;
    std::uint64_t* words[] = {&told.total, &told.spoiled_at};
    for (std::uint64_t* word : words) {
      if (!script_.Flip()) continue;
      *word = script_.Number(*word);
    }
    if (script_.Flip()) told.spoiled = static_cast<std::uint32_t>(script_.Number(told.spoiled));
    changed_ |= told != *came_there;
    const auto [ours, to] = SocketPair();
    const auto [from, theirs] = SocketPair();
    wires_[stripe] = std::make_unique<Wire>(from, to);
    ours_.shared->mending->Resume(at_ours, tries_, ours, told, ours_.resumed);
    theirs_.shared->mending->Resume(at_theirs, tries_, theirs, *came_here, theirs_.resumed);
  }

  Script script_;
  std::size_t stripes_;
  Integrity integrity_;
  bool mends_;
  Rank ours_, theirs_;
  std::vector<std::unique_ptr<Wire>> wires_;
  std::uint32_t tries_ = 0;
  bool changed_ = false;  // something that came is not what the peer sent
  std::vector<pollfd> fds_;
};

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play(hetcoll::fuzz::Script(data, size)).Run();
  return 0;
}
