#include "transport/tcp_mending.h"

#include <linux/filter.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp.h"
#include "transport/tcp_sockets.h"
#include "transport/transport.h"

namespace hetcoll {
namespace {

constexpr std::size_t kReadBytes = std::size_t{64} << 10;

// With a reset: the end of the stream would say that this rank ends it.
void CloseHard(int fd) {
  const linger none{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  close(fd);
}

// What comes from here on the kernel neither takes nor acknowledges: the peer may be sending still. Where it cannot be
// had, that is an error of the peer's when it is asked for such bytes.
void StopReceiving(int fd) {
  sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{1, &none};
  static_cast<void>(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program));
}

Fault System(const std::string& what) { return {FaultKind::kSystem, -1, what + ": " + std::strerror(errno)}; }

}  // namespace

// ---- All links ----

Mending::Mending() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw System("eventfd");
}

Mending::~Mending() { Close(); }

void Mending::Close() {
  std::lock_guard lock(mutex_);
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Mending::Lose(LostSocket lost) {
  std::lock_guard lock(mutex_);
  lost_.push_back(std::move(lost));
  if (fd_ >= 0) static_cast<void>(eventfd_write(fd_, 1));
}

std::vector<LostSocket> Mending::TakeLost() {
  std::lock_guard lock(mutex_);
  eventfd_t count;
  if (fd_ >= 0) static_cast<void>(eventfd_read(fd_, &count));
  return std::exchange(lost_, {});
}

void Mending::Add(const SocketId& first, const std::shared_ptr<Sockets>& sockets) {
  std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < sockets->count(); ++i) {
    sockets_[{first.peer, first.channel, first.stripe + i}] = {sockets, i};
  }
}

Mending::Place Mending::Find(const SocketId& id) const {
  std::lock_guard lock(mutex_);
  const auto found = sockets_.find(id);
  return found == sockets_.end() ? Place{} : found->second;
}

bool Mending::IsLost(const SocketId& id) const {
  const Place place = Find(id);
  const auto sockets = place.sockets.lock();
  return sockets != nullptr && sockets->down(place.stripe);
}

std::optional<Came> Mending::Hold(const SocketId& id, std::uint32_t number, bool first) const {
  std::unique_lock lock(mutex_);
  const auto found = sockets_.find(id);
  if (found == sockets_.end()) return {};  // another owner's
  const Place place = found->second;
  lock.unlock();
  const auto sockets = place.sockets.lock();
  return sockets == nullptr ? kLeft : sockets->Hold(place.stripe, number, first);
}

bool Mending::Resume(const SocketId& id, std::uint32_t number, int socket, const Came& came, Resumed& resumed) {
  const Place place = Find(id);
  const auto sockets = place.sockets.lock();
  if (sockets == nullptr || !sockets->Resume(place.stripe, number, socket, came)) return false;
  made.fetch_add(1, std::memory_order_relaxed);
  resumed.push_back(place);
  return true;
}

std::uint64_t Mending::Undelivered(const SocketId& id) const {
  const Place place = Find(id);
  const auto sockets = place.sockets.lock();
  return sockets == nullptr ? 0 : sockets->Undelivered(place.stripe);
}

std::vector<SocketId> Mending::Ids() const {
  std::lock_guard lock(mutex_);
  std::vector<SocketId> found;
  for (const auto& [id, place] : sockets_) found.push_back(id);
  return found;
}

void Mending::GiveUp(const SocketId& id, const std::string& why) const {
  const Place place = Find(id);
  const auto sockets = place.sockets.lock();
  if (sockets != nullptr && sockets->down(place.stripe)) sockets->GiveUp(place.stripe, why);
}

void Mending::Flush(Resumed& resumed, std::vector<pollfd>& fds) {
  std::erase_if(resumed, [&](const Place& place) {
    const auto sockets = place.sockets.lock();
    const int fd = sockets == nullptr ? -1 : sockets->Flush(place.stripe);
    if (fd >= 0) fds.push_back({fd, POLLOUT, 0});
    return fd < 0;
  });
}

// ---- One socket ----

// Gives a socket up, whatever state it is in: nothing comes or goes over it from here on. What the peer was told that
// came is read first.
void Sockets::Break(std::uint32_t stripe, bool held, const std::string& why) {
  Stripe& s = stripes_[stripe];
  if (s.fd < 0) return;
  Drop(s);
  shared_->mending->Lose({Id(stripe), s.tries, held, false, why});
}

void Sockets::Drop(Stripe& s) {
  StopReceiving(s.fd);
  Unread(s, {});
  static_cast<void>(TakeProof(s));
  if (!s.unproved && s.asks > 0) static_cast<void>(ReceiveAgain(s));
  s.again.clear();  // the next socket brings all of it
  for (ssize_t got = s.unproved || s.asks > 0 ? 0 : 1; got > 0;) {
    const std::size_t had = s.saved.size();
    s.saved.resize(had + kReadBytes);
    do got = s.Get(s.saved.data() + had, kReadBytes);
    while (got < 0 && errno == EINTR);
    s.saved.resize(had + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    s.received += s.saved.size() - had;
  }
  Forget(s);
  CloseHard(s.fd);
  s.fd = -1;
  s.tls.reset();
  s.unproved = false;
  s.behind = 0;
  s.owes = 0;
  NoteOdd();
}

// What comes next is `front`, and then what has come already.
void Sockets::Unread(Stripe& s, std::span<const std::byte> front) {
  s.saved.erase(s.saved.begin(), s.saved.begin() + static_cast<std::ptrdiff_t>(s.taken));
  s.saved.insert(s.saved.begin(), front.begin(), front.end());
  s.taken = 0;
}

void Sockets::AskAgain(std::uint32_t stripe, std::size_t n, std::span<const std::byte> behind, const std::string& why) {
  Stripe& s = stripes_[stripe];
  Unread(s, behind);
  const std::uint64_t at = s.received - s.saved.size() - n;
  if (s.fd >= 0) Drop(s);
  s.asks_at = at;
  s.asks = static_cast<std::uint32_t>(n);
  NoteOdd();
  shared_->mending->Lose({Id(stripe), s.tries, false, true, why});
}

std::optional<Came> Sockets::Hold(std::uint32_t stripe, std::uint32_t number, bool first) {
  Stripe& s = stripes_[stripe];
  if (number < s.tries || (number == s.tries && !(first && s.fd < 0))) return std::nullopt;
  s.tries = number;
  Break(stripe, true, "the peer makes it again");
  s.told = {s.received, s.asks_at, s.asks};
  return s.told;
}

bool Sockets::Resume(std::uint32_t stripe, std::uint32_t number, int socket, const Came& came) {
  Stripe& s = stripes_[stripe];
  if (number != s.tries || s.fd >= 0 || s.told != Came{s.received, s.asks_at, s.asks}) return false;
  std::shared_ptr<Tls> tls = Tls::Claim(socket);
  CheckSent(s, socket, came);
  if (checks()) {
    s.sent.Drop(came.total);
  } else {
    s.sent.Forget(came.total);
  }
  CheckSent(s, socket, came);  // what was dropped is no correct peer's to ask for
  s.fd = socket;
  s.tls = std::move(tls);
  s.given_up.clear();
  Ready(socket);
  s.behind = s.sent.total() - came.total;
  s.owes_at = came.spoiled_at;
  s.owes = came.spoiled;
  s.unproved = true;
  ArmReset(s);
  NoteOdd();
  constexpr std::byte kTaken{1};
  if (s.Put(&kTaken, 1) == 1) {
    Flush(stripe);
  } else {
    Lost(stripe, "send");
  }
  return true;
}

// Throws where the peer lacks what is not kept.
void Sockets::CheckSent(const Stripe& s, int socket, const Came& came) const {
  const bool whole = came.spoiled == 0 ||
                     (came.spoiled_at >= s.theirs && s.sent.Holds(came.spoiled_at, came.spoiled_at + came.spoiled));
  if (whole && came.total >= s.theirs && s.sent.Holds(came.total, s.sent.total())) return;
  CloseHard(socket);
  const std::string peer = "rank " + std::to_string(first_.peer);
  if (!whole) {
    throw Fault(
        FaultKind::kCorrupt, first_.peer,
        "TCP: bytes that went to " + peer +
            " were spoiled on the way, and cannot be sent again: so much was sent since that they are not kept");
  }
  throw Fault(FaultKind::kCorrupt, first_.peer,
              "TCP: " + peer + " has " + std::to_string(came.total) + " bytes of a stream of which bytes " +
                  std::to_string(s.sent.base()) + " to " + std::to_string(s.sent.total()) +
                  " can be sent again: something between the two hosts acknowledged what it did not deliver");
}

void Sockets::FailUnsent() const {
  throw Fault(FaultKind::kCorrupt, first_.peer,
              "TCP: rank " + std::to_string(first_.peer) + " says that bytes came right that were not sent");
}

// Reads the byte with which the peer takes a new socket over, if it has to; false where it will not come.
bool Sockets::TakeProof(Stripe& s) {
  if (!s.unproved) return true;
  std::byte taken;
  const ssize_t got = s.Get(&taken, 1);
  s.unproved = got != 1;
  return got == 1 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

void Sockets::Prove(std::uint32_t stripe) {
  if (TakeProof(stripes_[stripe])) {
    NoteOdd();
  } else {
    Break(stripe, false, "it broke before the peer had taken it over");
  }
}

// What was spoiled first: the peer reads nothing else before it.
int Sockets::Flush(std::uint32_t stripe) {
  Stripe& s = stripes_[stripe];
  if (s.fd < 0) return -1;
  while (s.owes + s.behind > 0) {
    std::span<const std::byte> next = s.sent.From(s.owes > 0 ? s.owes_at : s.sent.total() - s.behind);
    if (s.owes > 0) next = next.first(std::min<std::size_t>(s.owes, next.size()));
    const ssize_t sent = SendBytes(s, next.data(), next.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return s.fd;
    if (sent < 0 && (errno == EPIPE || !mends_)) {  // nobody will read it: who sends or receives next is told
      s.owes = 0;
      s.behind = 0;
      break;
    }
    if (sent < 0) {
      Lost(stripe, "send again");
      return -1;
    }
    if (s.owes > 0) {
      s.owes -= static_cast<std::uint32_t>(sent);
      s.owes_at += static_cast<std::uint64_t>(sent);
    } else {
      s.behind -= static_cast<std::uint64_t>(sent);
    }
  }
  NoteOdd();
  return -1;
}

// Whether a call cannot do anything now; errno says EAGAIN then. Throws where it never will.
bool Sockets::Blocks(const Stripe& s) const {
  if (s.fd < 0 && !s.given_up.empty()) throw Fault(FaultKind::kPeerGone, first_.peer, "TCP: " + s.given_up);
  errno = EAGAIN;
  return s.owes + s.behind > 0 || s.fd < 0;
}

// Reads what was asked for again, up to its end; as recv(2). It comes where it was.
ssize_t Sockets::ReceiveAgain(Stripe& s) {
  while (s.again.size() < s.asks) {
    const std::size_t had = s.again.size();
    s.again.resize(s.asks);
    const ssize_t got = s.Get(s.again.data() + had, s.asks - had);
    s.again.resize(had + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got <= 0) return got;
  }
  Unread(s, s.again);
  s.again = {};
  s.asks = 0;
  return 1;
}

ssize_t Sockets::ReceiveOddly(Stripe& s, std::byte* header, std::size_t head, std::byte* data, std::size_t n) {
  if (s.asks > 0 && s.fd >= 0 && !s.unproved) {
    const ssize_t got = ReceiveAgain(s);
    if (got <= 0) return got;
  }
  const std::size_t got = s.asks > 0 ? 0 : std::min(s.saved.size() - s.taken, head + n);
  if (got == 0) {
    static_cast<void>(Blocks(s));
    return -1;
  }
  const std::byte* from = s.saved.data() + s.taken;
  const std::size_t first = std::min(head, got);
  if (first > 0) std::memcpy(header, from, first);
  if (got > first) std::memcpy(data, from + first, got - first);
  s.taken += got;
  if (s.taken == s.saved.size()) {
    s.saved = {};
    s.taken = 0;
    NoteOdd();
  }
  return static_cast<ssize_t>(got);
}

// HETCOLL_FAULT's reset=B: anywhere in the next 2 B - 1 bytes.
void Sockets::ArmReset(Stripe& s) {
  if (shared_->faults.reset == 0) return;
  shared_->dice = shared_->dice * 6364136223846793005u + 1442695040888963407u;
  s.until_reset = 1 + (shared_->dice >> 33) % (2 * shared_->faults.reset - 1);
}

void ResetConnection(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t length = sizeof here;
  socklen_t other = sizeof there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &length) != 0) throw System("getsockname");
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &other) != 0) return;  // it is broken already
  struct {
    nlmsghdr head;
    inet_diag_req_v2 ask;
  } request{};
  request.head = {sizeof request, SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, 0, 0};
  request.ask.sdiag_family = static_cast<std::uint8_t>(here.ss_family);
  request.ask.sdiag_protocol = IPPROTO_TCP;
  request.ask.idiag_states = UINT32_MAX;
  // Without its number the kernel would take the socket that listens at this port, where the connection is no more.
  std::uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) throw System("SO_COOKIE");
  request.ask.id.idiag_cookie[0] = static_cast<std::uint32_t>(cookie);
  request.ask.id.idiag_cookie[1] = static_cast<std::uint32_t>(cookie >> 32);
  const auto fill = [](const sockaddr_storage& address, auto& port, auto& host) {
    if (address.ss_family == AF_INET) {
      const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
      port = v4.sin_port;
      std::memcpy(host, &v4.sin_addr, sizeof v4.sin_addr);
    } else {
      const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
      port = v6.sin6_port;
      std::memcpy(host, &v6.sin6_addr, sizeof v6.sin6_addr);
    }
  };
  fill(here, request.ask.id.idiag_sport, request.ask.id.idiag_src);
  fill(there, request.ask.id.idiag_dport, request.ask.id.idiag_dst);
  const int diag = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (diag < 0) throw System("sock_diag");
  struct {
    nlmsghdr head;
    nlmsgerr error;
    std::byte more[256];
  } reply{};
  const bool told = send(diag, &request, sizeof request, 0) == static_cast<ssize_t>(sizeof request) &&
                    recv(diag, &reply, sizeof reply, 0) > 0;
  const int err = told ? -reply.error.error : errno;
  close(diag);
  errno = err;
  if (err != 0 && err != ENOENT && err != ESTALE) throw System("reset of a TCP connection (it takes CAP_NET_ADMIN)");
}

}  // namespace hetcoll
