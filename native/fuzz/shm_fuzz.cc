// Shared memory, where the words that another process may write are anything at any time.
#include <sys/mman.h>

#include <memory>
#include <optional>

#include "base/cpu.h"
#include "script.h"
#include "transport/shm/edge.h"
#include "transport/shm/shm.h"

namespace hetcoll::fuzz {
namespace {

constexpr std::size_t kRing = std::size_t{16} << 10;
constexpr std::size_t kHeaps = std::size_t{1} << 20;
constexpr std::array<std::size_t, 8> kLengths = {40, 0, 1, 41, 1000, 5000, 20'000, 130'000};

// One direction of a channel, between the rank that is under test and a correct one.
struct Stream {
  std::uint64_t pushed = 0, pulled = 0;
  std::size_t out_at = 0, in_at = 0;
};

class Play {
 public:
  explicit Play(Script script) : script_(script) {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    const ShmLayout layout(2, kRing, kHeaps);
    Hold(fd >= 0 && ftruncate(fd, static_cast<off_t>(layout.total_bytes)) == 0, "no memory");
    ShmOptions options;
    options.stores = script_.Flip() ? SlotStores::kClaimed : SlotStores::kCached;
    options.reads = script_.Flip() ? PrivateReads::kNever : PrivateReads::kAlways;
    options.weighs = script_.Flip();
    segments_[0] = std::make_shared<ShmSegment>(fd, layout, options);
    close(fd);
    segments_[1] = segments_[0]->Share();
    for (int me = 0; me < 2; ++me) {
      segments_[static_cast<std::size_t>(me)]->Introduce(me);
      ends_[static_cast<std::size_t>(me)] = MakeShm(*segments_[static_cast<std::size_t>(me)], me, 1 - me, 1 - me);
    }
  }

  void Run() {
    // The correct rank's own troubles with what the script wrote are not looked at.
    for (int step = 0; step < 200 && !script_.ended() && !failed_; ++step) {
      try {
        Step();
      } catch (const Fault& fault) {
        Hold(changed_, fault.what());
        failed_ = true;
      }
    }
  }

 private:
  void Step() {
    const int channel = static_cast<int>(script_.Below(kChannels));
    switch (script_.Below(7)) {
      case 0:
        Push(1, channel);
        break;
      case 1:
        Pull(0, channel, false);
        break;
      case 2:
        Pull(0, channel, true);
        break;
      case 3:
        Push(0, channel);
        break;
      case 4:
        Pull(1, channel, false);
        break;
      case 5:
        Write(channel);
        break;
      default:
        SumOn(channel);
        break;
    }
  }

  static std::size_t Length(int channel, std::uint64_t number) {
    return kLengths[(number * 5 + static_cast<std::uint64_t>(channel)) % kLengths.size()];
  }
  static Message Due(int channel, std::uint64_t number, std::size_t total) {
    return {.signature = 7 + number * kNumberStep,
            .total = total,
            .may_lend = number % 2 == 0,
            .back = number % 3 == 0 ? channel : -1,
            .use = static_cast<Use>(number % 4),
            .mutual = number % 5 < 3,
            .gives = number % 7 == 0};
  }
  Stream& At(int rank, int channel) { return streams_[static_cast<std::size_t>(rank * kChannels + channel)]; }
  LinkEnds& Ends(int rank, int channel) {
    return ends_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(channel)];
  }

  // More of this rank's message. It lies on the rank's heap, which it may lend, or elsewhere.
  void Push(int rank, int channel) {
    Stream& s = At(rank, channel);
    const std::size_t total = Length(channel, s.pushed);
    const Message m = Due(channel, s.pushed, total);
    std::byte* heap = segments_[0]->base() + segments_[0]->layout().HeapOffset(rank);
    const std::byte* data = s.pushed % 4 == 0 ? heap : content_.data();
    const std::ptrdiff_t n = Ends(rank, channel).send->Push(m, s.out_at, data + s.out_at, total - s.out_at);
    if (n != kWouldBlock) Sent(s, static_cast<std::size_t>(n), total);
  }
  static void Sent(Stream& s, std::size_t n, std::size_t total) {
    s.out_at += n;
    Hold(s.out_at <= total, "it sent more than there was");
    if (s.out_at < total) return;
    s.out_at = 0;
    ++s.pushed;
  }

  void Pull(int rank, int channel, bool peeks) {
    Stream& s = At(rank, channel);
    const std::size_t total = Length(channel, s.pulled), left = total - s.in_at;
    const Message m = Due(channel, s.pulled, total);
    RecvEnd& end = *Ends(rank, channel).recv;
    const std::size_t n = script_.Flip() ? std::min(left, script_.Below(5000) + 1) : left;
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(n);
    std::ptrdiff_t got = kWouldBlock;
    if (peeks) {
      const View view = end.Peek(m, s.in_at, n);
      got = view.n;
      if (got == kWouldBlock) return;
      Hold(static_cast<std::size_t>(got) <= n, "more is shown than was asked for");
      if (got > 0) std::memcpy(memory.get(), view.data, static_cast<std::size_t>(got));
      if (script_.Flip()) Write(channel);  // while it is open
      end.Consume(static_cast<std::size_t>(got));
    } else {
      got = end.Pull(m, s.in_at, memory.get(), n, script_.Flip());
      if (got == kWouldBlock) return;
    }
    Hold(static_cast<std::size_t>(got) <= n && (got > 0 || total == 0 || changed_), "nothing came of something");
    s.in_at += static_cast<std::size_t>(got);
    if (s.in_at < total) return;
    s.in_at = 0;
    ++s.pulled;
  }

  // A sum of what this rank has open goes on, perhaps in the same place.
  void SumOn(int channel) {
    Stream &in = At(0, channel), &out = At(0, (channel + 1) % kChannels);
    const std::size_t total = Length(channel, in.pulled);
    RecvEnd& from = *Ends(0, channel).recv;
    SendEnd& to = *Ends(0, (channel + 1) % kChannels).send;
    const View view = from.Peek(Due(channel, in.pulled, total), in.in_at, total - in.in_at);
    if (view.n <= 0) return;
    const auto n = static_cast<std::size_t>(view.n);
    const std::size_t sent = Length((channel + 1) % kChannels, out.pushed);
    if (sent - out.out_at >= n) {
      if (std::byte* place = to.Reserve(content_.data(), n, view.data)) {
        std::memmove(place, view.data, n);
        to.Commit(Due((channel + 1) % kChannels, out.pushed, sent), out.out_at, n);
        Sent(out, n, sent);
      }
    }
    from.Consume(n);
    in.in_at += n;
    if (in.in_at < total) return;
    in.in_at = 0;
    ++in.pulled;
  }

  // What the other process may write of this edge: its lines and slots, its credit, and what it says of itself.
  void Write(int channel) {
    changed_ = true;
    const ShmSegment& segment = *segments_[0];
    const auto of = [&](auto& words) { return std::span(reinterpret_cast<std::byte*>(&words), sizeof words); };
    Edge in(segment, 1, 0, channel), out(segment, 0, 1, channel);
    const std::uint64_t about = script_.Below(3) + At(0, channel).pulled;
    switch (script_.Below(5)) {
      case 0: {
        ShmLine& line = in.line(about);
        Edit(of(line));
        break;
      }
      case 1: {  // as it might be published, but for some of it
        ShmLine& line = in.line(script_.Below(kLines));
        const std::uint64_t number = At(0, channel).pulled;
        line.signature = 7 + number * kNumberStep;
        line.total = static_cast<std::uint32_t>(Length(channel, number));
        line.nbytes = static_cast<std::uint32_t>(script_.Number(line.total)) & 0xffffff;
        line.place = static_cast<std::uint32_t>(script_.Below(8));
        line.where = {script_.Number(segment.layout().total_bytes), script_.Number(segment.layout().HeapOffset(0))};
        line.where.channel = static_cast<std::int8_t>(script_.Number(2));
        line.where.gives = script_.Flip();
        line.where.band = static_cast<std::int8_t>(script_.Number(8));
        if (script_.Flip()) line.stamp.store(script_.Number(line.stamp + 1));
        break;
      }
      case 2:
        Edit(of(*out.credit));
        break;
      case 3:
        Edit(of(segment.owner(1)));
        break;
      default:
        Edit(std::span(in.data, kRing));
        break;
    }
  }
  void Edit(std::span<std::byte> bytes) { script_.Edit(bytes); }

  Script script_;
  std::vector<std::byte> content_ = std::vector<std::byte>(kLengths.back());
  std::array<std::shared_ptr<ShmSegment>, 2> segments_;
  std::array<std::array<LinkEnds, kChannels>, 2> ends_;
  std::array<Stream, 2 * kChannels> streams_{};
  bool changed_ = false, failed_ = false;
};

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play(hetcoll::fuzz::Script(data, size)).Run();
  return 0;
}
