// One-sided messages, where the other rank asks for anything and answers anything.
#include <memory>
#include <utility>

#include "host/windows.h"
#include "script.h"
#include "transport/tcp.h"

namespace hetcoll::fuzz {
namespace {

constexpr std::uint64_t kIdentity = 0x1234567;
constexpr std::size_t kWindowBytes = 4096;
constexpr std::size_t kMostSent = 300;  // bytes of one message of the other rank's

// With room for little, so that what is asked has to wait.
std::pair<LinkEnds, LinkEnds> Linked() {
  const auto [a, b] = SocketPair();
  const int least = 0;
  setsockopt(a, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
  const auto end = [](int fd, int peer) {
    auto shared = std::make_shared<TcpShared>();
    return MakeTcp(MakeSockets({&fd, 1}, {peer, 0, 0}, shared), shared);
  };
  return {end(a, 1), end(b, 0)};
}

// The other rank: it says what the script has it say, as messages that a link takes.
class Stranger {
 public:
  explicit Stranger(std::array<LinkEnds, 2> links) : links_(std::move(links)) {}

  void Say(Script& script, int channel) {
    const auto c = static_cast<std::size_t>(channel);
    // Of a request's head, a table's row, an answer, a Placement; or any.
    constexpr std::array<std::size_t, 6> kLengths = {32, 24, 4, 48, 56, 0};
    const std::size_t choice = script.Below(8);
    const std::size_t n =
        choice < kLengths.size() ? kLengths[choice] * (choice == 1 ? 1 + script.Below(3) : 1) : script.Below(kMostSent);
    std::vector<std::byte> bytes(n);
    for (std::size_t at = 0; at < n;) {
      const std::size_t field = std::min(n - at, n <= 32 && at < 16 ? std::size_t{4} : std::size_t{8});
      const std::uint64_t value = script.Number(kWindowBytes);
      std::memcpy(bytes.data() + at, &value, field);
      at += field;
    }
    const Message m{.signature = kIdentity + numbers_[c]++ * kNumberStep, .total = n};
    static_cast<void>(links_[c].send->Push(m, 0, bytes.data(), n));  // 208 KiB fit: more is never under way
  }
  void Leave(int channel) { links_[static_cast<std::size_t>(channel)].send->Finish(); }

 private:
  std::array<LinkEnds, 2> links_;
  std::array<std::uint64_t, 2> numbers_{};
};

void Play(Script script) {
  Links links(2);
  std::array<LinkEnds, 2> theirs;
  for (int channel = 0; channel < 2; ++channel) {
    auto [ours, other] = Linked();
    links.tx(1, channel).end = std::move(ours.send);
    links.rx(1, channel).end = std::move(ours.recv);
    theirs[static_cast<std::size_t>(channel)] = std::move(other);
  }
  Stranger stranger(std::move(theirs));
  Windows windows(0, 2, kIdentity);
  const auto memory = std::make_unique<std::byte[]>(kWindowBytes);
  windows.Add(1, memory.get(), kWindowBytes, 2);
  if (script.Flip()) windows.Place(1, 1);
  std::vector<std::pair<std::shared_ptr<Transfer>, std::unique_ptr<std::byte[]>>> asked;
  const auto ask = [&](bool puts) {
    const std::size_t n = script.Flip() ? kAskedBytes : 1 + script.Below(300), pieces = 1 + script.Below(3);
    auto here = std::make_unique<std::byte[]>(n);
    std::vector<Piece> list(pieces, Piece{0, script.Below(kWindowBytes), n});
    if (pieces > 1) list.back().nbytes = n / 2;
    auto transfer = puts ? windows.Put(1, 1, here.get(), list, static_cast<int>(script.Below(3)) - 1)
                         : windows.Get(1, 1, here.get(), list);
    asked.emplace_back(std::move(transfer), std::move(here));
  };
  try {
    for (int turn = 0; turn < 100 && !script.ended(); ++turn) {
      switch (script.Below(8)) {
        case 0:
        case 1:
          stranger.Say(script, kRequests);
          break;
        case 2:
          stranger.Say(script, kAnswers);
          break;
        case 3:
          ask(script.Flip());
          break;
        case 4:
          windows.Close(1);
          break;
        case 5:
          stranger.Leave(static_cast<int>(script.Below(2)));
          break;
        default:
          break;
      }
      if (!script.Flip()) windows.Pass(links);
      // Whoever was told that its call is over writes to its memory again, or gives it back.
      std::erase_if(asked, [](const auto& each) { return each.first->state != Pending::State::kRunning; });
    }
    windows.Pass(links);
  } catch (const Fault&) {
  }
  windows.Drop();
}

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play({data, size});
  return 0;
}
