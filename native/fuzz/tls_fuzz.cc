// An encrypted connection, where the network changes records, and where the other end does not have the key: nothing
// that is read is anything but what was sent, by somebody who has the key.
#include <cerrno>
#include <memory>

#include "script.h"
#include "transport/tls.h"

namespace hetcoll::fuzz {
namespace {

std::byte At(std::uint64_t place) { return static_cast<std::byte>(place * 37 + (place >> 9)); }

// One end, and how much it has sent and received.
struct End {
  End(int fd, const TlsKey& key, bool server, bool ahead, std::uint64_t rekey) : tls(fd, key, server, ahead, rekey) {}

  // What was offered and did not go is offered again.
  void Send(std::size_t more) {
    const std::size_t n = std::max(more, offered);
    std::vector<std::byte> bytes(n);
    for (std::size_t i = 0; i < n; ++i) bytes[i] = At(sent + i);
    const std::size_t first = n / 3;
    const iovec pieces[] = {{bytes.data(), first}, {bytes.data() + first, n - first}};
    const ssize_t went = tls.Send(pieces);
    Hold(went <= static_cast<ssize_t>(n), "more was sent than there was");
    if (went > 0) sent += static_cast<std::uint64_t>(went);
    offered = n - static_cast<std::size_t>(std::max<ssize_t>(went, 0));
    if (went < 0 && errno == EAGAIN) return;
    failed |= went < 0;
  }
  void Receive(std::size_t n) {
    const auto bytes = std::make_unique_for_overwrite<std::byte[]>(n);
    const ssize_t got = tls.Receive(bytes.get(), n);
    Hold(got <= static_cast<ssize_t>(n), "more came than there was room for");
    for (ssize_t i = 0; i < got; ++i) Hold(bytes[static_cast<std::size_t>(i)] == At(received++), "other bytes came");
    if (got < 0 && errno == EAGAIN) return;
    failed |= got < 0;
  }

  Tls tls;
  std::size_t offered = 0;
  std::uint64_t sent = 0, received = 0;
  bool failed = false;
};

void Play(Script script) {
  const auto [ours, to] = SocketPair();
  const auto [from, theirs] = SocketPair();
  Wire wire(from, to);
  TlsKey key{}, other{};
  other[0] = std::byte{1};
  const bool strange = script.Below(4) == 1, serves = script.Flip(), ahead = script.Flip();
  const std::uint64_t rekey = script.Flip() ? 3 : Tls::kRecords;
  bool changed = false;
  {
    End here(ours, key, serves, ahead, rekey), there(theirs, strange ? other : key, !serves, false, rekey);
    const auto honest = [&] {
      there.Send(500);
      here.Send(300);
      wire.Forward(100'000, [](auto) {});
      wire.Back(100'000);
      here.Receive(20'000);
      there.Receive(20'000);
    };
    for (int i = 0, before = script.Flip() ? 0 : 4; i < before; ++i) honest();
    for (int step = 0; step < 60 && !script.ended(); ++step) {
      switch (script.Below(8)) {
        case 0:
          there.Send(1 + script.Below(40'000));
          break;
        case 1:
          here.Receive(1 + script.Below(40'000));
          break;
        case 2:
          here.Send(1 + script.Below(40'000));
          break;
        case 3:
          wire.Forward(1 + script.Below(40'000), [](auto) {});
          break;
        case 4:
          wire.Forward(1 + script.Below(3000), [&](auto bytes) { changed |= script.Edit(bytes); });
          break;
        case 5: {
          // How records begin: their kind, version and length.
          std::byte bytes[64] = {static_cast<std::byte>(20 + script.Below(5)), std::byte{3}, std::byte{3}};
          for (std::size_t i = 3; i < sizeof bytes; ++i) bytes[i] = static_cast<std::byte>(script.Take<std::uint8_t>());
          wire.Insert(std::span(bytes).first(5 + script.Below(sizeof bytes - 5)));
          changed = true;
          break;
        }
        case 6:
          wire.Back(100'000);
          there.Receive(40'000);
          break;
        default:
          if (script.Below(8) == 1) wire.End(), changed = true;
          break;
      }
    }
    for (int i = 0; i < 4; ++i) honest();
    Hold(!strange || here.received == 0, "something was taken from who does not have the key");
    Hold(strange || changed || (!here.failed && here.received > 0), "nothing came of what was not changed");
  }
  close(ours);
  close(theirs);
}

}  // namespace
}  // namespace hetcoll::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hetcoll::fuzz::Play({data, size});
  return 0;
}
