#include "transport/shm/slots.h"

#include <algorithm>
#include <string>

#include "base/team.h"
#include "kernels/kernels.h"

namespace hetcoll {
namespace {

constexpr std::size_t kMove = std::size_t{256} << 10;  // what a thread moves before other lanes have their turn

// What a call moves.
std::size_t Most(const Team* team) { return kMove * (team == nullptr ? 1 : team->helpers() + 1); }

void Copy(Team* team, std::byte* dst, const std::byte* src, std::size_t n, bool stream) {
  const Sweep sweep = stream ? Sweep::kAround : Sweep::kPlain;
  if (team == nullptr) return CopyBytes(dst, src, n, sweep);
  team->Share(n, [=](std::size_t begin, std::size_t end) { CopyBytes(dst + begin, src + begin, end - begin, sweep); });
}

void CheckFits(const Message& m, const Slots& slots) {
  if (m.total > slots.slot_bytes) {
    throw Fault(FaultKind::kSystem, -1,
                "a message of " + std::to_string(m.total) + " bytes in slots of " + std::to_string(slots.slot_bytes));
  }
}

class SlotSend final : public SendEnd {
 public:
  SlotSend(const Slots& slots, std::shared_ptr<Team> team) : slots_(slots), team_(std::move(team)) {}

  std::ptrdiff_t Push(const Message& m, std::size_t at, const std::byte* data, std::size_t n) override {
    if (m.total == 0) return 0;
    CheckFits(m, slots_);
    if (!Free()) return kWouldBlock;
    n = std::min(n, Most(team_.get()));
    Copy(team_.get(), slots_.At(number_) + at, data, n, false);
    Commit(m, at, n);
    return static_cast<std::ptrdiff_t>(n);
  }

  std::byte* Reserve(const std::byte* data, std::size_t n, const std::byte* from) override {
    static_cast<void>(from);
    static_cast<void>(data);
    if (!Free() || filled_ + n > slots_.slot_bytes) return nullptr;
    return slots_.At(number_) + filled_;
  }
  void Commit(const Message& m, std::size_t at, std::size_t n) override {
    filled_ = at + n;
    if (filled_ < m.total) return;
    slots_.Publish(number_++);
    filled_ = 0;
  }

  bool Silent() const override { return true; }

 private:
  bool Free() const { return slots_.Free(number_) && !slots_.Aborted(); }

  Slots slots_;
  std::shared_ptr<Team> team_;
  std::uint64_t number_ = 0;  // of the message that is sent
  std::size_t filled_ = 0;    // bytes of it
};

class SlotRecv final : public RecvEnd {
 public:
  SlotRecv(const Slots& slots, std::shared_ptr<Team> team) : slots_(slots), team_(std::move(team)) {}

  std::ptrdiff_t Pull(const Message& m, std::size_t at, std::byte* dst, std::size_t n, bool stream) override {
    const View view = Peek(m, at, n);
    if (view.n <= 0) return view.n;
    Copy(team_.get(), dst, view.data, static_cast<std::size_t>(view.n), stream);
    Consume(static_cast<std::size_t>(view.n));
    return view.n;
  }

  View Peek(const Message& m, std::size_t at, std::size_t n) override {
    if (m.total == 0) return {nullptr, 0};
    CheckFits(m, slots_);
    if (!slots_.Full(number_) || slots_.Aborted()) return {nullptr, kWouldBlock};
    left_ = m.total - at;
    return {slots_.At(number_) + at, static_cast<std::ptrdiff_t>(std::min(n, Most(team_.get())))};
  }
  void Consume(std::size_t n) override {
    if (n == 0) return;
    left_ -= n;
    if (left_ == 0) slots_.Grant(number_++);
  }

  bool Silent() const override { return true; }
  Team* team() const override { return team_.get(); }

 private:
  Slots slots_;
  std::shared_ptr<Team> team_;
  std::uint64_t number_ = 0;  // of the message that is due
  std::size_t left_ = 0;      // bytes of it
};

}  // namespace

std::unique_ptr<SendEnd> MakeSlotSend(const Slots& slots, std::shared_ptr<Team> team) {
  return std::make_unique<SlotSend>(slots, std::move(team));
}

std::unique_ptr<RecvEnd> MakeSlotRecv(const Slots& slots, std::shared_ptr<Team> team) {
  return std::make_unique<SlotRecv>(slots, std::move(team));
}

}  // namespace hetcoll
