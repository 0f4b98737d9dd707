#include "transport/fault.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/ready.h"

namespace hetcoll {
namespace {

constexpr std::uint64_t kRestNs = 100'000;
constexpr std::uint64_t kReorderNs = 1'000'000;
constexpr std::size_t kItem = 16;  // the largest element

template <class T>
std::optional<T> Number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

[[noreturn]] void Refuse(std::string_view item, const char* wanted) {
  throw std::invalid_argument("wanted " + std::string(wanted) + ", got '" + std::string(item) + "'");
}

// splitmix64
class Dice {
 public:
  explicit Dice(std::uint64_t state) : state_(state) {}

  std::uint64_t Next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  std::uint64_t Below(std::uint64_t n) { return Next() % n; }
  bool Falls(double probability) { return static_cast<double>(Next() >> 11) * 0x1p-53 < probability; }

 private:
  std::uint64_t state_;
};

// What the two ends of one link share.
struct Link {
  void Close() { ends = {}; }
  [[noreturn]] void Refuse() const { throw Fault(FaultKind::kPeerGone, peer, "the link was closed by HETCOLL_FAULT"); }
  SendEnd& send() const {
    if (ends.send == nullptr) Refuse();
    return *ends.send;
  }
  RecvEnd& recv() const {
    if (ends.recv == nullptr) Refuse();
    return *ends.recv;
  }

  LinkEnds ends;
  FaultSpec spec;
  std::size_t grain;
  int peer;
  std::shared_ptr<ReadyFd> ready;
};

// When an end rests, and how much it moves at a time.
class Mood {
 public:
  Mood(const FaultSpec& spec, std::uint64_t seed) : spec_(spec), dice_(seed) {}

  bool Resting() {
    if (Stalls()) {
      stalled_ = true;
      rest_ns_ = static_cast<std::uint64_t>(spec_.hold * 1e9);
    }
    if (rest_ns_ == 0) return false;
    const std::int64_t now = NowNs();
    if (until_ == 0) until_ = now + static_cast<std::int64_t>(rest_ns_);
    if (now < until_) return true;
    rest_ns_ = 0;
    until_ = 0;
    return false;
  }
  bool resting() const { return rest_ns_ > 0; }
  bool stalling() const { return stalled_ && resting(); }
  void Moved(std::size_t n) {
    moved_ += n;
    if (spec_.delay > 0 && dice_.Falls(spec_.delay)) rest_ns_ = 1 + dice_.Below(kRestNs);
  }
  bool HoldBack() {
    if (spec_.reorder <= 0 || !dice_.Falls(spec_.reorder)) return false;
    rest_ns_ = 1 + dice_.Below(kReorderNs);
    return true;
  }
  std::size_t Cut(std::size_t n, std::size_t grain) {
    // Rounded up, so that whole elements move.
    if (spec_.stall > moved_) n = std::min(n, (spec_.stall - moved_ + kItem - 1) / kItem * kItem);
    if (n <= grain || spec_.cut <= 0 || !dice_.Falls(spec_.cut)) return n;
    // Half of the cuts are tiny, so that they fall inside headers and elements.
    const std::size_t most = dice_.Falls(0.5) ? std::min(n, 8 * grain) : n;
    return (1 + dice_.Below(most / grain)) * grain;
  }

 private:
  bool Stalls() const { return spec_.stall > 0 && !stalled_ && moved_ >= spec_.stall; }

  const FaultSpec& spec_;
  Dice dice_;
  std::uint64_t moved_ = 0;
  bool stalled_ = false;
  std::uint64_t rest_ns_ = 0;
  std::int64_t until_ = 0;
};

class FaultySend final : public SendEnd {
 public:
  FaultySend(std::shared_ptr<Link> link, std::uint64_t seed) : link_(std::move(link)), mood_(link_->spec, seed) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    if (mood_.Resting() || !PushCopy()) return kWouldBlock;
    const FaultSpec& spec = link_->spec;
    if (m.device && spec.duplicate > 0) return kOutOfReach;  // what is sent twice is read here
    if (!begun_) {
      begun_ = true;
      ++messages_;
      if (messages_ == spec.close) link_->Close();
      if (mood_.HoldBack()) return kWouldBlock;
    }
    SendEnd& inner = link_->send();
    const std::ptrdiff_t taken =
        messages_ == spec.drop ? static_cast<std::ptrdiff_t>(n) : inner.Push(m, at, data, mood_.Cut(n, link_->grain));
    if (taken < 0) return taken;
    const bool ends = at + static_cast<std::size_t>(taken) == m.total;
    if (messages_ == spec.duplicate) copy_.insert(copy_.end(), data, data + taken);
    if (ends) {
      begun_ = false;
      if (messages_ == spec.duplicate) {
        copied_ = m;
        PushCopy();
      }
    }
    mood_.Moved(static_cast<std::size_t>(taken));
    return taken;
  }

  void Prepare() override {
    if (link_->ends.send != nullptr) link_->ends.send->Prepare();
  }

  void AddPoll(std::vector<pollfd>& fds) const override {
    if (mood_.stalling()) return;  // too long to be looked at all the time
    if (mood_.resting()) fds.push_back(link_->ready->Poll());
    if (link_->ends.send != nullptr) link_->ends.send->AddPoll(fds);
  }
  void Count(Holdings& held) const override {
    if (link_->ends.send != nullptr) link_->ends.send->Count(held);
  }
  void CountCopies(Copies& copies) const override {
    if (link_->ends.send != nullptr) link_->ends.send->CountCopies(copies);
  }
  bool FinalWithoutPeer() const override {
    return !mood_.resting() && link_->ends.send != nullptr && link_->ends.send->FinalWithoutPeer();
  }
  std::size_t Lent() override { return link_->ends.send != nullptr ? link_->ends.send->Lent() : 0; }
  bool Keep() override { return link_->ends.send != nullptr && link_->ends.send->Keep(); }
  void Answered(std::uint64_t messages) override {
    if (link_->ends.send != nullptr) link_->ends.send->Answered(messages);
  }
  void Recall() override {
    if (link_->ends.send != nullptr) link_->ends.send->Recall();
  }
  void Finish() override {
    if (link_->ends.send != nullptr) link_->ends.send->Finish();
  }
  void Abandon() override {
    if (link_->ends.send != nullptr) link_->ends.send->Abandon();
  }

 private:
  // The second time of a duplicated message. False while it is on its way.
  bool PushCopy() {
    while (copied_) {
      const std::ptrdiff_t taken =
          link_->send().Push(*copied_, copied_at_, copy_.data() + copied_at_, copied_->total - copied_at_);
      if (taken == kWouldBlock) return false;
      copied_at_ += static_cast<std::size_t>(taken);
      if (copied_at_ == copied_->total) copied_.reset();
    }
    return true;
  }

  std::shared_ptr<Link> link_;
  Mood mood_;
  std::uint64_t messages_ = 0;
  bool begun_ = false;             // the current message has been counted
  std::optional<Message> copied_;  // to be sent once more
  std::vector<std::byte> copy_;    // its bytes
  std::size_t copied_at_ = 0;
};

class FaultyRecv final : public RecvEnd {
 public:
  FaultyRecv(std::shared_ptr<Link> link, std::uint64_t seed) : link_(std::move(link)), mood_(link_->spec, seed) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    if (mood_.Resting()) return kWouldBlock;
    const std::ptrdiff_t taken = link_->recv().Pull(m, at, dst, mood_.Cut(n, 1), stream);
    if (taken != kWouldBlock) mood_.Moved(static_cast<std::size_t>(taken));
    return taken;
  }

  void Announce(const Message& m, std::byte* dst) override {
    if (link_->ends.recv != nullptr) link_->ends.recv->Announce(m, dst);
  }
  Placement Expose(std::byte* base, std::size_t n) override {
    return link_->ends.recv != nullptr ? link_->ends.recv->Expose(base, n) : Placement{};
  }
  void Hide(bool at_once) override {
    if (link_->ends.recv != nullptr) link_->ends.recv->Hide(at_once);
  }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    cut_ = false;
    if (mood_.Resting()) return {nullptr, kWouldBlock};
    const std::size_t less = mood_.Cut(n, 1);
    const View view = link_->recv().Peek(m, at, less);
    cut_ = less < n && view.n != kWouldBlock;
    return view;
  }

  void Consume(std::size_t n) override {
    link_->recv().Consume(n);
    mood_.Moved(n);
  }

  void AddPoll(std::vector<pollfd>& fds) const override {
    if (mood_.stalling()) return;
    if (Held()) fds.push_back(link_->ready->Poll());
    if (link_->ends.recv != nullptr) link_->ends.recv->AddPoll(fds);
  }
  void CountCopies(Copies& copies) const override {
    if (link_->ends.recv != nullptr) link_->ends.recv->CountCopies(copies);
  }
  bool FinalWithoutPeer() const override {
    return !Held() && link_->ends.recv != nullptr && link_->ends.recv->FinalWithoutPeer();
  }

 private:
  bool Held() const { return mood_.resting() || cut_; }

  std::shared_ptr<Link> link_;
  Mood mood_;
  bool cut_ = false;  // the last view was shorter than it might have been, perhaps than an element
};

}  // namespace

FaultSpec FaultSpec::Parse(const std::string& text) {
  FaultSpec spec;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::string_view name = item.substr(0, item.find('='));
    const std::string_view value = item.substr(std::min(item.size(), name.size() + 1));
    double* often = name == "delay"     ? &spec.delay
                    : name == "short"   ? &spec.cut
                    : name == "reorder" ? &spec.reorder
                                        : nullptr;
    std::uint64_t* which = name == "duplicate"       ? &spec.duplicate
                           : name == "drop"          ? &spec.drop
                           : name == "close"         ? &spec.close
                           : name == "stall"         ? &spec.stall
                           : name == "corrupt"       ? &spec.corrupt
                           : name == "corrupt_every" ? &spec.corrupt_every
                           : name == "truncate"      ? &spec.truncate
                           : name == "reset"         ? &spec.reset
                                                     : nullptr;
    if (often != nullptr) {
      const auto number = Number<double>(value);
      if (!number || !(*number >= 0 && *number <= 1))
        Refuse(item, "delay, short or reorder = a probability from 0 to 1");
      *often = *number;
    } else if (which != nullptr) {
      const auto number = Number<std::uint64_t>(value);
      if (!number || *number == 0) {
        Refuse(item,
               "duplicate, drop or close = a message's number from 1, or "
               "stall, corrupt, corrupt_every, truncate or reset = a byte's");
      }
      *which = *number;
    } else if (name == "hold") {
      const auto number = Number<double>(value);
      if (!number || !(*number > 0 && *number <= 1e6)) Refuse(item, "hold = seconds above 0");
      spec.hold = *number;
    } else if (name == "seed") {
      const auto number = Number<std::uint64_t>(value);
      if (!number) Refuse(item, "seed = a whole number");
      spec.seed = *number;
    } else if (name == "rank") {
      const auto number = Number<int>(value);
      if (!number || *number < 0) Refuse(item, "rank = a rank");
      spec.rank = *number;
    } else {
      Refuse(item,
             "delay, short, reorder, duplicate, drop, close, stall, hold, corrupt, corrupt_every, truncate, reset, "
             "rank or seed, each = a number");
    }
  }
  return spec;
}

LinkEnds FaultInjector::Wrap(LinkEnds ends, std::size_t grain, int peer, int channel) {
  if (!spec_.any() || !Applies()) return ends;
  std::shared_ptr<ReadyFd> ready = ready_.lock();
  if (ready == nullptr) ready_ = ready = std::make_shared<ReadyFd>();
  auto link = std::make_shared<Link>(Link{std::move(ends), spec_, grain, peer, std::move(ready)});
  Dice seeds(spec_.seed ^ (static_cast<std::uint64_t>(rank_) << 40 | static_cast<std::uint64_t>(peer) << 8 |
                           static_cast<std::uint64_t>(channel)));
  auto send = std::make_unique<FaultySend>(link, seeds.Next());
  auto recv = std::make_unique<FaultyRecv>(link, seeds.Next());
  return {std::move(send), std::move(recv)};
}

}  // namespace hetcoll
